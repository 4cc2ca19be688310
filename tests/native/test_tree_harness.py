"""The tools of the tree tests, checked without trees: they would prove nothing on a dead model or an inexact build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tree_checks
import tree_models
import tree_player
from hypothesis import given
from tree_lib import CheckFailed, Params, Tree, WorkerDied, chain
from tree_strategies import FIXED, trees


@pytest.mark.parametrize("name", [*tree_models.HYBRID, *tree_models.ATTENTION, "trained"])
@pytest.mark.parametrize("unified", [False, True])
def test_models_are_alive_and_the_build_is_exact(run: Callable[..., Any], name: str, unified: bool) -> None:
    run(tree_checks.harness, tree_models.path(name), Params(n_seq_max=2, kv_unified=unified))


def test_files_are_small_and_the_same_every_time(tmp_path: Path) -> None:
    for name in tree_models.NAMES:
        data = Path(tree_models.path(name)).read_bytes()
        assert len(data) < 2 << 20
        assert data == tree_models.write(tmp_path, name).read_bytes()


def test_a_real_shape_is_written_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "layers.gguf"
    tree_models.write_08b(path, n_layer=4, n_vocab=1024)
    shapes = {t.name: [int(n) for n in t.shape] for t in gguf.GGUFReader(path).tensors}
    assert shapes["token_embd.weight"] == [1024, 1024]
    assert shapes["blk.0.attn_qkv.weight"] == [1024, 6144]
    assert shapes["blk.3.attn_q.weight"] == [1024, 4096]


@FIXED
@given(tree=trees())
def test_strategy_makes_level_order_trees(tree: Tree) -> None:
    depths = [len(tree.path(i)) for i in range(len(tree.tokens))]
    assert depths == sorted(depths)
    assert all(tree.parents[i] < i for i in range(1, len(depths)))
    assert {i for leaf in tree.leaves() for i in tree.path(leaf)} == set(range(len(depths)))


def test_plain_text_through_the_player(run: Callable[..., Any]) -> None:
    """The player's bookkeeping holds without trees."""
    steps = [
        ("decode", {0: tree_checks.PROMPT, 1: (1, 2, 3)}),
        ("decode", {0: (4, 5), 1: (6,), 2: (9, 9, 9)}, True),
        ("copy", 0, 1),
        ("save", 1, "a"),
        ("remove", 0),
        ("load", "a", 2),
        ("decode", {2: (1,), 0: (2, 3)}),
    ]
    for name in ("qwen35", "gemma3"):
        for unified in (False, True):
            compared, error = run(
                tree_player.play, tree_models.path(name), Params(n_seq_max=3, tree=0, kv_unified=unified), steps
            )
            assert compared > 50
            assert error == 0.0


def test_a_wrong_row_is_seen(run: Callable[..., Any]) -> None:
    """Negative control of the player: a context that holds something else fails."""
    with pytest.raises(CheckFailed, match="logits differ"):
        run(wrong_token, tree_models.path("qwen35"))


def wrong_token(path: str) -> None:
    with tree_player.Player(path, Params(tree=0)) as player:
        player.decode({0: tree_checks.PROMPT})
        player.committed[0][3] += 1
        player.decode({0: (1,)})


def test_a_worker_that_dies_is_reported_and_started_again(run: Callable[..., Any]) -> None:
    with pytest.raises(WorkerDied, match="exit status -6"):
        run(die)
    assert run(chain, (1, 2)) == Tree((1, 2), (0, 0))


def die() -> None:
    import os

    os.abort()
