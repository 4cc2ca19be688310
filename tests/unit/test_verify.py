"""What `verify` and `bench` make of passes and options, without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_dflash.bench import compare, stats
from llama_dflash.bench.cases import Case
from llama_dflash.bench.run import Job, Pass
from llama_dflash.builds import Build
from llama_dflash.cli import _options, bench, verify
from llama_dflash.client import Completion, Sampling
from llama_dflash.spec import RunConfig

N_PREDICT = 21
JOB = Job([Case("a", "x"), Case("b", "y")], N_PREDICT, Sampling())
OK = {"effective mode", "drafts were verified", "fewer rounds than AR", "all ids equal"}
OK_TREE = OK | {"nodes per round", "fewer rounds than the chain"}


def passed(effective: dict[str, Any], rounds: int, n_nodes: int, last: int = 0, **timings: int) -> Pass:
    """Two prompts with as many drafted rounds each; the second text ends with token `last`."""
    counts = {"prompt_n": 5, "predicted_ms": 1.0, "rounds": rounds, "draft_n_rounds": rounds, "draft_n": rounds * n_nodes, **timings}
    return Pass(effective, [Completion([*range(1, N_PREDICT), end], "", counts) for end in (0, last)], n_ctx=4096)


@pytest.fixture
def config(make_target: Callable[..., Path], make_draft: Callable[..., Path]) -> RunConfig:
    tokens = [f"t{i}" for i in range(40)]
    return RunConfig(make_target(tokens=tokens), make_draft(tokens=tokens), budget=15).checked()


def judged(
    config: RunConfig, build: Build, tree: dict[str, Any] | None = None, chain: dict[str, Any] | None = None, **effective: Any
) -> dict[str, Any]:
    """The result of `judge` for trees; `tree` and `chain` change the passes, `effective` what the tree's server says."""
    told = {"mode": "tree", "n_max": 7, "budget": config.budget, "top_k": config.top_k or 16, "rollback": "replay", "reason": "", **effective}
    passes = {
        "ar": passed({"mode": "unknown"}, 20, 0),
        "chain": passed({"mode": "chain", "n_max": 7, "rollback": "snapshot"}, **{"rounds": 8, "n_nodes": 7, **(chain or {})}),
        "tree": passed(told, **{"rounds": 6, "n_nodes": 15, **(tree or {})}),
    }
    configs = {"chain": verify.chain_beside(config), "tree": config}
    figures = {m: stats.mode_figures([p], configs.get(m, config)) for m, p in passes.items()}
    result: dict[str, Any] = {"modes": figures}
    verify.judge(result, build, configs, JOB, passes)
    return result


def failed(result: dict[str, Any]) -> set[str]:
    assert result["passed"] == all(result["checks"].values())
    return {name for name, ok in result["checks"].items() if not ok}


@pytest.fixture
def exact_build(make_build: Callable[..., Build]) -> Build:
    return make_build(exact="ON")


def test_a_tree_that_passes(config: RunConfig, exact_build: Build) -> None:
    result = judged(config, exact_build)
    assert set(result["checks"]) == OK_TREE
    assert failed(result) == set()
    tree = result["modes"]["tree"]
    assert (tree["identical"], tree["diverged"], tree["short_prompts"], tree["nodes_per_round"]) == (2, [], [], 15.0)
    assert result["modes"]["chain"]["identical"] == 2


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({"tree": {"n_nodes": 14}}, {"nodes per round"}),
        ({"tree": {"n_nodes": 16}}, {"nodes per round"}),
        ({"tree": {"draft_n": 89}}, {"nodes per round"}),
        ({"tree": {"draft_n_rounds": 4, "draft_n": 60}}, {"nodes per round"}),
        ({"tree": {"draft_n_rounds": 0, "draft_n": 0}}, {"nodes per round", "drafts were verified"}),
        ({"tree": {"rounds": 8}}, {"fewer rounds than the chain"}),
        ({"chain": {"rounds": 6}}, {"fewer rounds than the chain"}),
        ({"tree": {"rounds": 20, "draft_n_rounds": 19, "draft_n": 285}}, {"fewer rounds than AR", "fewer rounds than the chain"}),
        ({"tree": {"last": 9}}, {"all ids equal"}),
        ({"chain": {"last": 9}}, {"all ids equal"}),
        ({"budget": 14}, {"effective mode"}),
    ],
    ids=str,
)
def test_every_check_can_fail(config: RunConfig, exact_build: Build, changes: dict[str, Any], checks: set[str]) -> None:
    assert failed(judged(config, exact_build, **changes)) == checks


