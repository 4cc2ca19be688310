"""pytest plugin for upstream's server tests: servers run the embedded pair, and what they answer is written down.

Loaded into a pytest of its own (`-p upstream_plugin`) by test_upstream.py, once a build.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from matrix_session import plain
from upstream_names import is_named

# Upstream imports it to download models, which no test does here.
sys.modules["wget"] = types.ModuleType("wget")

# Numbers that the tokenizer and the chat template decide.
TOKEN_COUNTS = {"prompt_n", "cache_n", "prompt_tokens", "cached_tokens", "n_saved", "n_restored"}
PRESETS_OF_TEXT_MODELS = ("tinyllama2", "tinyllama_infill", "stories15m_moe")
ROUTED = "ggml-org/tinygemma3-GGUF:Q8_0"


class Count(int):
    """A token count that equals any number: upstream's is another model's. test_upstream.py compares the true one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return super().__hash__()

    def __add__(self, other: int) -> int:
        total = int(self) + int(other)
        return Count(total) if isinstance(other, Count) else total


def with_counts(value: Any) -> Any:
    """`value` with its token counts as Count."""
    if isinstance(value, list):
        return [with_counts(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: Count(v) if k in TOKEN_COUNTS else with_counts(v) for k, v in value.items()}


class Upstream:
    """One run of the tests.

    Attributes:
        job: `target`, `draft`, `server_flags`, `draft_flags` (empty: no drafts), `leave_out`, `report`.
        seen: `collected` names, `outcomes` by name, `answers` by name, `draft_n` by name.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.test = ""
        self.seen: dict[str, Any] = {"collected": [], "outcomes": {}, "answers": {}, "draft_n": {}}

    def note(self, *answer: Any) -> None:
        """Keep what a server answered in the running test."""
        self.seen["answers"].setdefault(self.test, []).append(json.dumps(plain(list(answer)), sort_keys=True))

    def note_drafts(self, reply: Any) -> None:
        timings = reply.get("timings", {}) if isinstance(reply, dict) else {}
        self.seen["draft_n"][self.test] = self.seen["draft_n"].get(self.test, 0) + timings.get("draft_n", 0)

    def preset(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """An upstream preset with the embedded pair in place of its model."""

        def preset() -> Any:
            server = original()
            server.model_hf_repo = server.model_hf_file = None
            server.model_file, server.model_draft = self.job["target"], self.job["draft"]
            return server

        return preset

    def router(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Upstream's router, with the embedded pair under the name of the model that it would download."""

        def router() -> Any:
            server = original()
            server.models_preset, server.model_draft = self.job["router_presets"], self.job["draft"]
            return server

        return router

    def start(self, original: Callable[..., None]) -> Callable[..., None]:
        popen = subprocess.Popen

        def start(server: Any, *args: Any, **kwargs: Any) -> None:
            flags = [*self.job["server_flags"], *(self.job["draft_flags"] if server.model_draft else [])]

            def launch(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
                return popen([argv[0], *flags, *argv[1:]], **options)  # flags of the test come later and win

            with (
                mock.patch.multiple(server, model_draft=None, spec_type=None, fa=None),
                mock.patch.object(subprocess, "Popen", launch),
            ):
                original(server, *args, **kwargs)

        return start

    def make_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_request(server: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
            response = original(server, method, path, *args, **kwargs)
            if method == "POST":
                self.note(path, response.status_code, response.body)
                for reply in response.body if isinstance(response.body, list) else [response.body]:
                    self.note_drafts(reply)
            response.body = with_counts(response.body)
            return response

        return make_request

    def make_stream_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_stream_request(server: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
            events = []
            for event in original(server, method, path, *args, **kwargs):
                events.append(event)
                yield with_counts(event)
            self.note(path, events)
            self.note_drafts(events[-1] if events else {})

        return make_stream_request

    def match_regex(self, _regex: str, text: str) -> bool:
        """The words that upstream looks for are another model's; the text is compared instead."""
        self.note("match_regex", text)
        return True

    def download_file(self, url: str, output_file_path: str | None = None) -> str:
        """The draft, where a test would download one."""
        return self.job["draft"]

    # pytest's hooks

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.seen["collected"] = [item.nodeid for item in items]
        out = [item for item in items if is_named(item.nodeid, self.job["leave_out"])]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid
        random.seed(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.seen["outcomes"][report.nodeid] = [report.outcome, str(report.longrepr)[-2000:] if not report.passed else ""]

    def pytest_sessionfinish(self) -> None:
        for answers in self.seen["answers"].values():
            answers.sort()  # requests of a test may run side by side
        Path(self.job["report"]).write_text(json.dumps(self.seen))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--job", type=Path, help="JSON file with the attributes of Upstream.job")


def pytest_configure(config: pytest.Config) -> None:
    import utils  # upstream's, beside the tests

    run = Upstream(json.loads(config.getoption("--job").read_text()))
    config.pluginmanager.register(run)
    utils.match_regex, utils.download_file = run.match_regex, run.download_file
    process, presets = utils.ServerProcess, utils.ServerPreset
    for name in ("start", "make_request", "make_stream_request"):
        setattr(process, name, getattr(run, name)(getattr(process, name)))
    for name in PRESETS_OF_TEXT_MODELS:
        setattr(presets, name, staticmethod(run.preset(getattr(presets, name))))
    presets.router = staticmethod(run.router(presets.router))
    presets.load_all = staticmethod(lambda: None)
