"""Draft trees on attention models, with full and sliding-window caches: masks, cells and the rules of a pending tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tree_checks
import tree_models
import tree_player
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_checks import BUSHY, PROMPT, STAR
from tree_lib import Q8_0, Params, Tree, chain
from tree_strategies import FIXED, contexts, prompts, rounds, trees

Run = Callable[..., Any]
both = pytest.mark.parametrize("name", tree_models.ATTENTION)
caches = pytest.mark.parametrize("unified", [False, True], ids=["cache each", "one cache"])


@st.composite
def scripts(draw: st.DrawFn, *, accept: bool, n: int) -> tuple[Params, list[tuple[Any, ...]]]:
    params = draw(contexts())
    return params, draw(rounds(params, accept=accept, n=n))


# ---------------------------------------------------------------------------------------------------------------- logits


@both
@FIXED
@given(params=contexts(n_seq_max=1), data=st.data())
def test_every_node_equals_a_fresh_context(run: Run, name: str, params: Params, data: st.DataObject) -> None:
    steps: list[Any] = [("decode", {0: prompt})] if (prompt := data.draw(prompts(params.n_ubatch))) else []
    run(tree_player.play, tree_models.path(name), params, [*steps, ("decode", {0: data.draw(trees())})])


@both
@settings(FIXED, max_examples=10)
@given(params=contexts(n_seq_max=1), prompt=prompts(max_size=200), tree=trees(12))
def test_the_reference_itself_made_anew_for_each_path(
    run: Run, name: str, params: Params, prompt: tuple[int, ...], tree: Tree
) -> None:
    steps: list[Any] = [("decode", {0: prompt})] if prompt else []
    run(tree_player.play, tree_models.path(name), params, [*steps, ("decode", {0: tree}), ("accept", 0, 0)], fresh=True)


@both
@settings(FIXED, max_examples=40)
@given(script=scripts(accept=False, n=2))
def test_several_sequences_in_one_decode(run: Run, name: str, script: tuple[Params, list[Any]]) -> None:
    """Trees of one to three sequences, prompts of others in the same batch; dropped trees leave no trace."""
    run(tree_player.play, tree_models.path(name), *script)


@both
@caches
def test_tree_with_a_long_prompt_of_another_sequence(run: Run, name: str, unified: bool) -> None:
    """The prompt takes several ubatches, the tree the last one."""
    other = tuple((3 * i + 1) % 300 for i in range(300))
    params = Params(n_ubatch=64, kv_unified=unified)
    for work in ({0: BUSHY, 1: other}, {1: other, 0: BUSHY}, {2: STAR, 1: other, 0: BUSHY}):
        run(tree_player.play, tree_models.path(name), params, [("decode", {0: PROMPT}), ("decode", work), ("accept", 0, 8)])


@both
def test_a_window_cache_of_window_size(run: Run, name: str) -> None:
    params = Params(swa_full=False)
    run(tree_player.play, tree_models.path(name), params, [("decode", {0: PROMPT}), ("decode", {0: BUSHY}), ("accept", 0, 8)])


@both
def test_a_tree_longer_than_the_window(run: Run, name: str) -> None:
    """Nodes deeper than the window do not see the root."""
    words = tuple(range(tree_models.WINDOW + 9))
    deep = Tree((*words, 77), (*chain(words).parents, len(words) - 2))
    for prompt in ((), PROMPT[:5], PROMPT):
        steps: list[Any] = [("decode", {0: prompt})] if prompt else []
        run(tree_player.play, tree_models.path(name), Params(), [*steps, ("decode", {0: deep}), ("accept", 0, len(words))])


# ------------------------------------------------------------------------------------- other arithmetic: the noise floor


@both
@settings(FIXED, max_examples=10)
@given(unified=st.booleans(), prompt=prompts(max_size=300), tree=trees(16))
def test_without_flash_attention(run: Run, name: str, unified: bool, prompt: tuple[int, ...], tree: Tree) -> None:
    """Masked cells between visible ones shift sums there, for siblings as for other sequences."""
    params = Params(flash=False, kv_unified=unified, n_seq_max=2)
    path = tree_models.path(name)
    floor = run(tree_player.noise_floor, path, params)
    steps: list[Any] = [("decode", {0: prompt})] if prompt else []
    _, error = run(tree_player.play, path, params, [*steps, ("decode", {0: tree}), ("accept", 0, 1)], bitwise=False)
    assert error <= max(2 * floor, 1e-5)


@both
@settings(FIXED, max_examples=10)
@given(unified=st.booleans(), prompt=prompts(max_size=300), tree=trees(16))
def test_quantised_cache(run: Run, name: str, unified: bool, prompt: tuple[int, ...], tree: Tree) -> None:
    params = Params(type_k=Q8_0, type_v=Q8_0, kv_unified=unified, n_seq_max=2)
    path = tree_models.path(name)
    floor = run(tree_player.noise_floor, path, params)
    steps: list[Any] = [("decode", {0: prompt})] if prompt else []
    _, error = run(tree_player.play, path, params, [*steps, ("decode", {0: tree}), ("accept", 0, 1)], bitwise=False)
    assert error <= 2 * floor


# ---------------------------------------------------------------------------------------------------------------- accept


@both
@settings(FIXED, max_examples=40)
@given(script=scripts(accept=True, n=5))
def test_rounds(run: Run, name: str, script: tuple[Params, list[Any]]) -> None:
    """Accepted paths leave holes in the cache; text, copies and states go on as if there had been no tree."""
    run(tree_player.play, tree_models.path(name), *script)


@both
@caches
@pytest.mark.parametrize("node", range(len(BUSHY.tokens)))
def test_accept_every_node(run: Run, name: str, unified: bool, node: int) -> None:
    steps = [("decode", {0: PROMPT, 1: PROMPT[3:]}), ("decode", {0: BUSHY, 1: STAR}), ("accept", 0, node), ("check_state", 0)]
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), steps)


@both
def test_trim_behind_holes(run: Run, name: str) -> None:
    """Rollback of accepted tokens works as it does without trees."""
    one = [("decode", {0: BUSHY}), ("accept", 0, 8), ("trim", 0, 2), ("check_state", 0)]
    run(tree_player.play, tree_models.path(name), Params(), [("decode", {0: PROMPT[:20]}), *one, *one, *one])


@both
@pytest.mark.parametrize(
    "tree", [BUSHY, STAR, chain(range(33)), Tree(tuple(range(33)), (0,) * 33)], ids=["bushy", "star", "chain", "wide"]
)
def test_full_cache(run: Run, name: str, tree: Tree) -> None:
    run(tree_checks.full_cache, tree_models.path(name), Params(), tree)


# ----------------------------------------------------------------------------------------------------------- the rules


@both
def test_invalid_batches(run: Run, name: str) -> None:
    run(tree_checks.invalid_batches, tree_models.path(name), Params(tree=16), may_jump=False)


@both
def test_invalid_sequences_and_parents(run: Run, name: str) -> None:
    run(tree_checks.invalid_sequences, tree_models.path(name), Params())


def test_larger_than_a_ubatch(run: Run) -> None:
    run(tree_checks.larger_than_ubatch, tree_models.path("qwen3"), Params())


def test_embeddings_are_refused(run: Run) -> None:
    run(tree_checks.embeddings_refused, tree_models.path("qwen3"), Params())


@both
def test_without_init(run: Run, name: str) -> None:
    run(tree_checks.without_init, tree_models.path(name), Params())


START: list[tuple[Any, ...]] = [("decode", {0: PROMPT, 1: PROMPT[:7]}), ("decode", {0: BUSHY})]

# What may happen while the tree of sequence 0 is pending; sequence 1 has plain text.
PENDING: dict[str, list[tuple[Any, ...]]] = {
    "another decode is refused": [("refused", {0: (1,)}, -1, "tree"), ("refused", {0: STAR}, -1, "tree"), ("accept", 0, 8)],
    "with others in the batch too": [("refused", {1: (1, 2), 0: (1,)}, -1, "tree"), ("accept", 0, 3)],
    "other sequences go on": [("decode", {1: (1, 2, 3)}), ("decode", {1: STAR}), ("accept", 1, 2), ("accept", 0, 8)],
    "whole removal drops": [("remove", 0), ("accept_refused", 0, [0]), ("decode", {0: PROMPT[5:]})],
    "removal of its positions drops": [
        ("drop", 0, "seq_rm"),
        ("accept_refused", 0, [0]),
        ("decode", {0: STAR}),
        ("accept", 0, 3),
    ],
    "the empty accept drops": [
        ("drop", 0),
        ("accept_refused", 0, [0]),
        ("accept_refused", 0),
        ("decode", {0: BUSHY}),
        ("accept", 0, 4),
    ],
    "clear drops": [("clear",), ("accept_refused", 0, [0]), ("decode", {0: BUSHY}), ("accept", 0, 8)],
    "copy takes the committed part": [
        ("copy", 0, 2),
        ("decode", {2: (4, 4)}),
        ("accept", 0, 8),
        ("decode", {2: STAR}),
        ("accept", 2, 1),
    ],
    "a tree in the copy": [("copy", 0, 1), ("decode", {1: BUSHY}), ("accept", 1, 5), ("accept", 0, 8)],
    "copy over it drops": [("copy", 1, 0), ("accept_refused", 0, [0]), ("decode", {0: STAR}), ("accept", 0, 3)],
    "saving does not disturb": [("save", 0, "a"), ("check_state", 1), ("accept", 0, 8), ("load", "a", 2), ("decode", {2: STAR})],
    "loading drops": [("save", 1, "a"), ("load", "a", 0), ("accept_refused", 0, [0]), ("decode", {0: BUSHY}), ("accept", 0, 8)],
    "a second accept is refused": [
        ("accept", 0, 5),
        ("accept_refused", 0, [0, 2, 5]),
        ("accept_refused", 0, [0]),
        ("accept_refused", 0),
    ],
    "what is no path is refused": [
        ("accept_refused", 0, [0, 4]),  # skips node 1
        ("accept_refused", 0, [1, 3]),  # no root
        ("accept_refused", 0, [3, 1, 0]),
        ("accept_refused", 0, [0, 1, 5]),
        ("accept_refused", 0, [0, 0]),
        ("accept_refused", 0, [0, 1, 3, 3]),
        ("accept_refused", 0, [0, 99]),
        ("accept_refused", 0, [-1]),
        ("accept_refused", 1, [0]),
        ("accept_refused", 2, [0]),
        ("accept", 0, 8),
    ],
}


@both
@caches
@pytest.mark.parametrize("what", PENDING)
def test_pending_tree(run: Run, name: str, unified: bool, what: str) -> None:
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), [*START, *PENDING[what]])


@both
def test_keeping_another_sequence_drops(run: Run, name: str) -> None:
    steps = [*START, ("keep", 1), ("accept_refused", 0, [0]), ("decode", {0: BUSHY, 1: STAR}), ("accept", 0, 8)]
    run(tree_player.play, tree_models.path(name), Params(kv_unified=True), steps)


@both
def test_keeping_the_sequence_itself_does_not(run: Run, name: str) -> None:
    run(tree_player.play, tree_models.path(name), Params(kv_unified=True), [*START, ("keep", 0), ("accept", 0, 8)])


@both
def test_state_in_a_fresh_context(run: Run, name: str) -> None:
    run(tree_checks.load_elsewhere, tree_models.path(name), Params())


@both
def test_aborted_decode(run: Run, name: str) -> None:
    run(tree_checks.aborted, tree_models.path(name), Params())
