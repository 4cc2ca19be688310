"""pytest plugin for upstream's server tests: their servers run the embedded pair, and what those answer is written down.

Loaded into a pytest of its own (`-p upstream.plugin`) by test_upstream.py, once for each build.
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
from matrix_session import plain, text_of
from upstream.names import is_named

# Upstream imports it to download models, which no test does here.
sys.modules["wget"] = types.ModuleType("wget")

TEXT_MODELS = ("tinyllama2", "tinyllama_infill", "stories15m_moe")
ROUTED = "ggml-org/tinygemma3-GGUF:Q8_0"
# Numbers that the tokenizer and the chat template decide.
TOKEN_COUNTS = {"prompt_n", "cache_n", "prompt_tokens", "cached_tokens", "n_saved", "n_restored"}
# Here the length of the prompt also decides how many tokens fit behind it.
COUNTS_OF_REST = {"unit/test_ctx_shift.py::test_ctx_shift_disabled_short_prompt[-1-248-True]"}
# Contexts in tokens that hold the prompt of the test, and little more, as upstream's hold that of its tokenizer.
CONTEXTS = {"unit/test_speculative.py::test_slot_ctx_not_exceeded": 768}
# Of tools and other servers, not of a model.
NOT_GENERATED = ("/tools", "/cors-proxy")


class Count(int):
    """A token count that equals every number: upstream's is another model's. test_upstream.py compares the true one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return super().__hash__()

    def __add__(self, other: int) -> int:
        total = int(self) + int(other)
        return Count(total) if isinstance(other, Count) else total


def with_counts(value: Any, keys: set[str]) -> Any:
    """`value` with the numbers under `keys` as Count."""
    if isinstance(value, list):
        return [with_counts(v, keys) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: Count(v) if k in keys else with_counts(v, keys) for k, v in value.items()}


def without(value: Any, dropped: set[str]) -> Any:
    """`value` without the keys in `dropped`, at any depth."""
    if isinstance(value, list):
        return [without(v, dropped) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: without(v, dropped) for k, v in value.items() if k not in dropped}


