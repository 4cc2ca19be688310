"""Bounds on the nodes of draft trees, against rounds that are played one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_dflash.bench import nodes
from llama_dflash.bench.nodes import TreeLimits
from llama_dflash.bench.run import Pass
from llama_dflash.client import Completion
from llama_dflash.spec import RunConfig

WIDE = TreeLimits(budget=15, top_k=16, n_max=15, n_predict=64, n_prompt=10, n_ctx=1000)
SIZES = st.integers(1, 20)
LIMITS = st.builds(TreeLimits, SIZES, SIZES, SIZES, st.integers(3, 60), SIZES, st.integers(30, 100))


def complete(limits: TreeLimits, accepted: list[int], missing: int = 0) -> Completion:
    """A completion whose rounds accept so many tokens, and draft all they can but `missing` nodes."""
    g, rounds, drafted, drafted_rounds = 1, 0, 0, 0
    for n in accepted:
        if g >= limits.n_predict:
            break
        n_nodes = limits.n_nodes(g)
        rounds += 1
        drafted += n_nodes
        drafted_rounds += n_nodes > 0
        g = min(g + 1 + min(n, limits.n_max, n_nodes), limits.n_predict)
    timings = {"prompt_n": limits.n_prompt, "rounds": rounds, "draft_n": drafted - missing, "draft_n_rounds": drafted_rounds}
    return Completion(list(range(g)), "", timings)


@pytest.mark.parametrize(
    ("limits", "n_generated", "expected"),
    [
        (WIDE, 1, 15),
        (WIDE, 62, 15),  # two tokens left: depth 1, which has room for all of the budget
        (WIDE, 63, 0),  # the last token needs no draft
        (replace(WIDE, budget=31), 61, 31),
        (replace(WIDE, budget=31), 62, 16),
        (replace(WIDE, top_k=2), 61, 6),
        (replace(WIDE, top_k=1), 1, 15),
        (replace(WIDE, top_k=1, n_max=7), 1, 7),
        (replace(WIDE, top_k=1), 60, 3),
        (replace(WIDE, n_ctx=35), 1, 15),
        (replace(WIDE, n_ctx=35), 9, 15),  # 18 tokens in cells and 2 kept free leave 15
        (replace(WIDE, n_ctx=35), 10, 14),
        (replace(WIDE, n_ctx=35), 24, 0),
        (replace(WIDE, n_ctx=35), 40, 0),
    ],
)
def test_n_nodes(limits: TreeLimits, n_generated: int, expected: int) -> None:
    assert limits.n_nodes(n_generated) == expected


@given(LIMITS)
def test_fewer_tokens_left_never_mean_more_nodes(limits: TreeLimits) -> None:
    counts = [limits.n_nodes(g) for g in range(1, limits.n_predict)]
    assert counts == sorted(counts, reverse=True)


@given(LIMITS, st.lists(st.integers(0, 20), min_size=1, max_size=80))
def test_full_rounds_are_within_the_bounds(limits: TreeLimits, accepted: list[int]) -> None:
    assert nodes.is_full(limits, complete(limits, accepted))


@given(st.integers(1, 16), st.lists(st.integers(0, 20), min_size=1, max_size=80))
def test_one_missing_node_shows_where_the_end_does_not_limit(budget: int, accepted: list[int]) -> None:
    """With as many children as the budget, depth 1 holds it, so every drafted round must."""
    limits = replace(WIDE, budget=budget)
    done = complete(limits, accepted)
    assert done.timings["draft_n"] == budget * done.timings["draft_n_rounds"]
    assert nodes.is_full(limits, done)
    assert not nodes.is_full(limits, complete(limits, accepted, missing=1))
    assert not nodes.is_full(limits, complete(limits, accepted, missing=-1))


def test_only_the_last_rounds_may_be_short() -> None:
    limits = replace(WIDE, budget=31)
    done = complete(limits, [4] * 20)
    n_rounds = done.timings["draft_n_rounds"]
    # One round at most sees two tokens left, where depth 1 has 16 nodes.
    assert nodes.bounds(limits, 64, n_rounds) == (31 * (n_rounds - 1) + 16, 31 * n_rounds)


def test_rounds_without_a_draft_are_noticed() -> None:
    done = complete(WIDE, [0] * 63)
    assert done.timings["rounds"] - done.timings["draft_n_rounds"] == 1
    assert nodes.is_full(WIDE, done)
    for lost, kept in ((1, 61), (62, 0)):
        timings = {**done.timings, "draft_n": 15 * kept, "draft_n_rounds": done.timings["draft_n_rounds"] - lost}
        assert not nodes.is_full(WIDE, Completion(done.tokens, "", timings))


def test_more_rounds_than_tokens_are_noticed() -> None:
    done = Completion([1, 2, 3], "", {"rounds": 9, "draft_n": 135, "draft_n_rounds": 9})
    assert not nodes.is_full(WIDE, done)


def test_short_prompts(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> None:
    config = RunConfig(make_target(), make_draft(), budget=15).checked()
    effective = {"mode": "tree", "n_max": 7, "budget": 15, "top_k": 16}
    # The draft of these files has 8 tokens, so no node has more children.
    limits = replace(WIDE, top_k=8, n_max=7)
    whole, short = complete(limits, [3] * 20), complete(limits, [3] * 20, missing=40)
    cached = Completion(whole.tokens, "", {**whole.timings, "prompt_n": 1, "cache_n": 9})
    assert nodes.short_prompts(Pass(effective, [whole, short, cached], n_ctx=1000), config, 64) == [1]


def test_a_selector_offers_its_own_number_of_children(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> None:
    draft = make_draft(shapes={"selector_hidden.weight": (32, 8)}, selector_top_k=2)
    config = RunConfig(make_target(), draft, budget=15).checked()
    limits = replace(WIDE, top_k=2, n_max=7)
    done = complete(limits, [0] * 63)
    assert done.timings["draft_n"] == 15 * 59 + 14 + 6 + 2
    assert nodes.short_prompts(Pass({"mode": "tree", "n_max": 7, "top_k": 16}, [done], n_ctx=1000), config, 64) == []
    fewer = Completion(done.tokens, "", {**done.timings, "draft_n": done.timings["draft_n"] - 1})
    assert nodes.short_prompts(Pass({"mode": "tree", "n_max": 7, "top_k": 16}, [fewer], n_ctx=1000), config, 64) == [0]
