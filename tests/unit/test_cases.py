"""Prompt sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_dflash.bench import cases
from llama_dflash.bench.cases import Case
from llama_dflash.errors import UsageError


@pytest.mark.parametrize("name", ["accept", "tests"])
def test_own_sets_have_twenty_different_prompts(name: str) -> None:
    loaded = cases.load(name)
    assert len(loaded) == 20
    assert len({c.name for c in loaded}) == 20
    assert len({c.text for c in loaded}) == 20
    assert all(c.text.strip() for c in loaded)


def test_own_sets_share_nothing() -> None:
    accept, tests = cases.load("accept"), cases.load("tests")
    assert not {c.name for c in accept} & {c.name for c in tests}
    assert not {c.text for c in accept} & {c.text for c in tests}


def test_humaneval() -> None:
    loaded = cases.load("humaneval")
    assert len(loaded) == 164
    assert loaded[0].name == "HumanEval/0"
    assert loaded[0].text.startswith("from typing import List")
    assert "canonical" not in loaded[0].text


@pytest.mark.parametrize("n", [1, 5, 20])
def test_the_first_prompts_are_taken(n: int) -> None:
    assert cases.load("accept", n) == cases.load("accept")[:n]


@pytest.mark.parametrize("n", [0, 21, -1])
def test_a_number_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match=rf"--prompts is {n}, expected 1\.\.20 for the set 'accept'"):
        cases.load("accept", n)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"prompts": [{"name": "x", "text": "def f():"}, {"name": "2", "text": "x"}]}))
    assert cases.load(str(path)) == [Case("x", "def f():"), Case("2", "x")]
    with pytest.raises(UsageError, match=r"expected 1\.\.2"):
        cases.load(str(path), 3)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"prompts": 3}', '{"prompts": [{"name": "x"}]}', '{"prompts": ["x"]}'])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "set.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is no prompt set") as caught:
        cases.load(str(path))
    assert str(path) in str(caught.value)


def test_bytes_are_no_prompt_set(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UnicodeDecodeError"):
        cases.load(str(path))


@pytest.mark.parametrize("source", ["nosuch", "Accept", ".", ""])
def test_an_unknown_set_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="neither a set nor a file"):
        cases.load(source)
