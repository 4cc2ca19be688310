"""DFlash drafts verified as trees, in one process: text, drafts, the target's and the draft's states against plain decoding."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import draft_models
import pytest

CHECKS = (
    *("alternating", "budgets", "candidates", "chain", "context-end", "draft-cache"),
    *("limits", "prefill", "prompts", "spine", "stops"),
)
# What differs between the draft formats; the rest is common.
OTHER_FORMATS = ("alternating", "budgets", "chain", "prefill", "spine")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of the set, one after the other."""
    prompts = json.loads((Path(__file__).parents[2] / "llama_dflash" / "prompts" / "tests.json").read_text())["prompts"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(p["text"] for p in prompts))
    return path


def run_checks(folder: Path, pair: tuple[Path, Path], text: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run test-speculative-tree of a build."""
    program = folder / "tests" / "test-speculative-tree"
    return subprocess.run([program, *pair, text, *names], capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("name", CHECKS)
def test_check(exact_build: Path, pair: tuple[Path, Path], text: Path, name: str) -> None:
    done = run_checks(exact_build, pair, text, name)
    assert (done.returncode, done.stdout) == (0, f"ok {name}\n"), done.stderr[-3000:]


def test_dspark(exact_build: Path, pair: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    for anchor in (False, True):
        draft = tmp_path / f"dspark-{anchor}.gguf"
        draft_models.write_dspark(pair[1], draft, anchor=anchor)
        done = run_checks(exact_build, (pair[0], draft), text, *OTHER_FORMATS)
        assert (done.returncode, done.stdout) == (0, "".join(f"ok {name}\n" for name in OTHER_FORMATS)), done.stderr[-3000:]


def test_dspark_refusals(exact_build: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft = tmp_path / "dspark.gguf"
    draft_models.write_dspark(pair[1], draft)
    program = exact_build / "tests" / "llama-speculative-simple"
    flags = ["--spec-draft-tree", "15", "--no-spec-draft-backend-sampling", "-p", "x", "-n", "4"]
    done = subprocess.run([program, "-m", pair[0], "-md", draft, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "draft trees of DSpark need candidates from its graph" in done.stdout + done.stderr


@pytest.mark.slow
def test_stale_features_are_seen(broken: Callable[[str], Path], pair: tuple[Path, Path], text: Path) -> None:
    """The negative control: features of other rows in the draft's cache."""
    done = run_checks(broken("stale-draft-features").parent, pair, text, "budgets", "chain")
    assert done.returncode == 1
    assert "FAILED budgets: budget 1 temperature 0.000000: the draft's state differs" in done.stdout
    assert "FAILED chain" in done.stdout


def simple(folder: Path, pair: tuple[Path, Path], *flags: str) -> tuple[str, str]:
    """Text and log of llama-speculative-simple."""
    program = folder / "tests" / "llama-speculative-simple"
    common = [
        "-m",
        pair[0],
        "-md",
        pair[1],
        "-fa",
        "on",
        "-t",
        "1",
        "--temp",
        "0",
        "-n",
        "64",
        "-p",
        "def main():\n",
        "--no-escape",
    ]
    done = subprocess.run([program, *common, *flags], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def test_the_smallest_host(exact_build: Path, pair: tuple[Path, Path]) -> None:
    flags = {
        "replay": ("--spec-draft-n-max", "15"),
        "tree": ("--spec-draft-tree", "15"),
        "snapshot": ("--spec-draft-n-max", "15", "--spec-rollback", "snapshot"),
    }
    text, rounds = {}, {}
    for name, more in flags.items():
        out, log = simple(exact_build, pair, *more)
        both = out + log
        text[name] = out.split("encoded")[0]
        rounds[name] = int(re.findall(r"n_rounds +=\s+(\d+)", both)[0])
        assert f"mode = {'tree' if name == 'tree' else 'chain'}" in both
        assert f"rollback = {'snapshot' if name == 'snapshot' else 'replay'}" in both
    assert "def main" in text["tree"]
    # The old way may print some tokens more than asked for.
    body = {name: re.sub(r"^[\d. IWE]*(?=\S)", "", t).strip() for name, t in text.items()}
    assert body["replay"] == body["tree"]
    assert rounds["tree"] < rounds["replay"]


def test_flags_that_do_not_fit_are_refused(exact_build: Path, pair: tuple[Path, Path]) -> None:
    """The messages are tested with llama-server (tests/server/test_effective_mode.py): this program may exit before its log is written."""
    program = exact_build / "tests" / "llama-speculative-simple"
    for flags in (
        ("--spec-draft-tree", "15", "--spec-rollback", "snapshot"),
        ("--spec-draft-tree", "15", "--spec-type", "ngram-simple"),
        ("--spec-draft-tree", "15", "--spec-draft-n-max", "0"),
        ("--spec-rollback", "replay", "--spec-type", "draft-mtp"),
    ):
        done = subprocess.run(
            [program, "-m", pair[0], "-md", pair[1], "-p", "x", "-n", "4", *flags], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1, flags
        assert "decoded" not in done.stdout + done.stderr
