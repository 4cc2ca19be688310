"""Figures from hand-made passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_dflash.bench import stats
from llama_dflash.bench.run import Pass
from llama_dflash.client import Completion
from llama_dflash.spec import RunConfig

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)
IDS = st.lists(st.integers(0, 5), max_size=12)


def done(n_tokens: int, **timings: Any) -> Completion:
    return Completion(list(range(n_tokens)), "", {"predicted_ms": 0.0, **timings})


# Two prompts: 10 tokens in 3 rounds and 7 in 2, so 9 + 6 tokens after the prefills in 5 rounds.
CHAIN = Pass(
    {"mode": "chain", "n_max": 3},
    [
        done(
            10, predicted_ms=60.0, rounds=3, draft_n=9, draft_n_accepted=6, draft_n_rounds=3, draft_n_accepted_per_pos=[3, 2, 1]
        ),
        done(7, predicted_ms=40.0, rounds=2, draft_n=6, draft_n_accepted=4, draft_n_rounds=2, draft_n_accepted_per_pos=[2, 2]),
    ],
)
CONFIG = RunConfig(Path("t"), Path("d"), 3)
AR = Pass({"mode": "ar"}, [done(10, predicted_ms=90.0), done(7, predicted_ms=60.0)])


def test_counts() -> None:
    assert (stats.n_emitted(CHAIN), stats.n_rounds(CHAIN)) == (17, 5)


def test_mean_accepted_leaves_out_the_first_token_of_each_prompt() -> None:
    assert stats.mean_accepted(CHAIN) == 15 / 5


def test_a_server_that_does_not_count_rounds_emits_one_token_in_each() -> None:
    assert stats.n_rounds(AR) == 9 + 6
    assert stats.mean_accepted(AR) == 1.0


def test_no_rounds() -> None:
    only_prefill = Pass({"mode": "ar"}, [done(1)])
    assert (stats.mean_accepted(only_prefill), stats.ms_per_round(only_prefill), stats.tok_s(only_prefill)) == (0.0, 0.0, 0.0)


@given(st.lists(st.tuples(st.integers(2, 200), st.integers(1, 200)), min_size=1, max_size=20))
def test_mean_accepted_times_rounds_is_the_tokens_after_prefill(prompts: list[tuple[int, int]]) -> None:
    result = Pass({"mode": "chain"}, [done(n, rounds=rounds) for n, rounds in prompts])
    after_prefill = sum(n - 1 for n, _ in prompts)
    assert stats.mean_accepted(result) * sum(rounds for _, rounds in prompts) == pytest.approx(after_prefill)


@given(st.lists(st.integers(2, 200), min_size=1, max_size=20))
def test_plain_decoding_accepts_exactly_one(lengths: list[int]) -> None:
    assert stats.mean_accepted(Pass({"mode": "ar"}, [done(n) for n in lengths])) == 1.0


def test_accept_per_position_pads_short_rows() -> None:
    assert stats.accept_per_position(CHAIN) == [1.0, 0.8, 0.2]
    first, second = CHAIN.completions
    assert stats.accept_per_position(Pass({}, [second, first])) == [1.0, 0.8, 0.2]


def test_accept_per_position_without_drafts() -> None:
    assert stats.accept_per_position(AR) == []


def test_speed_leaves_out_first_tokens() -> None:
    assert stats.tok_s(CHAIN) == pytest.approx(150.0)
    assert stats.ms_per_round(CHAIN) == 20.0
    assert stats.tok_s(AR) == pytest.approx(100.0)
    assert stats.ms_per_round(AR) == 10.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0], (5.0, 0.0)), ([1.0, 2.0, 9.0], (2.0, 1.0)), ([1.0, 3.0], (2.0, 1.0)), ([4.0, 4.0, 100.0], (4.0, 0.0))],
)
def test_median_and_mad(values: list[float], expected: tuple[float, float]) -> None:
    assert stats.median_and_mad(values) == expected


@given(st.lists(FLOATS, min_size=1, max_size=15), FLOATS)
def test_median_moves_with_the_values_and_mad_does_not(values: list[float], shift: float) -> None:
    middle, mad = stats.median_and_mad(values)
    moved, moved_mad = stats.median_and_mad([v + shift for v in values])
    assert moved == pytest.approx(middle + shift, abs=1e-6)
    assert moved_mad == pytest.approx(mad, abs=1e-6)


@given(st.lists(FLOATS, min_size=1, max_size=15))
def test_half_of_the_values_lie_within_one_mad(values: list[float]) -> None:
    middle, mad = stats.median_and_mad(values)
    assert min(values) <= middle <= max(values)
    assert mad >= 0
    assert 2 * sum(abs(v - middle) <= mad for v in values) >= len(values)
    assert stats.median_and_mad(values[::-1]) == (middle, mad)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0), ([9, 1, 2], [8, 1, 2], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert stats.first_difference(a, b) == expected


@given(IDS, IDS)
def test_first_difference_is_where_the_common_prefix_ends(a: list[int], b: list[int]) -> None:
    i = stats.first_difference(a, b)
    assert i == stats.first_difference(b, a)
    assert (i is None) == (a == b)
    if i is not None:
        assert a[:i] == b[:i]
        assert a[i : i + 1] != b[i : i + 1]


def test_mode_figures_of_a_chain() -> None:
    slower = Pass(CHAIN.effective, [done(10, predicted_ms=120.0, rounds=3), done(7, predicted_ms=80.0, rounds=2)])
    slowest = Pass(CHAIN.effective, [done(10, predicted_ms=240.0, rounds=3), done(7, predicted_ms=160.0, rounds=2)])
    assert stats.mode_figures([CHAIN, slower, slowest], CONFIG) == {
        "tok_s": 75.0,
        "tok_s_mad": 37.5,
        "tok_s_repeats": [150.0, 75.0, 37.5],
        "ms_per_round": 40.0,
        "ms_per_round_mad": 20.0,
        "emitted": 17,
        "rounds": 5,
        "mean_accepted": 3.0,
        "effective": {"mode": "chain", "n_max": 3},
        "n_max": 3,
        "drafted": 15,
        "accepted": 10,
        "nodes_per_round": 3.0,
        "accept_per_position": [1.0, 0.8, 0.2],
    }


@pytest.mark.parametrize("mode", ["ar", "unknown"])
def test_mode_figures_without_drafts(mode: str) -> None:
    figures = stats.mode_figures([Pass({"mode": mode, "n_max": 0}, AR.completions)], CONFIG)
    assert (figures["mean_accepted"], figures["rounds"], figures["tok_s"]) == (1.0, 15, 100.0)
    assert not {"n_max", "drafted", "accepted", "accept_per_position", "rollback", "nodes_per_round"} & set(figures)


def test_mode_figures_of_a_tree() -> None:
    effective = {"mode": "tree", "n_max": 3, "budget": 8, "top_k": 4, "rollback": "replay"}
    rounds = [done(10, rounds=4, draft_n=31, draft_n_accepted=5, draft_n_rounds=4), done(3, rounds=2)]
    figures = stats.mode_figures([Pass(effective, rounds)], replace(CONFIG, budget=8, spine=2))
    want = {"n_max": 3, "budget": 8, "top_k": 4, "spine": 2, "rollback": "replay", "drafted": 31, "accepted": 5, "nodes_per_round": 7.75}
    assert {name: figures[name] for name in want} == want
    assert stats.mode_figures([Pass(effective, rounds)], replace(CONFIG, budget=8))["spine"] == 0


def test_nodes_per_round_without_drafts() -> None:
    assert stats.nodes_per_round(AR) == 0.0
