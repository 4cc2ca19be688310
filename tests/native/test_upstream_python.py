"""llama-cpp-python's own tests, from the pinned source distribution, on its `Llama`, on ours, and on ours with drafts.

They download five models; the embedded pair and random models stand in (`upstream_python/models.py`), and EDITS are the
places where a test is about a downloaded model. What each method returns in them must be what it returns in
`llama_cpp.Llama` of the same build, so no check is lost by an edit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.builds import Build

ROOT = Path(__file__).resolve().parents[2]
VOCAB = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"
ANSWER = 'output["choices"][0]["text"]'

# in tests/test_llama.py: times, what is there, what is there instead, and why
EDITS: list[tuple[int, str, str, str]] = [
    *(
        (1, f"cparams.{name} = 16", f"cparams.{name} = 64", "a vocabulary of 4,096 needs more tokens for the same text")
        for name in ("n_ctx", "n_batch", "n_ubatch")
    ),
    (
        *(1, "tokens == [9419, 11, 1814, 0]", 'model.detokenize(tokens) == b"Hello, world!"'),
        "ids of Qwen3.5's vocabulary",
    ),
    (2, '== " jumps over the lazy dog."', '!= ""', "what Qwen3.5-0.8B says"),
    (1, f'{ANSWER} == "true"', f'{ANSWER} in ("true", "false")', "what Qwen3.5-0.8B says"),
    (1, f'{ANSWER}.lower().startswith("rot")', f'"rot" in {ANSWER}.lower()', "one token of Qwen3.5, several here"),
    (3, "temperature=1.0", "temperature=3.0", "two draws must differ, and the tiny model is too sure of one"),
]

Report = dict[str, Any]


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tests, edited, and the one file that they need."""
    command = [sys.executable, str(ROOT / "scripts" / "vendor.py"), "fetch"]
    sdist = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = tmp_path_factory.mktemp("upstream")
    with tarfile.open(sdist, "r:gz") as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if member.isfile() and (name == VOCAB or name.startswith("tests/")):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                path.write_bytes(source.read())
    path = folder / "tests" / "test_llama.py"
    text = path.read_text()
    for times, old, new, _ in EDITS:
        assert text.count(old) == times, f"{old} is there {text.count(old)} times, expected {times}: correct EDITS"
        text = text.replace(old, new)
    path.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return folder


@pytest.fixture(scope="module")
def results(upstream: Path, exact: Build) -> Callable[..., Report]:
    """Run all tests in a process of their own, once: whose `Llama`, and whether on the exact build or the installed one."""

    @functools.cache
    def run(llama: str, installed: bool) -> Report:
        with tempfile.TemporaryDirectory(dir=upstream) as folder:
            report = Path(folder) / "report.json"
            env = {k: v for k, v in os.environ.items() if k != "LLAMA_DFLASH_NATIVE"}
            env |= {} if installed else {"LLAMA_DFLASH_NATIVE": str(exact.package)}
            env |= {"PYTHONPATH": str(ROOT / "tests" / "native"), "UPSTREAM_LLAMA": llama, "UPSTREAM_REPORT": str(report)}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "upstream_python.plugin", "tests"]
            done = subprocess.run(command, cwd=upstream, env=env, capture_output=True, text=True, timeout=600, check=False)
            assert report.is_file(), f"pytest of the upstream tests ended with {done.returncode}: {done.stdout}{done.stderr}"
            found: Report = json.loads(report.read_text())
            return found

    return run


def failures(report: Report) -> dict[str, str]:
    """What did not pass, skipped tests too, and why."""
    return {name: test.get("why", "not run") for name, test in report["tests"].items() if test.get("outcome") != "passed"}


@pytest.mark.parametrize(
    ("llama", "installed"),
    [("llama_cpp", False), ("llama_dflash", False), ("drafts", False), ("drafts", True)],
    ids=["llama_cpp", "llama_dflash", "drafts", "drafts on the default build"],
)
def test_all_pass(results: Callable[..., Report], llama: str, installed: bool) -> None:
    report = results(llama, installed)
    assert failures(report) == {}
    assert sorted(report["tests"]) == sorted(report["collected"])
    assert len(report["collected"]) == 26
    assert report["llama"] == ("llama_cpp.llama" if llama == "llama_cpp" else "llama_dflash.llama")
    rounds = report["rounds_with_drafts"]
    assert (rounds["tree"] > 10 and rounds["chain"] > 5) if llama == "drafts" else not rounds


@pytest.mark.parametrize("llama", ["llama_dflash", "drafts"])
def test_results_are_those_of_llama_cpp(results: Callable[..., Report], llama: str) -> None:
    want, got = results("llama_cpp", False)["tests"], results(llama, False)["tests"]
    for name, test in want.items():
        assert got[name]["results"] == test["results"], name
    assert sum(len(test["results"]) for test in want.values()) > 90
