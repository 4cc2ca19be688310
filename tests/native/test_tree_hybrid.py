"""Draft trees on hybrid models (gated delta net and attention): outputs, and that a dropped tree leaves no trace."""

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
from tree_lib import Params, Tree, chain
from tree_strategies import FIXED, contexts, prompts, rounds, trees

Run = Callable[..., Any]
random_models = pytest.mark.parametrize("name", tree_models.HYBRID)
all_models = pytest.mark.parametrize("name", [*tree_models.HYBRID, "trained"])
caches = pytest.mark.parametrize("unified", [False, True], ids=["cache each", "one cache"])


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Params, list[tuple[Any, ...]]]:
    params = draw(contexts())
    return params, draw(rounds(params, accept=False, n=3))


@random_models
@settings(FIXED, max_examples=60)
@given(params=contexts(n_seq_max=1), data=st.data())
def test_every_node_equals_a_fresh_context(run: Run, name: str, params: Params, data: st.DataObject) -> None:
    """And after the drop the same tree again, then plain text: no trace of the first."""
    steps: list[Any] = [("decode", {0: prompt})] if (prompt := data.draw(prompts(params.n_ubatch))) else []
    tree = data.draw(trees())
    again = [("decode", {0: tree}), ("drop", 0)]
    run(tree_player.play, tree_models.path(name), params, [*steps, *again, *again, ("decode", {0: (3, 1)})])


@settings(FIXED, max_examples=12)
@given(params=contexts(n_seq_max=2), data=st.data())
def test_trained_model(run: Run, params: Params, data: st.DataObject) -> None:
    steps: list[Any] = [("decode", {0: prompt})] if (prompt := data.draw(prompts(params.n_ubatch, 300))) else []
    steps += [("decode", {0: data.draw(trees()), 1: data.draw(trees(16) | st.just((1, 2, 3)))})]
    run(tree_player.play, tree_models.path("trained"), params, steps)


@random_models
@settings(FIXED, max_examples=8)
@given(params=contexts(n_seq_max=1), prompt=prompts(max_size=200), tree=trees(12))
def test_the_reference_itself_made_anew_for_each_path(
    run: Run, name: str, params: Params, prompt: tuple[int, ...], tree: Tree
) -> None:
    steps: list[Any] = [("decode", {0: prompt})] if prompt else []
    run(tree_player.play, tree_models.path(name), params, [*steps, ("decode", {0: tree})], fresh=True)


@random_models
@settings(FIXED, max_examples=30)
@given(script=scripts())
def test_several_sequences_in_one_decode(run: Run, name: str, script: tuple[Params, list[Any]]) -> None:
    run(tree_player.play, tree_models.path(name), *script)


@all_models
@caches
def test_tree_with_a_long_prompt_of_another_sequence(run: Run, name: str, unified: bool) -> None:
    """Prompt ubatches do not overwrite the rows of the tree; one token and equal lengths are shapes of their own."""
    other = tuple((3 * i + 1) % 300 for i in range(200))
    path, params = tree_models.path(name), Params(n_ubatch=64, kv_unified=unified)
    for text in (other, other[:1], other[: len(BUSHY.tokens)], other[:16]):
        for work in ({0: BUSHY, 1: text}, {1: text, 0: BUSHY}, {2: STAR, 1: text, 0: BUSHY}):
            run(tree_player.play, path, params, [("decode", {0: PROMPT}), ("decode", work), ("drop", 0)])


@all_models
@caches
def test_shared_recurrent_cell(run: Run, name: str, unified: bool) -> None:
    """After a copy two sequences share one recurrent cell; a tree of one must not touch the other."""
    path, params = tree_models.path(name), Params(kv_unified=unified)
    start: list[tuple[Any, ...]] = [("decode", {0: PROMPT}), ("copy", 0, 1)]
    for src, dst in ((0, 1), (1, 0)):
        run(tree_player.play, path, params, [*start, ("decode", {src: BUSHY}), ("check_state", dst), ("drop", src)])
        run(tree_player.play, path, params, [*start, ("decode", {src: BUSHY}), ("decode", {dst: (4, 5)}), ("drop", src)])
        run(tree_player.play, path, params, [*start, ("decode", {src: BUSHY, dst: STAR}), ("drop", dst), ("drop", src)])
        run(
            tree_player.play,
            path,
            params,
            [*start, ("decode", {src: BUSHY, dst: (9,)}), ("remove", src), ("decode", {dst: STAR})],
        )


@random_models
@caches
def test_swapped_recurrent_cells(run: Run, name: str, unified: bool) -> None:
    """Sequences used in changing order move their recurrent cells; each tree starts from its own state."""
    steps: list[tuple[Any, ...]] = [("decode", {s: PROMPT[s:]}) for s in (2, 0, 3, 1)]
    for order in ((3,), (1, 2), (0, 3), (2,), (2, 0, 1), (3, 1), (1, 2, 3, 0)):
        steps.append(("decode", {s: (BUSHY, STAR, (7, 7), chain((1, 2, 3)))[s] for s in order}))
        steps += [("drop", s) for s in order if s != 2]
        steps.append(("decode", {s: (s, 5) for s in reversed(order)}))
    run(tree_player.play, tree_models.path(name), Params(kv_unified=unified), steps)


@random_models
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65])
def test_sizes_around_the_padding(run: Run, name: str, n: int) -> None:
    """Two trees of one batch get the same number of rows, whatever their sizes."""
    work = {0: Tree(tuple(range(n)), tuple(max(0, (i - 1) // 2) for i in range(n))), 1: chain((1, 2, 3))}
    run(tree_player.play, tree_models.path(name), Params(tree=65), [("decode", {0: PROMPT}), ("decode", work)])


@all_models
def test_removal_leaves_the_state_as_it_was(run: Run, name: str) -> None:
    steps = [("decode", {0: PROMPT}), ("decode", {0: BUSHY}), ("check_state", 0), ("drop", 0, "seq_rm"), ("check_state", 0)]
    run(tree_player.play, tree_models.path(name), Params(), steps)


@all_models
def test_without_flash_attention(run: Run, name: str) -> None:
    params, path = Params(flash=False, n_seq_max=2), tree_models.path(name)
    floor = run(tree_player.noise_floor, path, params)
    _, error = run(tree_player.play, path, params, [("decode", {0: PROMPT}), ("decode", {0: BUSHY})], bitwise=False)
    assert error <= max(2 * floor, 1e-5)


@random_models
def test_invalid_batches(run: Run, name: str) -> None:
    run(tree_checks.invalid_batches, tree_models.path(name), Params(tree=16), may_jump=name != "qwen3next")


def test_without_init(run: Run) -> None:
    run(tree_checks.without_init, tree_models.path("qwen35"), Params())
