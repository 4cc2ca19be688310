"""Draft trees and rounds on recorded draft scores; pure Python, no torch.

A recorded round holds, per slot, K candidates with log-probabilities, and where the target's own next tokens are among
them. Since the target's text is fixed beforehand, the accepted part of a chain or tree is exact: the longest prefix of
that text which the chain or tree holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# log-probabilities of a slot's candidates, given the predecessor's candidate index (-1: the anchor)
Scores = Callable[[int, int], Sequence[float]]
Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """How a tree is built.

    Attributes:
        budget: nodes besides the root.
        top_k: candidates per slot that may become nodes.
        spine: how many nodes of the greedy chain are put in before the heap starts.
        depth: slots of a block, n_max.
    """

    budget: int
    top_k: int
    spine: int
    depth: int


def ranked(scores: Sequence[float], top_k: int) -> list[int]:
    """Candidate indices, best first, ties by index."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_k]


def build_tree(scores: Scores, shape: TreeShape) -> set[Path]:
    """The most probable prefixes of a block, as paths of candidate indices.

    Best-first: the heap holds, for every node taken, its next sibling and its best child.
    """
    nodes: set[Path] = set()
    path: Path = ()
    for slot in range(min(shape.spine, shape.depth, shape.budget)):
        path = (*path, ranked(scores(slot, path[-1] if path else -1), 1)[0])
        nodes.add(path)
    orders: dict[tuple[int, int], list[int]] = {}

    def order(slot: int, before: int) -> list[int]:
        key = (slot, before)
        if key not in orders:
            orders[key] = ranked(scores(slot, before), shape.top_k)
        return orders[key]

    # (minus log-probability of the path, serial, parent path, parent's log-probability, rank among siblings)
    heap: list[tuple[float, int, Path, float, int]] = []
    serial = 0

    def push(parent: Path, parent_logp: float, rank: int) -> None:
        nonlocal serial
        slot, before = len(parent), parent[-1] if parent else -1
        if slot < shape.depth and rank < len(order(slot, before)):
            logp = parent_logp + scores(slot, before)[order(slot, before)[rank]]
            heapq.heappush(heap, (-logp, serial, parent, parent_logp, rank))
            serial += 1

    push((), 0.0, 0)
    while heap and len(nodes) < shape.budget:
        minus, _, parent, parent_logp, rank = heapq.heappop(heap)
        before = parent[-1] if parent else -1
        node = (*parent, order(len(parent), before)[rank])
        nodes.add(node)
        push(parent, parent_logp, rank + 1)
        push(node, -minus, 0)
    return nodes


def depth_held(nodes: set[Path], truth: Sequence[int]) -> int:
    """Length of the longest prefix of `truth` (candidate indices, -1: not among them) that the tree holds."""
    n = 0
    while n < len(truth) and truth[n] >= 0 and tuple(truth[: n + 1]) in nodes:
        n += 1
    return n


def play(depth_at: Callable[[int], int], n_tokens: int) -> list[int]:
    """Accepted drafts of every round of one text, by llama.cpp's rule for the last one.

    The first token comes from the prompt's pass. A round with r tokens left to emit drafts at most r - 1, so it emits
    at most r; a round that is cut, or that drafts nothing, counts.

    Args:
        depth_at: drafts that would be accepted with emitted token i as anchor.
        n_tokens: tokens of the text, the first included.
    """
    accepted, emitted = [], 1
    while emitted < n_tokens:
        n = min(depth_at(emitted - 1), n_tokens - emitted - 1)
        accepted.append(n)
        emitted += n + 1
    return accepted


def repetition_rate(ids: Sequence[int], n: int = 8) -> float:
    """Share of tokens that end an n-gram which occurred before in the same text."""
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for i in range(n, len(ids) + 1):
        gram = tuple(ids[i - n : i])
        repeats += gram in seen
        seen.add(gram)
    return repeats / max(len(ids) - n + 1, 1)
