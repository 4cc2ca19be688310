"""Draft trees and rounds on recorded draft scores: many anchors at once.

A recorded anchor holds, per slot, K candidates with log-probabilities, and which of them the target's own next token is.
Since the target's text is fixed beforehand, the accepted part of a chain or tree is exact: the longest prefix of that
text which the chain or tree holds. A chain is the tree of top_k 1.

The rule is that of common/spec-tree.cpp in the patched llama.cpp: the spine first, then best first by the path's
log-probability; of equal ones the child of the parent that was taken first. So a smaller budget's tree is part of a
larger one's, and one run gives every budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Sorted candidates of `A` anchors and `S` slots; the second last axis is the predecessor's candidate (P = 1: any).

    Attributes:
        logp: log-probabilities, best first, `[A, S, P, K]` float64.
        index: which candidate each is, `[A, S, P, K]`.
        truth: the candidate that the text goes on with, -1 if none is, `[A, S]`.
    """

    logp: Tensor
    index: Tensor
    truth: Tensor

    @staticmethod
    def sort(scores: Tensor, truth: Tensor) -> Candidates:
        """From scores `[A, S, P, K]` in the candidates' order; ties by that order."""
        logp, index = scores.sort(dim=-1, descending=True, stable=True)
        return Candidates(logp.double(), index, truth)


@dataclass(frozen=True)
class TreeShape:
    """How trees are built.

    Attributes:
        top_k: children per node, at most.
        spine: nodes of the greedy chain that are taken whatever their probability.
    """

    top_k: int
    spine: int = 0


def held_by_budget(c: Candidates, shape: TreeShape, max_depth: Tensor, budget: int) -> Tensor:
    """How much of the text every tree holds.

    Args:
        c: candidates of `A` anchors.
        shape: top_k and spine.
        max_depth: slots that each anchor may use, `[A]`.
        budget: nodes of the largest tree, the root not counted.

    Returns:
        `[A, budget + 1]`: accepted drafts with a budget of 0, 1, ...
    """
    device, n = c.logp.device, len(c.truth)
    rows = torch.arange(n, device=device)
    n_slots, n_rows, n_best = c.logp.shape[1:]
    top_k, depth_limit = min(shape.top_k, n_best), max_depth.clamp(max=n_slots)
    # per node taken: depth, candidate, next child, path's log-probability, the next child's (-inf: none), on the text
    depth, slot, rank, held = (torch.zeros(n, budget + 1, dtype=torch.long, device=device) for _ in range(4))
    logp = torch.zeros(n, budget + 1, dtype=torch.double, device=device)
    best = torch.full_like(logp, -torch.inf)
    on_text = torch.zeros(n, budget + 1, dtype=torch.bool, device=device)
    on_text[:, 0] = True

    def offer(node: Tensor) -> None:
        """The next child of every anchor's `node` becomes its entry in the heap."""
        at, before, r = depth[rows, node], slot[rows, node] % n_rows, rank[rows, node]
        value = c.logp[rows, at.clamp(max=n_slots - 1), before, r.clamp(max=n_best - 1)]
        best[rows, node] = torch.where((at < depth_limit) & (r < top_k), logp[rows, node] + value, -torch.inf)

    offer(torch.zeros_like(rows))
    in_spine = torch.ones_like(rows, dtype=torch.bool)
    for i in range(1, budget + 1):
        # the spine ends where the chain does; argmax takes the first of equals, the parent that was taken first
        in_spine &= best[:, i - 1].isfinite() & (i <= shape.spine)
        parent = torch.where(in_spine, i - 1, best.argmax(1))
        value = best[rows, parent]
        real = value.isfinite()
        at = depth[rows, parent].clamp(max=n_slots - 1)
        pick = c.index[rows, at, slot[rows, parent] % n_rows, rank[rows, parent].clamp(max=n_best - 1)]
        depth[:, i] = torch.where(real, depth[rows, parent] + 1, n_slots)
        slot[:, i], logp[:, i] = pick, torch.where(real, value, 0.0)
        on_text[:, i] = real & on_text[rows, parent] & (pick == c.truth[rows, at])
        held[:, i] = torch.maximum(held[:, i - 1], torch.where(on_text[:, i], depth[:, i], 0))
        rank[rows, parent] += real
        offer(parent)
        offer(torch.full_like(rows, i))
    return held
