"""Command lines, and the resolution of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_dflash.argv import cli_argv, model_flags, server_argv
from llama_dflash.errors import ModelFileError, PairingError, UsageError
from llama_dflash.spec import MODES, RunConfig

AR = RunConfig(Path("t.gguf"))
CHAIN = RunConfig(Path("t.gguf"), Path("d.gguf"), 15)
CHAIN_FLAGS = ["-m", "t.gguf", "-md", "d.gguf", "--spec-type", "draft-dflash", "--spec-draft-n-max", "15"]


def test_model_flags() -> None:
    assert model_flags(AR) == ["-m", "t.gguf"]
    assert model_flags(CHAIN) == CHAIN_FLAGS


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
    assert (AR.mode, CHAIN.mode) == MODES


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
