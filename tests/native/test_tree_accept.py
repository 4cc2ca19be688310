"""Acceptance on hybrid models: the committed state is that of the accepted path, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tree_checks
import tree_models
import tree_player
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_attention import PENDING, START
from tree_checks import BUSHY, PROMPT, STAR
from tree_lib import Params, Tree, chain
from tree_strategies import FIXED, contexts, prompts, rounds, trees

Run = Callable[..., Any]
random_models = pytest.mark.parametrize("name", tree_models.HYBRID)
all_models = pytest.mark.parametrize("name", [*tree_models.HYBRID, "trained"])
caches = pytest.mark.parametrize("unified", [False, True], ids=["cache each", "one cache"])


@st.composite
def scripts(draw: st.DrawFn, *, n: int, max_nodes: int = 33) -> tuple[Params, list[tuple[Any, ...]]]:
    params = draw(contexts())
    return params, draw(rounds(params, accept=True, n=n, max_nodes=max_nodes))


@random_models
@settings(FIXED, max_examples=60)
@given(params=contexts(n_seq_max=1), data=st.data())
def test_state_after_accept(run: Run, name: str, params: Params, data: st.DataObject) -> None:
    """The state is read at once, which replays the path, or after the next decode, which does too."""
    steps: list[Any] = [("decode", {0: prompt})] if (prompt := data.draw(prompts(params.n_ubatch))) else []
    tree = data.draw(trees())
    steps += [("decode", {0: tree}), ("accept", 0, data.draw(st.integers(0, len(tree.tokens) - 1)))]
    if data.draw(st.booleans()):
        steps.append(("check_state", 0))
    run(tree_player.play, tree_models.path(name), params, steps)


@random_models
@settings(FIXED, max_examples=40)
@given(script=scripts(n=6))
def test_rounds(run: Run, name: str, script: tuple[Params, list[Any]]) -> None:
    run(tree_player.play, tree_models.path(name), *script)


@settings(FIXED, max_examples=8)
@given(script=scripts(n=4, max_nodes=16))
def test_rounds_of_the_trained_model(run: Run, script: tuple[Params, list[Any]]) -> None:
    run(tree_player.play, tree_models.path("trained"), *script)


@all_models
@caches
def test_many_rounds(run: Run, name: str, unified: bool) -> None:
    """Trees, chains and plain decodes in turn; the state is only read at the end."""
    steps: list[tuple[Any, ...]] = [("decode", {0: PROMPT, 1: PROMPT[5:]})]
    for i in range(8):
        steps += [("decode", {0: BUSHY, 1: chain(range(i, i + 6))}), ("accept", 0, (i * 5) % 9), ("accept", 1, i % 6)]
        if i % 3 == 1:
            steps.append(("decode", {0: (i, 3)}))
        if i % 3 == 2:
            steps.append(("decode", {1: (i,), 0: STAR}))
            steps.append(("accept", 0, i % 4))
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), steps)


@all_models
def test_accept_the_root_only(run: Run, name: str) -> None:
    one: list[tuple[Any, ...]] = [("decode", {0: STAR}), ("accept", 0, 0)]
    for prompt in ((), PROMPT[:1], PROMPT[:3], PROMPT):
        start: list[tuple[Any, ...]] = [("decode", {0: prompt})] if prompt else []
        run(
            tree_player.play, tree_models.path(name), Params(), [*start, *one, ("check_state", 0), *one, *one, ("check_state", 0)]
        )


@random_models
@pytest.mark.parametrize("rejected", range(9))
def test_chain_rollback(run: Run, name: str, rejected: int) -> None:
    """A chain of 8 of which the last tokens are not accepted, up to the whole decode."""
    words = chain((5, 4, 3, 2, 1, 2, 3, 4))
    end = ("drop", 0) if rejected == 8 else ("accept", 0, 7 - rejected)
    one = [("decode", {0: words}), end, ("check_state", 0)]
    run(tree_player.play, tree_models.path(name), Params(), [("decode", {0: PROMPT}), *one, *one])


@random_models
@pytest.mark.parametrize("node", range(len(BUSHY.tokens)))
def test_accept_every_node(run: Run, name: str, node: int) -> None:
    steps = [("decode", {0: PROMPT, 1: PROMPT[3:]}), ("decode", {0: BUSHY, 1: STAR}), ("accept", 0, node), ("check_state", 0)]
    run(tree_player.play, tree_models.path(name), Params(), steps)


@all_models
@caches
@pytest.mark.parametrize("replayed", [False, True], ids=["pending", "replayed"])
def test_copy_after_accept(run: Run, name: str, unified: bool, replayed: bool) -> None:
    """Both sequences have the accepted path, then go different ways."""
    steps: list[tuple[Any, ...]] = [*START, ("accept", 0, 8), *([("check_state", 0)] if replayed else []), ("copy", 0, 2)]
    path, params = tree_models.path(name), Params(kv_unified=unified)
    run(tree_player.play, path, params, [*steps, ("decode", {0: (1,)}), ("decode", {2: (2,)})])
    run(
        tree_player.play,
        path,
        params,
        [*steps, ("decode", {2: STAR}), ("accept", 2, 3), ("decode", {0: BUSHY}), ("accept", 0, 4)],
    )
    run(tree_player.play, path, params, [*steps, ("decode", {0: BUSHY, 2: BUSHY}), ("accept", 2, 8), ("accept", 0, 5)])
    run(tree_player.play, path, params, [*steps, ("remove", 0), ("check_state", 2), ("decode", {0: (1,), 2: STAR})])
    run(tree_player.play, path, params, [*steps, ("copy", 2, 3), ("remove", 2), ("decode", {3: STAR, 0: (1, 2)})])


@all_models
@caches
@pytest.mark.parametrize("what", PENDING)
def test_pending_tree(run: Run, name: str, unified: bool, what: str) -> None:
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), [*START, *PENDING[what]])


# What may happen between accept and the replay that the next decode of the sequence does.
ACCEPTED: dict[str, list[tuple[Any, ...]]] = {
    "removal": [("remove", 0), ("decode", {0: PROMPT[4:]})],
    "removal and another tree": [("remove", 0), ("decode", {0: STAR}), ("accept", 0, 1)],
    "clear": [("clear",), ("decode", {0: PROMPT[4:], 1: BUSHY}), ("accept", 1, 8)],
    "load over it": [("save", 1, "a"), ("load", "a", 0), ("decode", {0: STAR})],
    "copy over it": [("copy", 1, 0), ("decode", {0: STAR}), ("accept", 0, 3)],
    "save": [("save", 0, "a"), ("load", "a", 2), ("decode", {0: STAR, 2: (1, 2)}), ("accept", 0, 2)],
    "saves of another": [("check_state", 1), ("check_state", 0)],
    "decodes of another": [("decode", {1: (1, 2, 3)}), ("decode", {1: STAR}), ("accept", 1, 3), ("decode", {2: PROMPT})],
    "decodes with another": [("decode", {1: STAR, 0: BUSHY, 2: (1,)}), ("accept", 0, 8), ("accept", 1, 1)],
    "a refused decode": [("decode", {1: STAR}), ("refused", {1: (1,), 0: (2,)}, -1, "tree"), ("check_state", 0), ("drop", 1)],
    "two accepts": [("accept_refused", 0, [0, 1]), ("accept_refused", 0, [0]), ("decode", {0: BUSHY}), ("accept", 0, 8)],
}


@all_models
@caches
@pytest.mark.parametrize("what", ACCEPTED)
def test_between_accept_and_replay(run: Run, name: str, unified: bool, what: str) -> None:
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), [*START, ("accept", 0, 8), *ACCEPTED[what]])


@random_models
def test_keep(run: Run, name: str) -> None:
    """A sequence that is kept keeps its tree or its accepted path; the others lose theirs."""
    path, params = tree_models.path(name), Params(kv_unified=True)
    for end in ([("keep", 1), ("accept_refused", 0, [0])], [("accept", 0, 8), ("keep", 1)], [("keep", 0), ("accept", 0, 8)]):
        run(tree_player.play, path, params, [*START, *end, ("decode", {0: BUSHY, 1: STAR}), ("accept", 0, 8)])
    run(tree_player.play, path, params, [*START, ("accept", 0, 8), ("keep", 0), ("check_state", 0)])


@all_models
def test_state_in_a_fresh_context(run: Run, name: str) -> None:
    run(tree_checks.load_elsewhere, tree_models.path(name), Params())


@all_models
def test_aborted_decode(run: Run, name: str) -> None:
    run(tree_checks.aborted, tree_models.path(name), Params())


@random_models
@pytest.mark.parametrize(
    "tree", [BUSHY, STAR, chain(range(33)), Tree(tuple(range(33)), (0,) * 33)], ids=["bushy", "star", "chain", "wide"]
)
def test_full_cache(run: Run, name: str, tree: Tree) -> None:
    run(tree_checks.full_cache, tree_models.path(name), Params(), tree)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])  # the pin has no snapshots for qwen3next
def test_snapshots_and_trees_exclude_each_other(run: Run, name: str) -> None:
    run(tree_checks.init_refused, tree_models.path(name), Params(n_rs_seq=4), "n_rs_seq")


def test_a_recurrent_model_is_refused(run: Run) -> None:
    run(tree_checks.init_refused, tree_models.path("mamba"), Params(), "")
