"""The gated delta rule over a tree of tokens: float64 reference, and the order in which ggml's op walks a tree.

Arrays are row-major, outermost dimension first, which is ggml's layout read backwards:

    q, k    `[n_seqs_k, T, H_k, S]`, `n_seqs % n_seqs_k == 0`, `H_v % H_k == 0`
    v       `[n_seqs, T, H_v, S]`
    g       `[n_seqs, T, H_v, 1]` (scalar gate) or `[n_seqs, T, H_v, S]` (KDA), logarithms
    beta    `[n_seqs, T, H_v, 1]`
    state   `[n_seqs, H_v, S, S]`, transposed: `state[n, h, j, i]` multiplies `k[i]` and gives `v[j]`

A tree is the list of its rows' parents: row 0 is the root and its own parent, `parents[i] < i`. The root
continues from the committed state, every other row from the state of its parent. Rows behind the tree are padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEEP = -1  # src: the working state of the step before
START = -2  # src: the committed state
COPY = -3  # src: no step, the output row is a copy of row dst
NONE = -1  # dst: the state is not stored


def order(parents: Sequence[int], n_rows: int) -> np.ndarray:
    """Depth-first walk of a tree in few stack slots.

    The walk enters the children of a node in ascending order of subtree size, equal sizes in row order. A node with
    two or more children is stored in the lowest free slot; its first child continues from the working state, the
    others load the slot. The slot is free again when the last and largest child is entered, so that a slot is only
    held during subtrees of at most half the rows: `n` rows need at most `floor(log2(n + 1)) - 1` slots, a chain none.

    It is a loop over a stack of (row, src, number of slots in use): pop a row, emit its step, push its children in
    reverse. The slots in use are always `0 .. live - 1`, therefore the lowest free one is `live`; the last child is
    pushed with `live`, the ones before it with `live + 1`.

    Args:
        parents: parent of each row.
        n_rows: rows of the batch; those behind the tree become copies of the root's output.

    Returns:
        Steps `{node, src, dst}`, int32 `[n_rows, 3]`.

    Raises:
        ValueError: `parents` is no tree or has more than `n_rows` rows.
    """
    check_tree(parents, n_rows)
    n = len(parents)

    size = [1] * n
    for i in range(n - 1, 0, -1):
        size[parents[i]] += size[i]
    children: list[list[int]] = [[] for _ in range(n)]
    for i in range(1, n):
        children[parents[i]].append(i)

    steps = []
    stack = [(0, START, 0)]
    while stack:
        node, src, live = stack.pop()
        kids = sorted(children[node], key=lambda i: size[i])
        slot = live if len(kids) > 1 else NONE
        steps.append((node, src, slot))
        for i in reversed(range(len(kids))):
            is_last = i == len(kids) - 1
            stack.append((kids[i], KEEP if i == 0 else slot, live if is_last else live + 1))

    steps += [(row, COPY, 0) for row in range(n, n_rows)]
    return np.array(steps, dtype=np.int32)


def n_slots(steps: np.ndarray) -> int:
    """Number of stack slots that `{node, src, dst}` steps need."""
    stores = steps[steps[:, 1] != COPY, 2]
    return int(stores.max(initial=NONE)) + 1


def check_tree(parents: Sequence[int], n_rows: int) -> None:
    """Raise ValueError unless `parents` is a tree of at most `n_rows` rows."""
    if not 1 <= len(parents) <= n_rows:
        raise ValueError(f"{len(parents)} rows, expected 1 to {n_rows}")
    if parents[0] != 0:
        raise ValueError(f"parent of the root is {parents[0]}, expected 0")
    for i in range(1, len(parents)):
        if not 0 <= parents[i] < i:
            raise ValueError(f"parent of row {i} is {parents[i]}, expected 0 to {i - 1}")


def path(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    rows = [row]
    while rows[-1] != 0:
        rows.append(parents[rows[-1]])
    return rows[::-1]


def leaves(parents: Sequence[int]) -> list[int]:
    """Rows that are nobody's parent."""
    return sorted(set(range(len(parents))) - set(parents[1:])) if len(parents) > 1 else [0]


def update(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token of every head.

    Args:
        state: `[H, S, S]`, transposed; not changed.
        q: `[H, S]`, as k and v.
        k: see q.
        v: see q.
        g: `[H, 1]` or `[H, S]`.
        beta: `[H, 1]`.

    Returns:
        The new state and the output `[H, S]`.

    Source: Gated DeltaNet, arXiv 2412.06464, equation 10; with a vector gate, Kimi Linear, arXiv 2510.26692.
    """
    state = state * np.exp(g)[:, None, :]
    held = np.einsum("hji,hi->hj", state, k)
    state = state + np.einsum("hj,hi->hji", (v - held) * beta, k)
    return state, np.einsum("hji,hi->hj", state, q) / np.sqrt(q.shape[-1])


def tree(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    parents: Sequence[Sequence[int]],
) -> np.ndarray:
    """Outputs of every row in float64, `[n_seqs, T, H_v, S]`; padding rows repeat the root's.

    It keeps the state of every row and never looks at an order. Shapes are in the module's docstring; `parents` has a
    tree for every sequence.
    """
    q, k, v, g, beta, state = (np.asarray(x, dtype=np.float64) for x in (q, k, v, g, beta, state))
    n_seqs, n_rows, n_heads, _ = v.shape
    out = np.empty(v.shape)
    heads = np.arange(n_heads) % q.shape[2]
    for seq in range(n_seqs):
        check_tree(parents[seq], n_rows)
        seq_k = seq // (n_seqs // q.shape[0])
        states: list[np.ndarray] = []
        for row, parent in enumerate(parents[seq]):
            before = states[parent] if row else state[seq]
            after, out[seq, row] = update(
                before, q[seq_k, row, heads], k[seq_k, row, heads], v[seq, row], g[seq, row], beta[seq, row]
            )
            states.append(after)
        out[seq, len(parents[seq]) :] = out[seq, 0]
    return out
