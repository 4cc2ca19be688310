"""`/metrics` adds up what `timings` tell of each request, and `/slots` says how each slot drafts."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from llama_dflash.bench import cases
from llama_dflash.builds import Build
from llama_dflash.client import Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

Pair = tuple[Path, Path]
PREFIX = "llamacpp:spec_decode_num_"
# /metrics behind the prefix: timings
SUMS = {
    "rounds_total": "rounds",
    "drafts_total": "draft_n_rounds",
    "draft_tokens_total": "draft_n",
    "accepted_tokens_total": "draft_n_accepted",
    "tree_nodes_total": "draft_n_tree_nodes",
}


def metrics(server: Server) -> dict[str, int]:
    with urllib.request.urlopen(f"{server.client.url}/metrics", timeout=30) as reply:
        lines = [line.split() for line in reply.read().decode().splitlines() if line.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): int(value) for name, value in lines}


@pytest.mark.parametrize(("mode", "budget"), [("ar", None), ("chain", None), ("tree", 22)])
def test_metrics_are_the_sums_of_the_timings(exact: Build, pair: Pair, mode: str, budget: int | None) -> None:
    config = RunConfig(pair[0]) if mode == "ar" else RunConfig(*pair, 15, budget=budget)
    with Server(exact, config, extra=["--metrics", "-np", "2", "-c", "4096", "-t", "1"]) as server:
        prompts = [case.text for case in cases.load("tests", 3)]
        timings = [server.client.complete(p, 2 + 30 * i, Sampling(), ignore_eos=True).timings for i, p in enumerate(prompts)]
        told = metrics(server)
    # A limit of two tokens leaves none to draft.
    assert "draft_n" not in timings[0]
    for name, key in SUMS.items():
        assert told[name] == sum(t.get(key, 0) for t in timings), name
    per_depth = [value for name, value in told.items() if name.startswith("accepted_tokens_per_pos_total")]
    drafted = [t["draft_n_accepted_per_pos"] for t in timings if "draft_n" in t]
    assert per_depth == [sum(column) for column in zip(*drafted, strict=True)]
    assert (told["draft_tokens_total"] > 0) == (mode != "ar")
    assert (told["tree_nodes_total"] == told["draft_tokens_total"] > 0) == (mode == "tree")


def test_slots_tell_how_each_drafts_and_why_not(exact: Build, pair: Pair) -> None:
    flags = ["--slots", "-np", "2", "-c", "4096", "-no-kvu", "-t", "1"]
    with Server(exact, RunConfig(*pair, 15, budget=15), extra=flags) as server:
        assert all("speculative_mode" not in slot for slot in server.client.get("/slots"))
        for slot, n_predict in enumerate((8, 2)):
            server.client.post("/completion", {"prompt": "def f(", "n_predict": n_predict, "id_slot": slot})
        told = [slot["speculative_mode"] for slot in server.client.get("/slots")]
    assert re.match(r"mode = tree, .*budget = 15, .*rollback = replay$", told[0])
    assert told[1] == "mode = ar, no drafting: a limit of 2 tokens leaves none to draft"
