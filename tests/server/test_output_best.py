"""`--output-best`: the best tokens of a row cross from the device instead of the row, and nobody can tell from the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_dflash.bench import cases
from llama_dflash.builds import Build
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

Pair = tuple[Path, Path]
USED = "best tokens are enough"

# What the best tokens of a row decide: the first sampler that does anything is top-k, or the temperature is 0.
DECIDED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy alone": {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0},
    "sampled": {"temperature": 0.8, "seed": 1},
    "top-k 5": {"temperature": 1.2, "seed": 2, "top_k": 5},
    "no end": {"temperature": 0, "ignore_eos": True},
    "lowered": {"temperature": 0.7, "seed": 3, "logit_bias": [[40, -5.0]]},
    "grammar behind": {"temperature": 0, "grammar": "root ::= [a-z ]+"},
}
# What needs the whole row.
WHOLE: dict[str, dict[str, Any]] = {
    "no top-k": {"temperature": 0.8, "seed": 4, "top_k": 0},
    "wide top-k": {"temperature": 0.8, "seed": 4, "top_k": 100},
    "penalties": {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.2},
    "raised": {"temperature": 0.7, "seed": 6, "logit_bias": [[300, 2.0]]},
    "mirostat": {"temperature": 0.8, "seed": 7, "mirostat": 2},
}


def answers(build: Build, config: RunConfig, n_best: int, requests: dict[str, dict[str, Any]]) -> tuple[list[Any], int]:
    """What the server answers, and how often it took the best tokens for the row."""
    used: list[str] = []
    extra = ["-c", "4096", "-np", "2", "-t", "1", "-lv", "5", "--output-best", str(n_best)]
    with Server(build, config, extra=extra, on_line=lambda line: used.append(line) if USED in line else None) as server:
        told = []
        for case in cases.load("tests", 2):
            for fields in requests.values():
                body = {
                    "prompt": case.text,
                    "n_predict": 32,
                    "return_tokens": True,
                    "cache_prompt": False,
                    "n_probs": 0,
                    **fields,
                }
                reply = server.client.post("/completion", body)
                told.append((reply["tokens"], reply["timings"]["rounds"]))
    return told, len(used)


@pytest.mark.parametrize("budget", [None, 15])
def test_answers_do_not_tell_whether_rows_crossed(exact: Build, pair: Pair, budget: int | None) -> None:
    config = RunConfig(pair[0]) if budget is None else RunConfig(*pair, 15, budget=budget)
    rows, n_used = answers(exact, config, 0, DECIDED)
    assert n_used == 0
    for n_best in (64, 8):
        best, n_used = answers(exact, config, n_best, DECIDED)
        assert best == rows
        assert n_used > 0


def test_a_row_is_read_where_its_best_tokens_do_not_decide(exact: Build, pair: Pair) -> None:
    config = RunConfig(*pair, 15, budget=15)
    rows, _ = answers(exact, config, 0, WHOLE)
    best, n_used = answers(exact, config, 64, WHOLE)
    assert best == rows
    assert n_used == 0


def test_probabilities_are_those_of_the_row(exact: Build, pair: Pair) -> None:
    told = []
    for n_best in (0, 64):
        with Server(exact, RunConfig(pair[0]), extra=["-c", "2048", "-t", "1", "--output-best", str(n_best)]) as server:
            body = {"prompt": "def f(", "n_predict": 12, "temperature": 0.8, "seed": 5, "n_probs": 3}
            told.append(server.client.post("/completion", body)["completion_probabilities"])
    assert told[0] == told[1]
    assert len(told[0]) == 12
