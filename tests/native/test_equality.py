"""Drafted text, chains and trees, is the unpatched pin's text, token by token, in exact arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.bench import cases, compare, stats
from llama_dflash.bench.run import Job, Pass, run_pass
from llama_dflash.builds import Build
from llama_dflash.client import Client, Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

N_PROMPTS = 20
N_PREDICT = 128


def job(temperature: float = 0.0, seed: int = 0) -> Job:
    # One thread: threads that wait for each other crawl when anything else runs on the machine.
    return Job(cases.load("tests", N_PROMPTS), N_PREDICT, Sampling(temperature, seed), server_flags=("-t", "1"))


@pytest.fixture(scope="module")
def plain(reference: Build, pair: tuple[Path, Path]) -> Pass:
    """Greedy ids of the unpatched pin."""
    return run_pass(reference, RunConfig(pair[0]), job())


@pytest.fixture(scope="module")
def chain(exact: Build, pair: tuple[Path, Path]) -> Pass:
    """The longest greedy chain, by replay."""
    return run_pass(exact, RunConfig(*pair, 15), job())


def check_chain(got: Pass, plain: Pass, n_max: int, rollback: str) -> None:
    assert compare.divergences(job().cases, plain, got) == []
    # The feature ran: else equality would say nothing.
    assert {k: got.effective[k] for k in ("mode", "n_max", "rollback")} == {"mode": "chain", "n_max": n_max, "rollback": rollback}
    assert stats.n_rounds(got) < stats.n_rounds(plain)
    assert stats.mean_accepted(got) > 1.3


@pytest.mark.parametrize("n_max", [1, 3, 7])
def test_greedy_chain_is_the_pins_plain_text(exact: Build, pair: tuple[Path, Path], plain: Pass, n_max: int) -> None:
    check_chain(run_pass(exact, RunConfig(*pair, n_max), job()), plain, n_max, "replay")


def test_the_longest_chain_is_the_same_with_snapshots(exact: Build, pair: tuple[Path, Path], plain: Pass, chain: Pass) -> None:
    check_chain(chain, plain, 15, "replay")
    snapshots = run_pass(exact, RunConfig(*pair, 15, rollback="snapshot"), job())
    check_chain(snapshots, plain, 15, "snapshot")
    rounds = [[c.timings[k] for k in ("rounds", "draft_n", "draft_n_accepted_per_pos")] for c in chain.completions]
    assert rounds == [[c.timings[k] for k in ("rounds", "draft_n", "draft_n_accepted_per_pos")] for c in snapshots.completions]


@pytest.mark.parametrize("budget", [1, 4, 15, 31])
def test_greedy_tree_is_the_pins_plain_text(exact: Build, pair: tuple[Path, Path], plain: Pass, chain: Pass, budget: int) -> None:
    got = run_pass(exact, RunConfig(*pair, budget=budget).checked(), job())
    assert compare.divergences(job().cases, plain, got) == []
    assert (got.effective["mode"], got.effective["budget"]) == ("tree", budget)
    if budget >= 15:
        assert stats.n_rounds(got) < stats.n_rounds(chain)
    assert stats.n_rounds(got) < stats.n_rounds(plain)
    # Whole trees but for the rounds that a limit cuts.
    drafted = sum(c.timings["draft_n"] for c in got.completions)
    rounds = sum(c.timings["draft_n_rounds"] for c in got.completions)
    assert budget * (rounds - 3 * N_PROMPTS) < drafted <= budget * rounds


def test_a_tree_without_branches_is_the_chain(exact: Build, pair: tuple[Path, Path], chain: Pass) -> None:
    got = run_pass(exact, RunConfig(*pair, budget=15, top_k=1).checked(), job())
    for ours, theirs in zip(got.completions, chain.completions, strict=True):
        assert ours.tokens == theirs.tokens
        for key in ("rounds", "draft_n", "draft_n_accepted", "draft_n_accepted_per_pos"):
            assert ours.timings[key] == theirs.timings[key]


@pytest.mark.parametrize("unified", [(), ("-kvu",)], ids=["split", "unified"])
@pytest.mark.parametrize("budget", [None, 15], ids=["chain", "tree"])
def test_four_slots_at_once(
    exact: Build, pair: tuple[Path, Path], plain: Pass, budget: int | None, unified: tuple[str, ...]
) -> None:
    # Freed cells are not filled again in exact arithmetic, so trees need more of them than tokens.
    flags = ("-np", "4", "-c", "8192", "-t", "1", *unified)
    cases_ = job().cases
    with Server(exact, RunConfig(*pair, budget=budget).checked(), extra=flags) as server, ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda c: server.client.complete(c.text, N_PREDICT, Sampling(), ignore_eos=True), cases_))
    assert [c.tokens for c in got] == [c.tokens for c in plain.completions]
    assert sum(c.timings["rounds"] for c in got) < stats.n_rounds(plain)


def test_plain_decoding_is_unchanged_by_the_series(exact: Build, pair: tuple[Path, Path], plain: Pass) -> None:
    got = run_pass(exact, RunConfig(pair[0]), job())
    assert compare.divergences(job().cases, plain, got) == []
    assert got.effective["mode"] == "ar"
    assert stats.n_rounds(got) == N_PROMPTS * (N_PREDICT - 1)


@pytest.fixture(scope="module")
def sampled_plain(reference: Build, pair: tuple[Path, Path]) -> Pass:
    """Sampled ids of the unpatched pin."""
    return run_pass(reference, RunConfig(pair[0]), job(temperature=0.8, seed=7))


@pytest.mark.parametrize("budget", [None, 4, 15, 31])
def test_sampled_drafts_are_the_pins_sampled_text(
    exact: Build, pair: tuple[Path, Path], sampled_plain: Pass, budget: int | None
) -> None:
    sampled = job(temperature=0.8, seed=7)
    got = run_pass(exact, RunConfig(*pair, budget=budget).checked(), sampled)
    assert compare.divergences(sampled.cases, sampled_plain, got) == []
    assert stats.n_rounds(got) < stats.n_rounds(sampled_plain)


SAMPLERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "min_p": 0.02},
    "penalties": {"repeat_penalty": 1.3, "repeat_last_n": 48, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "dry": {"dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2},
    "bias": {"logit_bias": [[10, -5.0], [20, 3.0]]},
    "grammar": {"grammar": 'root ::= line+\nline ::= [a-z ]+ " = " [0-9]+ "\\n"'},
}


def test_every_sampler_sees_what_it_would_without_drafts(exact: Build, reference: Build, pair: tuple[Path, Path]) -> None:
    def texts(build: Build, config: RunConfig) -> dict[str, list[int]]:
        with Server(build, config.checked(), extra=("-np", "1", "-t", "1")) as server:
            return {
                f"{name} {case.name}": server.client.complete(
                    case.text, 64, Sampling(0.8, 11), i, ignore_eos=True, **fields
                ).tokens
                for name, fields in SAMPLERS.items()
                for i, case in enumerate(job().cases[:4])
            }

    want = texts(reference, RunConfig(pair[0]))
    assert len({tuple(v) for k, v in want.items() if k.endswith(job().cases[0].name)}) == len(SAMPLERS)  # each has its effect
    for budget in (None, 15):
        assert texts(exact, RunConfig(*pair, budget=budget)) == want, budget


def p_value(chi2: float, dof: int) -> float:
    """Upper tail of the chi-square distribution: the incomplete gamma function by its series."""
    a, x = dof / 2, chi2 / 2
    term = total = 1 / a
    for n in range(1, 1000):
        term *= x / (a + n)
        total += term
    return max(0.0, 1 - total * math.exp(-x + a * math.log(x) - math.lgamma(a)))


def test_pairs_of_tokens_have_the_targets_distribution(exact: Build, pair: tuple[Path, Path]) -> None:
    """Chi-square of the first two tokens: the first comes from the prefill, the second from the root of a tree."""
    n_draws, n_top = 800, 64
    config = RunConfig(*pair, budget=15).checked()
    with Server(exact, config, extra=("-np", "1", "-t", "1")) as server:
        ids = server.client.post("/tokenize", {"content": "import os\nimport "})["tokens"]
        draws: Counter[tuple[int, int]] = Counter()
        drafted = 0
        for seed in range(n_draws):
            # The cached prompt makes a draw cheap.
            done = server.client.complete(ids, 3, Sampling(1.0, seed), cache_prompt=True, ignore_eos=True)
            draws[(done.tokens[0], done.tokens[1])] += 1
            drafted += done.timings.get("draft_n", 0)
        assert drafted > n_draws
        expected = pair_probabilities(server.client, ids, n_top)
    rare = n_draws * (1 - sum(expected.values()))
    cells = {k: n_draws * p for k, p in expected.items() if n_draws * p >= 5}
    rest = rare + sum(n_draws * p for k, p in expected.items() if k not in cells)
    chi2 = sum((draws[k] - e) ** 2 / e for k, e in cells.items())
    chi2 += (n_draws - sum(draws[k] for k in cells) - rest) ** 2 / rest
    assert len(cells) >= 5
    # Seeds are fixed, so this is no flaky test: the p-value of a right build is what it is.
    assert p_value(chi2, len(cells)) > 0.01
    # The negative control: another temperature is seen.
    squeezed = {k: v**2 for k, v in cells.items()}
    scale = sum(cells.values()) / sum(squeezed.values())
    assert p_value(sum((draws[k] - e * scale) ** 2 / (e * scale) for k, e in squeezed.items()), len(cells)) < 1e-6


def pair_probabilities(client: Client, ids: list[int], n_top: int) -> dict[tuple[int, int], float]:
    """Probabilities of the likeliest first two tokens after `ids`."""
    out = {}
    for first, logp in client.top_logprobs(ids, n_top).items():
        if math.exp(logp) > 0.01:
            for second, more in client.top_logprobs([*ids, first], n_top).items():
                out[(first, second)] = math.exp(logp + more)
    return out


def test_another_seed_is_another_text(reference: Build, pair: tuple[Path, Path], plain: Pass) -> None:
    """The negative control of the equalities: the comparison sees texts that differ."""
    other = run_pass(reference, RunConfig(pair[0]), job(temperature=0.8, seed=7))
    assert len(compare.divergences(job().cases, plain, other)) == N_PROMPTS
