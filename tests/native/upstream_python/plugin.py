"""Pytest plugin for llama-cpp-python's own tests: whose `Llama` they get, which models, and what came out.

UPSTREAM_LLAMA says which: `llama_cpp`, `llama_dflash`, or `drafts` for one that drafts wherever it can.
UPSTREAM_REPORT is where the report goes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from upstream_python import models

import llama_dflash  # before llama_cpp
from llama_dflash._bindings import llama_cpp

MODE = os.environ["UPSTREAM_LLAMA"]

report: dict[str, Any] = {"tests": {}, "collected": [], "rounds_with_drafts": {}}
_results: list[Any] = []  # what the methods of a Llama returned in the running test
_made: list[Any] = []


def _module(name: str, **values: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(values)


def _generate(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Iterator[int]:
        taken: list[int] = []
        _results.append(["generate", taken])
        tokens = inner(self, *args, **kwargs)
        try:
            for token in tokens:
                taken.append(token)
                yield token
        finally:
            tokens.close()

    return generate


def _logged(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, *args, **kwargs)
        keys = ("choices", "usage")
        _results.append([inner.__name__, {k: result[k] for k in keys} if isinstance(result, dict) else result])
        return result

    return call


def _init(inner: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inner)
    def init(self: Any, model_path: Any, **options: Any) -> None:
        inner(self, model_path, **options, **(models.drafts(model_path, options) if MODE == "drafts" else {}))
        _made.append(self)

    return init


def pytest_configure() -> None:
    # Imported by test_llama.py; log_softmax is not used there.
    _module("scipy")
    _module("scipy.special", log_softmax=None)
    _module("huggingface_hub", hf_hub_download=models.hf_hub_download)
    multiprocessing.cpu_count = lambda: 1  # type: ignore[method-assign,assignment]
    cls = llama_cpp.Llama
    if MODE != "llama_cpp":
        cls = llama_cpp.Llama = llama_cpp.llama.Llama = llama_dflash.Llama
    report["llama"] = llama_cpp.Llama.__module__
    cls.__init__ = _init(cls.__init__)
    cls.generate = _generate(cls.generate)
    for name in ("create_completion", "embed", "tokenize"):
        setattr(cls, name, _logged(getattr(cls, name)))


@pytest.fixture(autouse=True)
def _report_what_came_out(request: pytest.FixtureRequest) -> Iterator[None]:
    _results.clear()
    yield
    for llm in _made:
        if MODE == "drafts":
            kind = re.sub(r"^mode = (\w+),.*", r"\1", llm.spec_mode)
            counts = report["rounds_with_drafts"]
            counts[kind] = counts.get(kind, 0) + llm.spec_stats.n_draft_rounds
        llm.close()
    _made.clear()
    report["tests"].setdefault(request.node.nodeid, {})["results"] = json.loads(json.dumps(_results))


def pytest_collection_finish(session: pytest.Session) -> None:
    report["collected"] = [item.nodeid for item in session.items]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    entry = globals()["report"]["tests"].setdefault(report.nodeid, {})
    if report.when == "call" or not report.passed:
        entry["outcome"], entry["why"] = report.outcome, report.longreprtext[-3000:]


def pytest_sessionfinish() -> None:
    Path(os.environ["UPSTREAM_REPORT"]).write_text(json.dumps(report))
