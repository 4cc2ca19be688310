"""Random trees, prompts and scripts for hypothesis; small and plain examples come first when they shrink."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from tree_lib import Params, Tree

N_TOKENS = 300

# Every run tests the same examples; the builds are exact, so a failure is never a matter of time.
FIXED = settings(derandomize=True, deadline=None, database=None, print_blob=False)


def tokens() -> st.SearchStrategy[int]:
    """Few distinct tokens appear often, so that siblings and cousins share them."""
    return st.integers(0, 3) | st.integers(0, N_TOKENS - 1)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 33, min_nodes: int = 2) -> Tree:
    """A tree in level order: a chain, a star or anything between."""
    n = draw(st.integers(min_nodes, max_nodes))
    shape = draw(st.sampled_from(["chain", "star", "bushy", "any"]))
    parents = [0]
    depth = [0]
    for i in range(1, n):
        if shape == "chain":
            low = high = i - 1
        elif shape == "star":
            low = high = 0
        else:
            # Level order: no parent before the previous node's parent. A bushy tree stays near it.
            low = parents[-1]
            high = min(i - 1, low + 1) if shape == "bushy" else i - 1
        parents.append(draw(st.integers(low, high)) if low < high else low)
        depth.append(depth[parents[-1]] + 1)
    assert depth == sorted(depth)
    return Tree(tuple(draw(st.lists(tokens(), min_size=n, max_size=n))), tuple(parents))


def texts(min_size: int, max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(tokens(), min_size=min_size, max_size=max_size).map(tuple)


@st.composite
def prompts(draw: st.DrawFn, n_ubatch: int = 512, max_size: int = 600) -> tuple[int, ...]:
    """0 to 600 tokens, often about as many as a ubatch holds. Long ones come from a seed: shrinking them leads nowhere."""
    near = [n for n in (n_ubatch - 1, n_ubatch, n_ubatch + 1) if n <= max_size]
    n = draw(st.integers(0, 12) | st.integers(0, max_size) | st.sampled_from(near or [0]))
    if n <= 12:
        return draw(texts(n, n))
    a, b = draw(st.integers(0, 50)), draw(st.integers(1, 7))
    return tuple((a + b * i + i * i) % N_TOKENS for i in range(n))


@st.composite
def contexts(draw: st.DrawFn, /, **fixed: Any) -> Params:
    """Contexts that differ in what trees meet: ubatch size, one cache or one per sequence, number of sequences."""
    values: dict[str, Any] = {
        "n_ubatch": draw(st.sampled_from([512, 64])),
        "kv_unified": draw(st.booleans()),
        "n_seq_max": draw(st.integers(1, 3)),
    }
    return Params(**{**values, **fixed})


@st.composite
def rounds(draw: st.DrawFn, params: Params, *, accept: bool, n: int = 1, max_nodes: int = 33) -> list[tuple[Any, ...]]:
    """Prompts for some sequences, then n decodes of trees and plain tokens mixed.

    With `accept` the trees are accepted up to a random node (or dropped), and sequences are copied, removed, saved and
    loaded between the decodes; without it every tree is dropped.
    """
    seqs = list(range(params.n_seq_max))
    steps: list[tuple[Any, ...]] = []
    for seq in draw(st.permutations(seqs)):
        text = draw(prompts(params.n_ubatch))
        if text:
            steps.append(("decode", {seq: text}))
    saved: list[str] = []
    for i in range(n):
        order = draw(st.permutations(seqs))[: draw(st.integers(1, len(seqs)))]
        work: dict[int, Any] = {}
        # The first sequence always has a tree; the rows of all trees must fit into one ubatch.
        most = min(max_nodes, params.n_ubatch // len(order), params.tree)
        for j, seq in enumerate(order):
            is_tree = j == 0 or draw(st.booleans())
            work[seq] = draw(trees(most)) if is_tree else draw(texts(1, 40))
        steps.append(("decode", work, draw(st.booleans())))
        for seq, item in work.items():
            if not isinstance(item, Tree):
                continue
            node = draw(st.none() | st.integers(0, len(item.tokens) - 1)) if accept else None
            if node is None:
                steps.append(("drop", seq, draw(st.sampled_from(["accept", "seq_rm"]))))
            else:
                steps.append(("accept", seq, node))
        # What happens between two decodes.
        kind = draw(st.sampled_from(["nothing", "check", "copy", "remove", "save", "load", "plain"]))
        seq = draw(st.sampled_from(seqs))
        if kind == "check":
            steps.append(("check_state", seq))
        elif kind == "copy" and len(seqs) > 1:
            steps.append(("copy", seq, draw(st.sampled_from([s for s in seqs if s != seq]))))
        elif kind == "remove" and i % 3 == 2:
            steps.append(("remove", seq))
        elif kind == "save":
            saved.append(str(i))
            steps.append(("save", seq, str(i)))
        elif kind == "load" and saved:
            steps.append(("load", draw(st.sampled_from(saved)), seq))
        elif kind == "plain":
            steps.append(("decode", {seq: draw(texts(1, 5))}))
    return steps
