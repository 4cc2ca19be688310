"""What happens to a pending tree, or to an accepted one that is not replayed, behind its back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tree_checks
import tree_models
import tree_player
from tree_checks import BUSHY, PROMPT, STAR
from tree_lib import Params

Run = Callable[..., Any]
MODELS = (*tree_models.HYBRID, "trained", "qwen3", "gemma3")
every_model = pytest.mark.parametrize("name", MODELS)
caches = pytest.mark.parametrize("unified", [False, True], ids=["cache each", "one cache"])


@every_model
def test_keep_with_a_cache_each(run: Run, name: str) -> None:
    run(tree_checks.keep_with_a_cache_each, tree_models.path(name), Params(kv_unified=False))


@pytest.mark.parametrize("name", [*tree_models.HYBRID, "trained", "gemma3"])
def test_partial_load(run: Run, name: str) -> None:
    run(tree_checks.partial_load, tree_models.path(name), Params(swa_full=False))


@every_model
@caches
def test_copies_that_are_accepted_and_removed(run: Run, name: str, unified: bool) -> None:
    """Two sequences go on in cells of their own, one of which is where the other's state comes from."""
    steps = [("decode", {0: PROMPT, 2: PROMPT[:7]}), ("decode", {0: BUSHY, 2: STAR}), ("copy", 0, 1), ("copy", 2, 3)]
    for end in (
        [("accept", 0, 8), ("remove", 1), ("accept", 2, 3)],
        [("accept", 2, 3), ("remove", 3), ("accept", 0, 8), ("remove", 1), ("decode", {3: STAR}), ("accept", 3, 1)],
        [("accept", 0, 8), ("accept", 2, 3), ("copy", 0, 3), ("remove", 0)],
    ):
        run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), [*steps, *end])


@every_model
def test_coupled_token(run: Run, name: str) -> None:
    run(tree_checks.coupled_token, tree_models.path(name), Params(kv_unified=True))


@every_model
def test_removals(run: Run, name: str) -> None:
    run(tree_checks.removals, tree_models.path(name), Params(), may_remove=name in ("qwen3", "gemma3"))


@pytest.mark.parametrize("name", ["qwen35", "qwen3"])
def test_backend_sampler(run: Run, name: str) -> None:
    run(tree_checks.backend_sampler, tree_models.path(name), Params())
