"""Tokens per round with bootstrap intervals, from the rounds that simulate.py and measure.py count; numpy only.

Intervals: 2000 resamples of the prompts, and within a prompt of its seed sets; the ratio of sums is the figure, as in
docs/testing.md: (tokens - 1) / rounds. Resamples are the same for every policy, so that comparisons are paired.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_RESAMPLES = 2000
SEED = 5
FIELDS = ("draft", "scores", "block", "budget", "top_k", "spine")


class Simulation:
    """One or more results of simulate.py on the same prompts; unfinished ones count as far as all of them got."""

    def __init__(self, paths: Sequence[Path]) -> None:
        parts: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
        self.options: dict[str, Any] = parts[0]["options"]
        self.repetition: dict[str, list[float]] = {}
        self.hits: dict[str, dict[str, Any]] = {}
        self.policies: dict[tuple[object, ...], dict[str, Any]] = {}
        for p in parts:
            self._add(p, paths)

    def _add(self, part: dict[str, Any], paths: Sequence[Path]) -> None:
        same = part["options"] == self.options
        for t, row in part["repetition"].items():
            known = self.repetition.get(t, row)
            n = min(len(known), len(row))
            same = same and known[:n] == row[:n]
            self.repetition[t] = known[:n]
        if not same:
            raise SystemExit(f"figures: {', '.join(map(str, paths))} are not of the same texts")
        for name, found in part["hits"].items():
            self.hits.setdefault(name, {}).update({t: (rows, part["n_anchors"][t]) for t, rows in found.items()})
        for row in part["policies"]:
            policy = self.policies.setdefault(tuple(row[f] for f in FIELDS), {"rounds": {}, "accepted": {}})
            for counted in ("rounds", "accepted"):
                policy[counted].update(row[counted])

    @property
    def temperatures(self) -> list[str]:
        """As they are named in the files."""
        return list(self.repetition)

    def table(self, temperature: str, values: Sequence[float]) -> np.ndarray:
        """Values of texts as `[prompts, seeds]`."""
        n_seeds = self.options["seeds"] if float(temperature) else 1
        return np.array(values[: len(self.repetition[temperature])], np.float64).reshape(-1, n_seeds)

    def rounds(self, temperature: str, *key: object) -> np.ndarray | None:
        """Rounds of every text under one policy, `[prompts, seeds]`; None if it was not played."""
        found = self.policies.get(tuple(key))
        return (
            None if found is None or temperature not in found["rounds"] else self.table(temperature, found["rounds"][temperature])
        )

    @property
    def n_emitted(self) -> int:
        """Tokens that a text's rounds emit."""
        return int(self.options["n_tokens"]) - 1


def resample(values: np.ndarray) -> np.ndarray:
    """Sums of `[prompts, seeds]` over every resample, `[N_RESAMPLES]`."""
    rng = np.random.default_rng(SEED)
    n_prompts, n_seeds = values.shape
    prompts = rng.integers(0, n_prompts, (N_RESAMPLES, n_prompts))
    seeds = rng.integers(0, n_seeds, (N_RESAMPLES, n_prompts, n_seeds))
    out: np.ndarray = values[prompts[..., None], seeds].sum((1, 2))
    return out


def interval(samples: np.ndarray) -> list[float]:
    """Central 95 %."""
    return [round(float(v), 4) for v in np.percentile(samples, [2.5, 97.5])]


def figure(rounds: np.ndarray, n_emitted: int) -> dict[str, Any]:
    """Tokens per round with its interval."""
    total = rounds.size * n_emitted
    return {"tokens_per_round": round(total / rounds.sum(), 4), "interval95": interval(total / resample(rounds)),
            "rounds": int(rounds.sum()), "tokens": total}  # fmt: skip


def compare(rounds: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """Tokens per round over those of `base` on the same texts."""
    return {"ratio": round(float(base.sum() / rounds.sum()), 4), "interval95": interval(resample(base) / resample(rounds))}


def mean_with_interval(table: np.ndarray) -> dict[str, Any]:
    """A mean over `[prompts, seeds]`."""
    return {"mean": round(float(table.mean()), 4), "interval95": interval(resample(table) / table.size)}


def shares(counts: Iterable[int], n: int) -> list[float]:
    """Counts over n."""
    return [round(c / n, 4) for c in counts]
