"""Inputs that once got through or ended in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_dflash import memory
from llama_dflash.bench import cases
from llama_dflash.bench.report import require_writable
from llama_dflash.cli import main
from llama_dflash.errors import DFlashError, UsageError


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        ([], "the list is empty"),
        ([{"name": "a", "text": "x"}, {"name": "a", "text": "y"}], "a name stands twice"),
        ([{"name": "a", "text": ""}], "a text is empty"),
        ([{"name": "a"}], "KeyError"),
    ],
)
def test_prompt_sets_that_cannot_be_measured_are_refused(tmp_path: Path, prompts: list[dict[str, str]], why: str) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"prompts": prompts}))
    with pytest.raises(UsageError, match=why):
        cases.load(str(path))


def test_a_pasted_prompt_is_no_file_name() -> None:
    with pytest.raises(UsageError, match="neither a set nor a file"):
        cases.load("def f():\n" * 200)


@pytest.mark.parametrize("text", ["1e12", "-5", "lots", ""])
def test_a_context_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a whole number"):
        memory.check_context([], ["-c", text])


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_temperature_that_is_no_number_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["bench", "--temperature", value])
    assert e.value.code == 2
    assert "expected a finite number" in capsys.readouterr().err


def test_the_result_folder_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DFlashError, match="expected a folder for results"):
        require_writable(tmp_path / "file" / "sub")
    require_writable(tmp_path / "new" / "sub")
    assert list((tmp_path / "new" / "sub").iterdir()) == []


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == 2
    assert "Usage: llama-dflash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (["run", "-p", "--", "-n", "3"], "unexpected argument"),
        (["run", "-p", "\udcff abc"], "-p is not UTF-8"),
        (["run", "-p", "/exit"], "a command of llama-cli's chat"),
        (["run", "-p", "x", "--", "-p", "y"], "-p stands behind '--'"),
        (["run", "-p", "x", "-c", "16"], "--ctx-size is 16, expected more than 16"),
        (["run", "-p", "x", "--", "-ub", "16"], "--ubatch-size is 16, expected more than 16"),
        (["run", "-p", "x", "--budget", "31", "-c", "32"], "--ctx-size is 32, expected more than 32: a round verifies 32 tokens at once"),
        (["run", "-p", "x", "--budget", "4", "-c", "16"], "--ctx-size is 16, expected more than 16"),
        (["serve", "--budget", "31", "--", "-b", "20"], "choose a larger one, or a smaller --budget and --n-max"),
        (["run", "-p", "x", "-m", ""], "the path is empty"),
        (["bench", "--modes", "ar", "--n-max", "3"], "--modes is ar, but --n-max is 3, expected a mode that drafts; add"),
        (["bench", "--modes", "ar", "--rollback", "replay"], "--modes is ar, but --rollback is replay, expected a mode that drafts"),
        (["bench", "--modes", "ar,chain", "--budget", "4"], "--modes is ar,chain, but --budget is 4, expected mode tree; use"),
        (["bench", "--top-k", "4"], "--modes is ar,chain, but --top-k is 4, expected mode tree"),
        (["verify", "--spine", "4"], "--mode is chain, but --spine is 4, expected mode tree; use --mode tree, or leave it out"),
        (["bench", "--json", "--markdown"], "expected one"),
        (["bench", "--plot", "x.xyz"], "ends in .png"),
        (["bench", "--threads", "100000"], "is not in the range"),
        (["serve", "--host", ""], "the host is empty"),
        (["serve", "--host", "no.such.host.invalid"], "does not resolve"),
    ],
)
def test_one_line_for_each(args: list[str], want: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(args)
    out, err = capsys.readouterr()
    assert e.value.code in (1, 2)
    assert out == ""
    assert err.startswith("llama-dflash: error: ")
    assert len(err.splitlines()) == 1
    assert want in err
