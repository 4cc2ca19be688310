"""Trees on the build that pip installs, whose arithmetic depends on batch width: the noise-floor rule of docs/testing.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tree_checks
import tree_models
import tree_player
from tree_checks import BUSHY, PROMPT, STAR
from tree_lib import Params, chain, worker

from llama_dflash import builds

Run = Callable[..., Any]
MODELS = ("trained", "qwen35", "qwen35moe", "qwen3next", "qwen3", "gemma3")
SHAPES = {"bushy": BUSHY, "star": STAR, "chain": chain(range(5, 21))}


@pytest.fixture(scope="module")
def run() -> Run:
    installed = builds.resolve(builds.INSTALLED)
    assert not installed.is_exact
    return worker(installed.package).run


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "no-flash"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_error_is_within_twice_the_noise(run: Run, name: str, shape: str, flash: bool) -> None:
    params, path, tree = Params(flash=flash, n_seq_max=2), tree_models.path(name), SHAPES[shape]
    floor = run(tree_player.noise_floor, path, params)
    assert floor < (3.0 if name == "qwen35moe" else 0.1), "noise, not a defect (noise can change which experts are chosen)"
    steps: list[Any] = [
        ("decode", {0: PROMPT}),
        ("decode", {0: tree}),
        ("accept", 0, len(tree.tokens) - 1),
        ("decode", {0: tree}),
    ]
    compared, error = run(tree_player.play, path, params, steps, bitwise=False)
    assert compared >= 2 * len(tree.tokens)
    # Random models of 64 channels may have no plain noise at all: a few units in the last place are allowed.
    assert error <= max(2 * floor, 1e-5)


def test_the_rule_sees_a_wrong_token(run: Run) -> None:
    """Negative control: the error of another token in the path is far above the rule's bound."""
    params, path = Params(n_seq_max=2), tree_models.path("trained")
    floor = run(tree_player.noise_floor, path, params)
    assert run(tree_checks.error_of_a_wrong_ancestor, path, params) > 10 * max(2 * floor, 1e-5)
