"""`timings` counts verify rounds, so that tokens per round can be had from one answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_dflash.bench import cases
from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

Pair = tuple[Path, Path]
PROMPT = cases.load("tests", 1)[0].text


@pytest.mark.parametrize("n_predict", [1, 2, 3, 16, 17, 64])
def test_rounds_account_for_every_token(exact: Build, pair: Pair, n_predict: int) -> None:
    with Server(exact, RunConfig(*pair, 15)) as server:
        t = server.client.complete(PROMPT, n_predict, Sampling(), ignore_eos=True).timings
    assert t["predicted_n"] == n_predict
    # A round emits the accepted drafts and one token more; the first token is the prompt's.
    assert t["rounds"] + t.get("draft_n_accepted", 0) == n_predict - 1
    assert t.get("draft_n_rounds", 0) <= t["rounds"]
    assert sum(t.get("draft_n_accepted_per_pos", [])) == t.get("draft_n_accepted", 0)
    assert ("draft_n" in t) == (n_predict >= 3)


def test_plain_decoding_has_one_round_a_token(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(pair[0])) as server:
        t = server.client.complete(PROMPT, 20, Sampling(), ignore_eos=True).timings
    assert t["rounds"] == 19
    assert "draft_n" not in t
    assert "draft_n_rounds" not in t


def test_acceptance_falls_with_the_position(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15)) as server:
        t = server.client.complete(PROMPT, 200, Sampling(), ignore_eos=True).timings
    per_position = t["draft_n_accepted_per_pos"]
    assert len(per_position) == 15
    assert per_position == sorted(per_position, reverse=True)
    assert 0 < per_position[0] <= t["draft_n_rounds"]


def test_counts_start_anew_with_every_request(exact: Build, pair: Pair) -> None:
    with Server(exact, RunConfig(*pair, 15)) as server:
        first, second = (server.client.complete(PROMPT, 40, Sampling(), ignore_eos=True).timings for _ in range(2))
    keys = ("rounds", "draft_n", "draft_n_accepted", "draft_n_rounds", "draft_n_accepted_per_pos")
    assert {k: first[k] for k in keys} == {k: second[k] for k in keys}
