"""Negative controls: each broken build fails the check that is named for it, and the exact build passes them all.

`broken(name)` is a session fixture of conftest.py: a function that applies tests/native/broken/<name>.patch to a scratch
copy of the patched sources, builds it with the exact preset and returns the package folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tree_checks
import tree_models
from tree_lib import CheckFailed, Worker, WorkerDied, worker

from llama_dflash.builds import Build

# The patch, the check that must fail, the model it runs on, and words of the failure.
CONTROLS: dict[str, tuple[Callable[[str], None], str, str]] = {
    "siblings-visible": (tree_checks.siblings_are_hidden, "qwen3", "logits differ"),
    "conv-parent-is-previous-row": (tree_checks.windows_follow_parents, "qwen35", "logits differ"),
    "commit-skips-a-node": (tree_checks.commit_takes_every_node, "qwen35", "words differ"),
    "copies-not-made": (tree_checks.shared_cells_are_settled, "qwen35", "logits differ"),
    "position-not-advanced": (tree_checks.accept_advances_position, "qwen35", "pos_max"),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_the_exact_build_passes(exact: Build, name: str) -> None:
    check, model, _ = CONTROLS[name]
    worker(exact.package).run(check, tree_models.path(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_build_fails(broken: Callable[[str], Path], name: str) -> None:
    check, model, words = CONTROLS[name]
    made = Worker(broken(name))
    try:
        with pytest.raises(CheckFailed, match=words) as failed:
            made.run(check, tree_models.path(model))
    finally:
        made.close()
    assert not isinstance(failed.value, WorkerDied)


def failing(package: Path, names: list[str]) -> dict[str, Any]:
    """Which of the named checks fail on a build, and how: for patches that are being written."""
    made = Worker(package)
    found: dict[str, Any] = {}
    for name in names:
        check, model, _ = CONTROLS[name]
        try:
            made.run(check, tree_models.path(model))
        except CheckFailed as e:
            found[name] = str(e).splitlines()[-3:]
    made.close()
    return found
