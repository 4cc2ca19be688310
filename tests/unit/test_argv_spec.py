"""Command lines, and the resolution of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.argv import cli_argv, model_flags, server_argv
from llama_dflash.errors import ModelFileError, PairingError, UsageError
from llama_dflash.spec import MODES, RunConfig

AR = RunConfig(Path("t.gguf"))
CHAIN = RunConfig(Path("t.gguf"), Path("d.gguf"), 15)
TREE = RunConfig(Path("t.gguf"), Path("d.gguf"), 15, budget=22, top_k=8, spine=0, rollback="replay")
CHAIN_FLAGS = ["-m", "t.gguf", "-md", "d.gguf", "--spec-type", "draft-dflash", "--spec-draft-n-max", "15"]


def test_model_flags() -> None:
    assert model_flags(AR) == ["-m", "t.gguf"]
    assert model_flags(CHAIN) == CHAIN_FLAGS


def test_model_flags_of_trees() -> None:
    tree = ["--spec-draft-tree", "22", "--spec-draft-top-k", "8", "--spec-draft-spine", "0", "--spec-rollback", "replay"]
    assert model_flags(TREE) == [*CHAIN_FLAGS, *tree]
    assert model_flags(replace(CHAIN, budget=4)) == [*CHAIN_FLAGS, "--spec-draft-tree", "4"]
    assert model_flags(replace(CHAIN, rollback="snapshot")) == [*CHAIN_FLAGS, "--spec-rollback", "snapshot"]
    assert server_argv(TREE, "h", 1)[: len(CHAIN_FLAGS) + 8] == cli_argv(TREE) == [*CHAIN_FLAGS, *tree]


def test_server_argv() -> None:
    assert server_argv(AR, "127.0.0.1", 8080) == ["-m", "t.gguf", "--host", "127.0.0.1", "--port", "8080"]
    assert server_argv(CHAIN, "::1", 1) == [*CHAIN_FLAGS, "--host", "::1", "--port", "1"]


def test_extra_flags_go_last_and_so_win() -> None:
    argv = server_argv(CHAIN, "h", 1, exact=True, extra=("-fa", "off", "--port", "2"))
    assert argv == [*CHAIN_FLAGS, "--host", "h", "--port", "1", "-fa", "on", "-fa", "off", "--port", "2"]
    assert cli_argv(AR, n_predict=3, exact=True, extra=["-n", "9"]) == ["-m", "t.gguf", "-n", "3", "-fa", "on", "-n", "9"]


def test_cli_argv_chats_without_a_prompt() -> None:
    assert cli_argv(CHAIN) == CHAIN_FLAGS


@pytest.mark.parametrize("prompt", ["hi", "", "-n 5", "a\\nb", "x y\n"])
def test_cli_argv_passes_a_prompt_as_it_is(prompt: str) -> None:
    assert cli_argv(AR, prompt=prompt) == ["-m", "t.gguf", "-p", prompt, "--no-escape", "--single-turn", "--simple-io"]


def test_cli_argv_options() -> None:
    assert cli_argv(AR, n_predict=0) == ["-m", "t.gguf", "-n", "0"]
    raw = cli_argv(AR, prompt="p", raw=True)
    assert raw[-2] == "--chat-template"
    assert "add_generation_prompt" not in raw[-1]
    assert "message" in raw[-1]
    assert cli_argv(AR, exact=True)[-2:] == ["-fa", "on"]


def test_mode() -> None:
    assert (AR.mode, CHAIN.mode, TREE.mode) == MODES


def test_rows_per_round() -> None:
    """A chain and the token before it, or a tree and its root; a pass must hold both, as rounds may draft either."""
    rows = [replace(CHAIN, budget=budget).rows_per_round for budget in (None, 1, 15, 16, 255)]
    assert [AR.rows_per_round, *rows] == [1, 16, 16, 16, 17, 256]


@pytest.fixture
def small_pair(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> tuple[Path, Path]:
    """A pair with the embedded draft's block size that is read faster."""
    return make_target(), make_draft(block_size=16)


def test_checked_resolves_n_max_to_the_longest_draft(pair: tuple[Path, Path]) -> None:
    assert RunConfig(*pair).checked() == RunConfig(*pair, 15)


@pytest.mark.parametrize("n_max", [1, 7, 15])
def test_checked_keeps_n_max(small_pair: tuple[Path, Path], n_max: int) -> None:
    assert RunConfig(*small_pair, n_max).checked().n_max == n_max


@pytest.mark.parametrize("n_max", [0, 16, -1])
def test_checked_refuses_n_max(small_pair: tuple[Path, Path], n_max: int) -> None:
    with pytest.raises(UsageError, match=rf"n_max is {n_max}, expected 1\.\.15 for a draft of block size 16"):
        RunConfig(*small_pair, n_max).checked()


