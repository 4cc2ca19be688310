"""Bad input: one line on stderr, an exit code, nothing on stdout, and no program started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.bench.run import Pass
from llama_dflash.builds import Build
from llama_dflash.cli import bench, main, verify
from llama_dflash.client import Completion

PROGRAM = str(Path(sys.executable).parent / "llama-dflash")
PREFIX = "llama-dflash: error: "

Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fails:
    """Run a command that must fail before it starts any process; returns its one line without the prefix."""

    def no_process(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    def run(exit_code: int, *args: str | Path) -> str:
        monkeypatch.setattr(subprocess, "Popen", no_process)
        with pytest.raises(SystemExit) as caught:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("\n")
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith(PREFIX)
        assert caught.value.code == exit_code, err
        return lines[0].removeprefix(PREFIX)

    # Result folders are made in the current one by default.
    monkeypatch.chdir(tmp_path)
    return run


@pytest.fixture
def files(tmp_path: Path, pair: tuple[Path, Path]) -> dict[str, Path]:
    """Unusable model files by what is wrong with them."""
    target, draft = pair
    (tmp_path / "cut.gguf").write_bytes(draft.read_bytes()[:5000])
    (tmp_path / "text.gguf").write_text("hello\n")
    (tmp_path / "empty.gguf").touch()
    return {
        "missing": tmp_path / "missing.gguf",
        "cut": tmp_path / "cut.gguf",
        "text": tmp_path / "text.gguf",
        "empty": tmp_path / "empty.gguf",
        "folder": tmp_path,
        "draft": draft,
        "target": target,
    }


@pytest.fixture
def small_pair(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> list[str | Path]:
    """Options for a pair that is read faster than the embedded one."""
    return ["-m", make_target(), "-md", make_draft()]


FILE_ERRORS = [
    ("missing", "no such file"),
    ("cut", "truncated"),
    ("text", "is not a GGUF file"),
    ("empty", "is not a GGUF file"),
    ("folder", "is a folder"),
]
COMMANDS = [("serve",), ("run", "-p", "x"), ("bench",), ("verify",)]


@pytest.mark.parametrize(("what", "expected"), FILE_ERRORS)
@pytest.mark.parametrize("command", [*COMMANDS[:2], ("info",)], ids=lambda c: c[0])
def test_unusable_model_files(fails: Fails, files: dict[str, Path], command: tuple[str, ...], what: str, expected: str) -> None:
    where = [files[what]] if command[0] == "info" else ["-m", files[what]]
    assert expected in fails(1, *command, *where)


@pytest.mark.parametrize(("what", "expected"), FILE_ERRORS)
def test_unusable_draft_files(fails: Fails, files: dict[str, Path], what: str, expected: str) -> None:
    assert expected in fails(1, "serve", "-md", files[what])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_swapped_and_mismatched_pairs(
    fails: Fails, command: tuple[str, ...], make_target: Callable[..., Path], make_draft: Callable[..., Path]
) -> None:
    target, draft, other = make_target(), make_draft(), make_target("other.gguf", embedding_length=64)
    assert "is a draft (architecture 'dflash'), expected a target model" in fails(1, *command, "-m", draft, "-md", target)
    assert "is a 'qwen35' model, expected a draft" in fails(1, *command, "-m", target, "-md", other)
    line = fails(1, *command, "-m", other, "-md", draft)
    assert "draft.gguf does not fit other.gguf: the draft reads 3 layers of width 32, the target's hidden size is 64" in line


def test_a_name_with_a_line_break_stays_one_line(fails: Fails) -> None:
    assert fails(1, "serve", "-m", "a\nb.gguf").startswith("a b.gguf: no such file")


def test_a_draft_alone_is_no_model(fails: Fails, files: dict[str, Path]) -> None:
    assert "expected a target model" in fails(1, "serve", "-m", files["draft"])


USAGE = [
    (("nosuch",), "No such command 'nosuch'"),
    (("--nosuch",), "No such option"),
    (("serve", "--nosuch"), "No such option"),
    (("serve", "word"), "unexpected argument 'word'"),
    (("serve", "word", "--", "-t", "2"), "unexpected argument 'word'"),
    (("run", "-p", "x", "word", "--", "word"), "unexpected argument 'word'"),
    (("info", "--nosuch"), "No such option"),
    (("serve", "-m"), "requires an argument"),
    (("serve", "--n-max", "0"), "n_max is 0, expected 1..15"),
    (("serve", "--n-max", "16"), "n_max is 16, expected 1..15"),
    (("run", "-p", "x", "--n-max", "-1"), "n_max is -1, expected 1..15"),
    (("bench", "--n-max", "99"), "n_max is 99, expected 1..15"),
    (("verify", "--n-max", "x"), "'x' is not a valid integer"),
    (("serve", "--budget", "0"), "budget is 0, expected 1..255 nodes"),
    (("run", "-p", "x", "--budget", "256"), "budget is 256, expected 1..255 nodes"),
    (("verify", "--mode", "tree", "--budget", "x"), "'x' is not a valid integer"),
    (("serve", "--budget", "4", "--top-k", "65"), "top_k is 65, expected 1..64"),
    (("bench", "--modes", "tree", "--spine", "16"), "spine is 16, expected 0..15"),
    (("serve", "--top-k", "4"), "top_k is 4 without a budget, expected a draft tree"),
    (("serve", "--rollback", "auto"), "'auto' is not one of 'replay', 'snapshot'"),
    (("serve", "--budget", "4", "--rollback", "snapshot"), "rollback is snapshot with a budget of 4, expected replay"),
    (("verify", "--mode", "tree", "--rollback", "snapshot"), "rollback is snapshot with a budget of 15, expected replay"),
    (("run", "-p", " "), "-p is empty"),
    (("run", "-p", "x", "-n", "0"), "0 is not in the range"),
    (("bench", "--prompts", "0"), "0 is not in the range"),
    (("bench", "--prompts", "21"), "--prompts is 21, expected 1..20"),
    (("verify", "--prompts", "21"), "--prompts is 21, expected 1..20"),
    (("bench", "--prompt-set", "nosuch"), "neither a set nor a file"),
    (("bench", "--n-predict", "2"), "2 is not in the range"),
    (("bench", "--temperature", "-1"), "-1.0 is not in the range"),
    (("bench", "--repeats", "0"), "0 is not in the range"),
    (("bench", "--modes", "fast"), "--modes has 'fast', expected some of ar, chain, tree"),
    (("bench", "--modes", ""), "expected each mode once"),
    (("bench", "--modes", "ar,ar"), "expected each mode once"),
    (("verify", "--mode", "ar"), "'ar' is not"),
    (("serve", "--native", "nonsense"), "--native 'nonsense' is neither a preset nor the folder"),
    (("bench", "--native", "."), "--native '.' is neither a preset nor the folder"),
    (("doctor", "--native"), "requires an argument"),
    (("env", "--native", "nonsense"), "neither a preset nor the folder"),
    (("serve", "--port", "0"), "0 is not in the range"),
    (("serve", "--port", "65536"), "65536 is not in the range"),
    (("serve", "-c", "0"), "0 is not in the range"),
]


@pytest.mark.parametrize(("args", "expected"), USAGE, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_bad_use(fails: Fails, args: tuple[str, ...], expected: str) -> None:
    assert expected in fails(2, *args)


@pytest.mark.parametrize("option", [("--n-max", "3"), ("--budget", "3"), ("--top-k", "3"), ("--spine", "3"), ("--rollback", "replay")])
def test_options_of_drafts_without_a_draft(fails: Fails, files: dict[str, Path], option: tuple[str, str]) -> None:
    want = f"{option[0]} is {option[1]} but there is no draft; pass one with -md FILE"
    assert fails(2, "serve", "-m", files["target"], *option) == want


@pytest.mark.parametrize("args", [("bench",), ("bench", "--modes", "tree"), ("verify",), ("verify", "--mode", "tree")], ids=" ".join)
def test_modes_that_draft_without_a_draft(fails: Fails, files: dict[str, Path], args: tuple[str, ...]) -> None:
    mode = "tree" if "tree" in args else "chain"
    assert f"mode {mode} needs a draft, none was given; pass one" in fails(2, *args, "-m", files["target"])


def test_a_tree_of_a_draft_that_has_none(fails: Fails, make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> None:
    pair = ["-m", make_target(), "-md", make_draft(shapes={"markov_w1.weight": (32, 8)})]
    line = fails(2, "serve", *pair, "--budget", "4")
    assert line.startswith("budget is 4 but draft.gguf is a DSpark draft, expected DFlash or DFlash2 for a tree; ")


@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda c: c[0])
@pytest.mark.parametrize(
    "flags",
    [
        ("-c", "1000000000000"),
        ("--", "-c", "1000000000000"),
        ("--", "--ctx-size=1000000000000"),
        ("-c", "64", "--", "-c", "1000000000000"),
    ],
)
def test_a_context_larger_than_memory(
    fails: Fails, small_pair: list[str | Path], make_build: Callable[..., Build], command: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    line = fails(2, *command, *small_pair, "--native", make_build("").package, *flags)
    # The target has 24 values a token, the draft 16, of two bytes each.
    assert line.startswith("a context of 1000000000000 tokens needs 1981854.4 GiB for its caches, expected at most ")


def test_a_build_without_its_program(fails: Fails, small_pair: list[str | Path], make_build: Callable[..., Build]) -> None:
    build = make_build().package
    assert "bin/llama-server is missing" in fails(1, "serve", *small_pair, "--native", build)
    assert "bin/llama-cli is missing" in fails(1, "run", "-p", "x", *small_pair, "--native", build)


def test_a_damaged_build(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "BUILD_INFO.json").write_text("{}")
    assert "BUILD_INFO.json lacks pin, " in fails(1, "serve", "--native", tmp_path)


@pytest.mark.parametrize(("module", "args"), [(bench, ("bench", "--modes", "ar,chain")), (verify, ("verify",))])
def test_results_that_cannot_be_written(
    fails: Fails,
    small_pair: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
    make_build: Callable[..., Build],
    tmp_path: Path,
    module: Any,
    args: tuple[str, ...],
) -> None:
    def measured(*_: Any) -> Pass:
        return Pass({"mode": "ar"}, [Completion([1, 2, 3], "", {"predicted_ms": 1.0, "draft_n": 1})])

    monkeypatch.setattr(module, "run_pass", measured)
    monkeypatch.setattr(verify, "judge", lambda result, *_: result.update(passed=True, checks={}))
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "below"
    line = fails(1, *args, *small_pair, "--prompts", "1", "--native", make_build().package, "--out", out)
    assert line.startswith(f"{out} cannot be written (Not a directory), expected a folder for results")


def test_out_that_is_a_file(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in fails(2, "bench", "--out", tmp_path / "file")


def test_info_of_a_pair_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], make_target: Callable[..., Path]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["info", "--json", str(make_target()), str(pair[1])])
    out, err = capsys.readouterr()
    assert caught.value.code == 1
    assert json.loads(out)["pairs"][0]["fits"] is False
    assert err.startswith(PREFIX + "tiny-draft.gguf does not fit target.gguf")
    assert len(err.splitlines()) == 1


# The same through the installed program: no traceback and no warning from the interpreter.
@pytest.mark.parametrize(
    ("args", "exit_code", "expected"),
    [
        (("serve", "-m", "no.gguf"), 1, "no.gguf: no such file"),
        (("info", "cut.gguf"), 1, "truncated"),
        (("run", "-p", "x", "--nosuch"), 2, "No such option"),
        (("bench", "--prompts", "21"), 2, "--prompts is 21"),
    ],
)
def test_the_installed_program(files: dict[str, Path], args: tuple[str, ...], exit_code: int, expected: str) -> None:
    done = subprocess.run([PROGRAM, *args], cwd=files["folder"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(PREFIX)
    assert expected in done.stderr


def test_a_reader_that_leaves_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([PROGRAM, "info", "--json"], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write_end)
    assert done.returncode == 1
    assert done.stderr == ""