class Run:
    """One run of the tests.

    Attributes:
        job: `target` and `draft` files; flags of every server (`flags`) and of those that may draft (`draft_flags`, none in
            a plain run); `rows` of a round; names to leave out (`leave_out`), or the `only` ones to run; where to `report`.
        seen: the report: `collected` names, and by name `outcomes`, `answers` and the `tree_nodes` drafted.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.test = ""
        self.is_parallel = False
        self.seen: dict[str, Any] = {"collected": [], "outcomes": {}, "answers": {}, "tree_nodes": {}}
        self.router_presets = Path(job["report"]).with_suffix(".ini")
        self.router_presets.write_text(f"[{ROUTED}]\nmodel = {job['target']}\n")

    def note(self, path: str, status: int, body: Any) -> None:
        """Keep what a server answered in the running test."""
        path = path.split("?")[0]
        if path in NOT_GENERATED:
            return
        replies = [reply for reply in (body if isinstance(body, list) else [body]) if isinstance(reply, dict)]
        nodes = max((reply.get("timings", {}).get("draft_n_tree_nodes", 0) for reply in replies), default=0)
        self.seen["tree_nodes"][self.test] = self.seen["tree_nodes"].get(self.test, 0) + nodes
        if self.is_parallel and replies:
            body = text_of(body)  # which slot a request gets, and so what is cached there, is left to chance
        elif path == "/v1/messages":
            body = without(body, {"timings"})  # the pin gives none
        self.keep(path, status, without(plain(body), {"item_id"}))

    def keep(self, *answer: Any) -> None:
        self.seen["answers"].setdefault(self.test, []).append(json.dumps(answer, sort_keys=True))

    def counts(self) -> set[str]:
        return TOKEN_COUNTS | ({"predicted_n"} if self.test in COUNTS_OF_REST else set())

    # What upstream's tests call, with the original as first argument where there is one.

    def preset(self, original: Callable[[], Any]) -> Any:
        """The embedded pair in place of a model that upstream downloads."""
        server = original()
        server.model_hf_repo = server.model_hf_file = None
        server.model_file, server.model_draft = self.job["target"], self.job["draft"]
        return server

    def router(self, original: Callable[[], Any]) -> Any:
        """A router that has the embedded pair under the name of the model that upstream downloads."""
        server = original()
        server.models_preset, server.model_draft = str(self.router_presets), self.job["draft"]
        return server

    def start(self, original: Callable[..., None], server: Any, *args: Any, **kwargs: Any) -> None:
        flags = [*self.job["flags"], *(self.job["draft_flags"] if server.model_draft else [])]
        # The series refuses batches that a round of all slots does not fit in.
        rows = self.job["rows"] * (server.n_slots or 1)
        changed = {
            "n_batch": max(server.n_batch, rows) if server.n_batch else None,
            "n_ctx": CONTEXTS.get(self.test, server.n_ctx),
            **dict.fromkeys(("model_draft", "spec_type", "fa", "offline"), None),
        }
        popen = subprocess.Popen

        def launch(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
            return popen([argv[0], *flags, *argv[1:]], **options)  # flags of the test come later and win

        with mock.patch.multiple(server, **changed), mock.patch.object(subprocess, "Popen", launch):
            original(server, *args, **kwargs)

    def make_request(self, original: Callable[..., Any], server: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        response = original(server, method, path, *args, **kwargs)
        if method == "POST":
            self.note(path, response.status_code, response.body)
        response.body = with_counts(response.body, self.counts())
        return response

    def make_stream_request(
        self, original: Callable[..., Any], server: Any, method: str, path: str, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        events = []
        for event in original(server, method, path, *args, **kwargs):
            events.append(event)
            yield with_counts(event, self.counts())
        self.note(path, 200, events)

    def parallel_function_calls(self, original: Callable[..., Any], *args: Any) -> Any:
        self.is_parallel = True
        try:
            return original(*args)
        finally:
            self.is_parallel = False

    def match_regex(self, _original: Callable[..., bool], _regex: str, text: str) -> bool:
        """The words that upstream looks for are its model's; the text is compared instead."""
        self.keep("match_regex", text)
        return True

    def download_file(self, _original: Callable[..., str], _url: str, _output_file_path: str | None = None) -> str:
        return str(self.job["draft"])

    # pytest's hooks

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.seen["collected"] = [item.nodeid for item in items]
        only, leave_out = self.job["only"], self.job["leave_out"]
        kept = [i for i in items if (not only or is_named(i.nodeid, only)) and not is_named(i.nodeid, leave_out)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid
        random.seed(nodeid)  # a test draws prompts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.seen["outcomes"][report.nodeid] = [report.outcome, "" if report.passed else str(report.longrepr)[-1500:]]

    def pytest_sessionfinish(self) -> None:
        for answers in self.seen["answers"].values():
            answers.sort()  # those of parallel requests come in any order
        Path(self.job["report"]).write_text(json.dumps(self.seen))


def replaced(run: Run, owner: Any, name: str, by: str = "") -> None:
    """Let `owner.name` be the method `by` of `run`, which gets the original first."""
    original, method = getattr(owner, name), getattr(run, by or name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    setattr(owner, name, staticmethod(call) if by else call)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--job", type=Path, help="JSON file with Run.job")


def pytest_configure(config: pytest.Config) -> None:
    import utils  # upstream's, beside its tests

    run = Run(json.loads(config.getoption("--job").read_text()))
    config.pluginmanager.register(run)
    for name in ("parallel_function_calls", "match_regex", "download_file"):
        replaced(run, utils, name)
    for name in ("start", "make_request", "make_stream_request"):
        replaced(run, utils.ServerProcess, name)
    for name in TEXT_MODELS:
        replaced(run, utils.ServerPreset, name, by="preset")
    replaced(run, utils.ServerPreset, "router", by="router")
    utils.ServerPreset.load_all = staticmethod(lambda: None)