def test_the_prompts_that_are_short_are_named(config: RunConfig, exact_build: Build) -> None:
    assert judged(config, exact_build, tree={"draft_n": 89})["modes"]["tree"]["short_prompts"] == ["a", "b"]


def test_a_rollback_that_was_asked_for_is_checked(config: RunConfig, exact_build: Build) -> None:
    asked = replace(config, rollback="replay")
    assert failed(judged(asked, exact_build)) == set()
    assert failed(judged(asked, exact_build, rollback="snapshot")) == {"effective mode"}


@pytest.mark.parametrize(("options", "nodes"), [({"top_k": 1}, 7), ({"budget": 1}, 1), ({"budget": 7, "spine": 7}, 7)], ids=str)
def test_a_tree_without_branches_need_not_win(config: RunConfig, exact_build: Build, options: dict[str, Any], nodes: int) -> None:
    result = judged(replace(config, **options), exact_build, tree={"rounds": 8, "n_nodes": nodes})
    assert set(result["checks"]) == OK_TREE - {"fewer rounds than the chain"}
    assert failed(result) == set()


@pytest.mark.parametrize(("budget", "n_max"), [(1, 1), (6, 6), (7, 7), (31, 7)])
def test_the_chain_beside_a_tree_has_no_more_nodes(config: RunConfig, budget: int, n_max: int) -> None:
    tree = replace(config, budget=budget, top_k=4, spine=1, rollback="replay")
    assert verify.chain_beside(tree) == RunConfig(config.target, config.draft, n_max, rollback="replay")


@pytest.mark.parametrize(("chain_gap", "tree_gap"), [(0.1, 0.1), (0.3, 0.1), (0.1, 0.3)])
def test_noise_of_an_inexact_build_is_judged_for_both_modes(
    config: RunConfig, make_build: Callable[..., Build], monkeypatch: pytest.MonkeyPatch, chain_gap: float, tree_gap: float
) -> None:
    def explain(build: Build, config: RunConfig, job: Job, reference: Pass, found: list[dict[str, Any]]) -> float:
        found[0]["top2_gap"] = {8: chain_gap, 9: tree_gap}[found[0]["got"]]
        return 0.02

    monkeypatch.setattr(compare, "explain", explain)
    result = judged(config, make_build(), tree={"last": 9}, chain={"last": 8})
    assert result["noise_floor"] == 0.02
    assert failed(result) == (set() if chain_gap == tree_gap else {"differences within arithmetic noise"})


CHOICE = _options.Choice(n_max=5, budget=8, top_k=3, spine=2, rollback="replay")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, {"n_max": 5, "budget": 8, "top_k": 3, "spine": 2, "rollback": "replay"}),
        ("tree", {"n_max": 5, "budget": 8, "top_k": 3, "spine": 2, "rollback": "replay"}),
        ("chain", {"n_max": 5, "rollback": "replay"}),
    ],
)
def test_run_config_takes_what_the_mode_uses(pair: tuple[Path, Path], mode: str | None, expected: dict[str, Any]) -> None:
    assert _options.run_config(CHOICE, mode) == RunConfig(*pair, **expected)


def test_run_config_by_default(pair: tuple[Path, Path]) -> None:
    configs = {mode: _options.run_config(_options.Choice(), mode) for mode in (None, "ar", "chain", "tree")}
    chain = RunConfig(*pair, 15)
    assert configs == {None: chain, "ar": RunConfig(pair[0]), "chain": chain, "tree": replace(chain, budget=15)}
    assert _options.run_config(CHOICE, "ar") == RunConfig(pair[0])


def test_summarize_compares_every_mode_with_plain_decoding(config: RunConfig, exact_build: Build) -> None:
    configs = {"ar": RunConfig(config.target), "chain": verify.chain_beside(config), "tree": replace(config, spine=3)}
    effective = {"mode": "tree", "n_max": 7, "budget": 15, "top_k": 16, "rollback": "replay"}
    passes = {
        "ar": [passed({"mode": "ar"}, 20, 0)],
        "chain": [passed({"mode": "chain", "n_max": 7}, 8, 7)],
        "tree": [passed(effective, 6, 15, last=9)],
    }
    result = bench.summarize("bench", exact_build, configs, JOB, passes)
    assert [result["modes"][m].get("identical") for m in configs] == [None, 2, 1]
    assert result["modes"]["tree"]["spine"] == 3
    assert set(result["models"]) == {"target", "draft"}
