"""llama-server and llama-cli say what they really do: in the log, in /props and in the banner."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tree_models

from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.errors import ServerError
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

Pair = tuple[Path, Path]


def mode_lines(server: Server) -> list[str]:
    return [line.split("speculative: ", 1)[1] for line in server.log_lines("speculative: mode")]


def test_chain_is_told_at_start_and_per_request(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15)) as server:
        mode = server.client.effective_mode()
        want = f"mode = chain, type = draft-dflash, draft = tiny-draft.gguf, n_max = 15, rollback = {mode['rollback']}"
        assert mode_lines(server) == [want]
        assert mode == {
            "mode": "chain", "types": "draft-dflash", "draft": "tiny-draft.gguf", "n_max": 15, "budget": 0, "top_k": 0, "spine": 0,
            "rollback": mode["rollback"], "reason": "", "str": want,
        }  # fmt: skip
        assert mode["rollback"] in ("replay", "snapshot")
        server.client.complete("def f(", 8, Sampling())
        assert mode_lines(server) == [want, want]


@pytest.mark.parametrize("rollback", ["replay", "snapshot"])
def test_the_rollback_of_chains_is_told(exact: Build, pair: Pair, rollback: str) -> None:
    with Server(exact, RunConfig(*pair, 15, rollback=rollback)) as server:
        mode = server.client.effective_mode()
        assert (mode["mode"], mode["rollback"]) == ("chain", rollback)
        assert mode["str"].endswith(f"n_max = 15, rollback = {rollback}")


def test_tree_is_told_at_start_and_per_request(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15, budget=22, top_k=8)) as server:
        want = "mode = tree, type = draft-dflash, draft = tiny-draft.gguf, n_max = 15, budget = 22, top_k = 8, spine = 0, rollback = replay"
        assert mode_lines(server) == [want]
        assert server.client.effective_mode() == {
            "mode": "tree", "types": "draft-dflash", "draft": "tiny-draft.gguf", "n_max": 15, "budget": 22, "top_k": 8, "spine": 0,
            "rollback": "replay", "reason": "", "str": want,
        }  # fmt: skip
        server.client.complete("def f(", 8, Sampling())
        assert mode_lines(server) == [want, want]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--spec-rollback", "snapshot"], "--spec-draft-tree is 15 with --spec-rollback snapshot: trees need --spec-rollback replay"),
        (["--spec-type", "draft-mtp"], "draft-mtp cannot follow draft trees"),
        (["--spec-draft-n-max", "0"], "--spec-draft-tree is 15 with --spec-draft-n-max 0, expected a depth of at least 1"),
        (["--spec-draft-tree", "-1"], "invalid value"),
        (["--spec-draft-top-k", "0"], "invalid value"),
        (["--spec-rollback", "later"], "invalid value"),
    ],
)  # fmt: skip
def test_a_tree_that_cannot_be_is_refused(exact: Build, pair: Pair, flags: list[str], error: str) -> None:
    with pytest.raises(ServerError) as caught:
        with Server(exact, RunConfig(*pair, 15, budget=15), extra=flags):
            pass
    assert "llama-server exited with code 1" in str(caught.value)
    assert error in str(caught.value)


def test_a_tree_needs_a_draft_of_dflash(exact: Build, pair: Pair) -> None:
    with pytest.raises(ServerError, match=r"--spec-draft-tree is 15 with --spec-type .*ngram-simple: trees need draft-dflash"):
        with Server(exact, RunConfig(pair[0]), extra=["--spec-type", "ngram-simple", "--spec-draft-tree", "15"]):
            pass


def test_plain_decoding_says_that_nothing_was_asked_for(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(pair[0])) as server:
        mode = server.client.effective_mode()
        assert (mode["mode"], mode["reason"], mode["n_max"]) == ("ar", "not requested", 0)
        assert mode_lines(server) == ["mode = ar, no drafting: not requested"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["-md", "OTHER"], "no --spec-type was given, and the draft model's metadata names none"),
        (["--spec-type", "draft-dflash"], "the requested --spec-type needs a draft model, none was given"),
        (["-md", "DRAFT", "--spec-type", "draft-dflash", "--spec-draft-n-max", "0"], "the maximum draft length is 0"),
    ],
)
def test_a_server_that_does_not_draft_says_why(exact: Build, pair: Pair, flags: list[str], reason: str) -> None:
    files = {"OTHER": tree_models.path("qwen3"), "DRAFT": str(pair[1])}
    extra = [files.get(flag, flag) for flag in flags]
    with Server(exact, RunConfig(pair[0]), extra=extra) as server:
        mode = server.client.effective_mode()
        assert (mode["mode"], mode["reason"]) == ("ar", reason)


def test_a_type_taken_from_the_files_metadata_is_told(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(pair[0]), extra=["-md", str(pair[1])]) as server:
        mode = server.client.effective_mode()
        # 3 is the pin's default draft length, which shortens the block.
        assert (mode["mode"], mode["types"], mode["n_max"]) == ("chain", "draft-dflash", 3)


def test_n_max_is_told_after_clamping(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15), extra=["--spec-draft-n-max", "40"]) as server:
        assert server.client.effective_mode()["n_max"] == 15


def test_a_request_without_room_says_why(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15), extra=["-c", "256", "-np", "1"]) as server:
        server.client.complete("def f(", 2, Sampling())
        assert mode_lines(server)[-1] == "mode = ar, no drafting: a limit of 2 tokens leaves none to draft"
        ids = [100] * 254
        server.client.complete(ids, 8, Sampling())
        assert mode_lines(server)[-1] == "mode = ar, no drafting: a prompt of 254 tokens leaves no room in a context of 256"


def test_ngram_drafts_need_no_file(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(pair[0]), extra=["--spec-type", "ngram-simple"]) as server:
        mode = server.client.effective_mode()
        assert (mode["mode"], mode["types"], mode["draft"]) == ("chain", "ngram-simple", "")


def test_llama_cli_shows_it_in_its_banner(exact: Build, pair: Pair) -> None:
    argv = [str(exact.program("llama-cli")), "-m", str(pair[0]), "-p", "x", "-n", "4", "--single-turn", "--simple-io"]
    draft = ["-md", str(pair[1]), "--spec-type", "draft-dflash", "--spec-draft-n-max", "7"]
    shown = [subprocess.run([*argv, *more], capture_output=True, text=True, timeout=60).stdout for more in ([], draft)]
    assert "speculative: mode = ar, no drafting: not requested" in shown[0]
    assert "speculative: mode = chain, type = draft-dflash, draft = tiny-draft.gguf, n_max = 7" in shown[1]
