"""Upstream's own tests of llama-server, with draft trees on.

The files come out of the pinned source distribution, unchanged. They run in a pytest of their own: on the unpatched reference
without drafts, then on our exact build with trees. What passes there has to pass here, and with the same answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from upstream.names import BOTH_FAIL, DRAFTS_ONLY, INSTALLED, KINDS, NOT_COMPARED, NOT_RUN, OURS_FAILS, is_named, read_names

from llama_dflash import builds
from llama_dflash.argv import EXACT_FLAGS, model_flags
from llama_dflash.builds import Build
from llama_dflash.server import hold_port
from llama_dflash.spec import RunConfig

Report = dict[str, Any]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = Path("tools", "server", "tests")
NAMES = read_names(HERE / "upstream" / "names.txt")
TIMEOUT_S = 1500
WITHOUT_DRAFTS = NAMES[NOT_RUN] + NAMES[DRAFTS_ONLY]
WITH_TREES = NAMES[NOT_RUN] + NAMES[INSTALLED]
FILES_THAT_DRAFT = {
    "basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift", "ignore_eos",
    "kv_keep_only_active", "metrics", "security", "sleep", "slot_save", "speculative", "stream", "tool_call",
}  # fmt: skip
# Texts of the installed build are its own: none may end before the limit that the test is about.
TO_THE_LIMIT = ("--ignore-eos",)
# One thread; a start loads two small files and measures nothing.
FLAGS = ("-t", "1", "-tb", "1", "--offline", "-fit", "off", "--no-warmup")
# Control: tokens are accepted by lot, whatever the target thinks of them.
BLIND = ("--spec-synth-len", "4", "--spec-synth-tree", str(ROOT / "bench" / "shapes" / "tiny-pair.txt"))
CONTROL = "unit/test_completion.py::test_completion_stream"


@dataclass(frozen=True)
class Upstream:
    """Upstream's tests, unpacked to `folder`; their servers run the pair of `config`."""

    folder: Path
    config: RunConfig

    def unpack(self) -> None:
        fetch = [sys.executable, str(ROOT / "scripts" / "vendor.py"), "fetch"]
        sdist = subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        with tarfile.open(sdist) as tar:
            top = tar.getnames()[0].split("/")[0] + "/vendor/llama.cpp/"
            for member in tar:
                if member.name.startswith((f"{top}{TESTS}/", f"{top}models/templates/")):
                    member.name = member.name.removeprefix(top)
                    tar.extract(member, self.folder, filter="data")

    def run(self, build: Build, name: str, *, drafts: bool, flags: tuple[str, ...] = (), **selection: list[str]) -> Report:
        """Run tests on `build`; returns the plugin's report (Run.seen there).

        Args:
            build: its llama-server runs.
            name: of the run, for its files.
            drafts: let servers draft trees.
            flags: further flags of servers that draft.
            selection: `leave_out` or `only`, names of tests.
        """
        report = self.folder / f"{name}.report.json"
        job = {
            "target": str(self.config.target),
            "draft": str(self.config.draft),
            "flags": [*FLAGS, *(EXACT_FLAGS if build.is_exact else ())],
            "draft_flags": [*model_flags(self.config)[2:], *flags] if drafts else [],  # a router has no -m
            "rows": self.config.rows_per_round,
            "report": str(report),
            "leave_out": [],
            "only": [],
            **selection,
        }
        path = self.folder / f"{name}.job.json"
        path.write_text(json.dumps(job))
        with hold_port() as held:
            code = self._pytest(build, path, held.getsockname()[1])
        assert code in (0, 1), path.with_suffix(".log").read_text(errors="replace")[-4000:]
        return dict(json.loads(report.read_text()))

    def _pytest(self, build: Build, job: Path, port: int) -> int:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "PYTEST_"))} | {
            "PORT": str(port),
            "LLAMA_SERVER_BIN_PATH": str(build.program("llama-server")),
            "LLAMA_CACHE": str(self.folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(self.folder / TESTS), str(HERE)]),
            "no_proxy": "127.0.0.1,localhost",
        }
        argv = [sys.executable, "-m", "pytest", "-p", "upstream.plugin", "--job", str(job), "-q", "--tb=short"]
        argv += ["-c", "pytest.ini", "--rootdir=.", "--basetemp", str(job.with_suffix(".tmp"))]
        with job.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                argv, cwd=self.folder / TESTS, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                return process.wait(TIMEOUT_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # its servers, too
                process.wait()
                raise


def failed(report: Report, expected: list[str]) -> list[str]:
    """A line for each test that did not pass, or that did though its name is in `expected`."""
    lines = []
    for test, (outcome, why) in report["outcomes"].items():
        want = "failed" if is_named(test, expected) else "passed"
        if outcome != want:
            lines.append(f"{test}: {outcome}, expected {want}\n{why}")
    return lines


def different(reference: Report, report: Report) -> list[str]:
    """A line for each test that ran in both and was answered differently."""
    lines = []
    for test in report["outcomes"].keys() & reference["outcomes"].keys():
        want, got = (r["answers"].get(test, []) for r in (reference, report))
        if want != got and not is_named(test, NAMES[NOT_COMPARED]):
            pairs = [(w, g) for w, g in zip(want, got, strict=False) if w != g] or [(len(want), len(got))]
            lines.append(f"{test}:\n{pairs[0][0]}\n{pairs[0][1]}")
    return sorted(lines)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory, pair: tuple[Path, Path]) -> Upstream:
    upstream = Upstream(tmp_path_factory.mktemp("upstream"), RunConfig(*pair, budget=15).checked())
    upstream.unpack()
    return upstream