def test_checked_takes_the_limit_from_the_draft(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> None:
    target, draft = make_target(), make_draft()
    assert RunConfig(target, draft).checked().n_max == 7
    with pytest.raises(UsageError, match=r"expected 1\.\.7"):
        RunConfig(target, draft, 8).checked()


def test_checked_without_a_draft_changes_nothing(pair: tuple[Path, Path]) -> None:
    config = RunConfig(pair[0])
    assert config.checked() == config


def test_checked_refuses_files(small_pair: tuple[Path, Path], make_target: Callable[..., Path], tmp_path: Path) -> None:
    target, draft = small_pair
    with pytest.raises(ModelFileError, match="no such file"):
        RunConfig(tmp_path / "none").checked()
    with pytest.raises(ModelFileError, match="no such file"):
        RunConfig(target, tmp_path / "none").checked()
    with pytest.raises(ModelFileError, match="expected a target"):
        RunConfig(draft).checked()
    with pytest.raises(ModelFileError, match="expected a target"):
        RunConfig(draft, target).checked()
    with pytest.raises(PairingError, match="does not fit"):
        RunConfig(make_target("other.gguf", embedding_length=64), draft).checked()


TREE_OPTIONS = [
    {"budget": 1},
    {"budget": 255, "top_k": 1, "spine": 0},
    {"budget": 15, "top_k": 64, "spine": 15, "rollback": "replay"},
    {"rollback": "snapshot"},
    {"rollback": "replay"},
]


@pytest.mark.parametrize("options", TREE_OPTIONS, ids=str)
def test_checked_keeps_the_options_of_trees(small_pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    # The depth of a tree is the draft's whole block, whatever the budget.
    assert RunConfig(*small_pair, **options).checked() == RunConfig(*small_pair, 15, **options)


REFUSED = [
    ({"budget": 0}, r"budget is 0, expected 1\.\.255 nodes: with its root a tree fills at most 256 rows; 15 is "),
    ({"budget": -1}, r"budget is -1, expected 1\.\.255 nodes"),
    ({"budget": 256}, r"budget is 256, expected 1\.\.255 nodes"),
    ({"budget": 4, "top_k": 0}, r"top_k is 0, expected 1\.\.64 children per node; leave it out"),
    ({"budget": 4, "top_k": 65}, r"top_k is 65, expected 1\.\.64 children"),
    ({"budget": 4, "spine": -1}, r"spine is -1, expected 0\.\.15, the depth of the tree; leave it out"),
    ({"budget": 4, "spine": 16}, r"spine is 16, expected 0\.\.15"),
    ({"budget": 4, "spine": 4, "n_max": 3}, r"spine is 4, expected 0\.\.3"),
    ({"budget": 4, "n_max": 16}, r"n_max is 16, expected 1\.\.15"),
    ({"top_k": 4}, "top_k is 4 without a budget, expected a draft tree; give a budget, or leave it out"),
    ({"spine": 0}, "spine is 0 without a budget, expected a draft tree"),
    ({"budget": 7, "rollback": "snapshot"}, "rollback is snapshot with a budget of 7, expected replay: a tree keeps no snapshots; leave"),
    ({"rollback": "auto"}, "rollback is 'auto', expected replay or snapshot; leave it out"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_checked_refuses_the_options_of_trees(small_pair: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        RunConfig(*small_pair, **options).checked()


@pytest.mark.parametrize("options", [{"budget": 4}, {"top_k": 4}, {"spine": 4}, {"rollback": "replay"}], ids=str)
def test_checked_refuses_the_options_of_drafts_without_one(make_target: Callable[..., Path], options: dict[str, Any]) -> None:
    (name, value), = options.items()
    with pytest.raises(UsageError, match=f"^{name} is {value} but there is no draft, expected one; give a draft"):
        RunConfig(make_target(), **options).checked()


@pytest.mark.parametrize(("tensor", "draft_format"), [("selector_hidden.weight", "DFlash2"), ("markov_w1.weight", "DSpark")])
def test_checked_takes_trees_by_the_drafts_format(
    make_target: Callable[..., Path], make_draft: Callable[..., Path], tensor: str, draft_format: str
) -> None:
    config = RunConfig(make_target(), make_draft(shapes={tensor: (32, 8)}), budget=15)
    if draft_format == "DFlash2":
        assert (config.checked().mode, config.checked().spec_type) == ("tree", "draft-dflash")
        return
    assert replace(config, budget=None, rollback="replay").checked().spec_type == "draft-dspark"
    expected = "budget is 15 but draft.gguf is a DSpark draft, expected DFlash or DFlash2 for a tree; leave the budget out for a chain"
    with pytest.raises(UsageError, match=f"^{expected}"):
        config.checked()


@pytest.mark.parametrize(
    ("config", "effective", "expected"),
    [
        (AR, {"mode": "ar", "reason": "not requested"}, ""),
        (AR, {"mode": "unknown"}, ""),
        (CHAIN, {"mode": "chain", "rollback": "snapshot"}, ""),
        (TREE, {"mode": "tree", "rollback": "replay"}, ""),
        (CHAIN, {"mode": "unknown", "reason": "it does not tell"}, "the server runs in mode unknown, expected chain: it does not tell"),
        (CHAIN, {"mode": "ar", "reason": "no room"}, "the server runs in mode ar, expected chain: no room"),
        (TREE, {"mode": "chain", "reason": "", "rollback": "snapshot"}, "the server runs in mode chain, expected tree"),
        (AR, {"mode": "chain", "reason": ""}, "the server runs in mode chain, expected ar"),
        (replace(CHAIN, rollback="replay"), {"mode": "chain", "rollback": "snapshot"}, "the server's rollback is snapshot, expected replay"),
        (replace(CHAIN, rollback="replay"), {"mode": "chain"}, "the server's rollback is unknown, expected replay"),
    ],
)
def test_difference(config: RunConfig, effective: dict[str, Any], expected: str) -> None:
    assert config.difference(effective) == expected
