"""Rounds on recorded drafts, and the repetition of texts; numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def room(n_tokens: int, n_slots: int) -> np.ndarray:
    """Slots that a round may use behind emitted token 0, 1, ...: with r tokens to go at most r - 1, `[n_tokens - 1]`."""
    return np.minimum(n_slots, n_tokens - 2 - np.arange(n_tokens - 1))


def play(accepted: np.ndarray) -> list[list[int]]:
    """Accepted drafts of every round of every text, from what would be accepted behind each token, `[texts, n_tokens - 1]`.

    The first token comes from the prompt's pass; a round that is cut by the end, or that drafts nothing, counts.
    """
    rounds: list[list[int]] = []
    for row in accepted.tolist():
        at, out = 0, []
        while at < len(row):
            out.append(row[at])
            at += row[at] + 1
        rounds.append(out)
    return rounds


def count_rounds(accepted: np.ndarray, n_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """As `play`, for many texts: rounds of every text `[texts]`, and of all how many accepted slot 1, 2, ... `[n_slots]`."""
    n_texts, n_anchors = accepted.shape
    at, rows = np.zeros(n_texts, np.int64), np.arange(n_texts)
    rounds, sums = np.zeros(n_texts, np.int64), np.zeros(n_slots + 1, np.int64)
    while True:
        live = at < n_anchors
        if not live.any():
            return rounds, sums[::-1].cumsum()[::-1][1:]
        n = accepted[rows, np.minimum(at, n_anchors - 1)]
        sums += np.bincount(n[live], minlength=n_slots + 1)
        rounds += live
        at += n + 1


def repetition_rate(ids: Sequence[int], n: int = 8) -> float:
    """Share of tokens that end an n-gram which occurred before in the same text."""
    seen: set[tuple[int, ...]] = set()
    repeats = 0
    for i in range(n, len(ids) + 1):
        gram = tuple(ids[i - n : i])
        repeats += gram in seen
        seen.add(gram)
    return repeats / max(len(ids) - n + 1, 1)