@pytest.fixture(scope="module")
def plain(upstream: Upstream, reference: Build) -> Report:
    """The unpatched pin without drafts."""
    return upstream.run(reference, "plain", drafts=False, leave_out=WITHOUT_DRAFTS)


@pytest.fixture(scope="module")
def trees(upstream: Upstream, exact: Build) -> Report:
    """The exact build with trees."""
    return upstream.run(exact, "trees", drafts=True, leave_out=WITH_TREES)


def test_names_are_upstreams(plain: Report) -> None:
    names = [name for kind in KINDS for name in NAMES[kind]]
    assert [n for n, times in Counter(names).items() if times > 1] == []
    assert [n for n in names if not any(is_named(test, [n]) for test in plain["collected"])] == []


def test_the_reference_passes(plain: Report) -> None:
    assert failed(plain, NAMES[BOTH_FAIL]) == []


def test_trees_pass(trees: Report) -> None:
    assert failed(trees, NAMES[BOTH_FAIL] + NAMES[OURS_FAILS]) == []


def test_answers_are_the_references(plain: Report, trees: Report) -> None:
    assert different(plain, trees) == []


@pytest.mark.parametrize(("run", "left_out"), [("plain", WITHOUT_DRAFTS), ("trees", WITH_TREES)])
def test_all_that_is_not_named_ran(run: str, left_out: list[str], request: pytest.FixtureRequest) -> None:
    report = request.getfixturevalue(run)
    assert report["outcomes"].keys() == {test for test in report["collected"] if not is_named(test, left_out)}


def test_full_contexts(upstream: Upstream) -> None:
    report = upstream.run(builds.resolve(builds.INSTALLED), "full", drafts=True, flags=TO_THE_LIMIT, only=NAMES[INSTALLED])
    assert failed(report, []) == []
    assert len(report["outcomes"]) >= len(NAMES[INSTALLED])
    assert [test for test in report["outcomes"] if not report["tree_nodes"][test]] == []


def test_trees_were_drafted(plain: Report, trees: Report) -> None:
    drafted = {test.removeprefix("unit/test_").split(".")[0] for test, nodes in trees["tree_nodes"].items() if nodes}
    assert drafted >= FILES_THAT_DRAFT
    assert not any(plain["tree_nodes"].values())


def test_drafts_that_the_target_did_not_check_are_noticed(upstream: Upstream, exact: Build, plain: Report) -> None:
    report = upstream.run(exact, "blind", drafts=True, flags=BLIND, only=[CONTROL])
    assert failed(report, []) == []  # upstream's own assertions cannot tell
    assert different(plain, report) != []
