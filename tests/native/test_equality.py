"""Drafted text is the unpatched pin's text, token by token, in exact arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_dflash.bench import cases, compare, stats
from llama_dflash.bench.run import Job, Pass, run_pass
from llama_dflash.builds import Build
from llama_dflash.client import Sampling
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


@pytest.mark.parametrize("n_max", [1, 3, 7, 15])
def test_greedy_chain_is_the_pins_plain_text(exact: Build, pair: tuple[Path, Path], plain: Pass, n_max: int) -> None:
    got = run_pass(exact, RunConfig(*pair, n_max), job())
    assert compare.divergences(job().cases, plain, got) == []
    # The feature ran: else equality would say nothing.
    assert got.effective["mode"] == "chain"
    assert got.effective["n_max"] == n_max
    assert stats.n_rounds(got) < stats.n_rounds(plain)
    assert stats.mean_accepted(got) > 1.3


def test_plain_decoding_is_unchanged_by_the_series(exact: Build, pair: tuple[Path, Path], plain: Pass) -> None:
    got = run_pass(exact, RunConfig(pair[0]), job())
    assert compare.divergences(job().cases, plain, got) == []
    assert got.effective["mode"] == "ar"
    assert stats.n_rounds(got) == N_PROMPTS * (N_PREDICT - 1)


def test_sampled_chain_is_the_pins_sampled_text(exact: Build, reference: Build, pair: tuple[Path, Path]) -> None:
    sampled = job(temperature=0.8, seed=7)
    plain = run_pass(reference, RunConfig(pair[0]), sampled)
    got = run_pass(exact, RunConfig(*pair, 15), sampled)
    assert compare.divergences(sampled.cases, plain, got) == []
    assert stats.n_rounds(got) < stats.n_rounds(plain)


def test_another_seed_is_another_text(reference: Build, pair: tuple[Path, Path], plain: Pass) -> None:
    """The negative control of the equalities: the comparison sees texts that differ."""
    other = run_pass(reference, RunConfig(pair[0]), job(temperature=0.8, seed=7))
    assert len(compare.divergences(job().cases, plain, other)) == N_PROMPTS
