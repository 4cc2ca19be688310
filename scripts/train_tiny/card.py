#!/usr/bin/env python3
"""Turn simulator, training and llama.cpp figures into card.json: tokens per round with bootstrap intervals, bars, data list.

    python -m train_tiny.card --sim sim.json --facts facts.json --packages packages.json [--llama llama.json] --out card.json

Intervals: 2000 resamples of prompts, and within a prompt of its seed sets; the ratio of sums is the figure, as in
docs/testing.md: (tokens - 1) / rounds. Tree against chain is paired.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_RESAMPLES = 2000
SEED = 5
BARS = (
    ("dflash chain 15", {"0.0": 3.8, "0.8": 1.95}),
    ("dflash chain 7", {"0.0": 3.4, "0.8": 1.85}),
)
TREE_BARS = {"0.0": 1.15, "0.8": 1.20}
Texts = Sequence[dict[str, int]]


def table(texts: Texts) -> np.ndarray:
    """Emitted tokens and rounds, `[prompts, seeds, 2]`."""
    by_prompt: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for t in texts:
        by_prompt[t["prompt"]].append((t["emitted"], t["rounds"]))
    return np.array([by_prompt[p] for p in sorted(by_prompt)], dtype=np.float64)


def resamples(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Indices of prompts `[N, P]` and of seeds `[N, P, S]`; the same for every policy, so that comparisons are paired."""
    rng = np.random.default_rng(SEED)
    n_prompts, n_seeds = shape[:2]
    return rng.integers(0, n_prompts, (N_RESAMPLES, n_prompts)), rng.integers(0, n_seeds, (N_RESAMPLES, n_prompts, n_seeds))


def ratios(values: np.ndarray) -> np.ndarray:
    """Tokens per round of every resample, `[N]`."""
    prompts, seeds = resamples(values.shape)
    sums = values[prompts[..., None], seeds].sum((1, 2))
    out: np.ndarray = sums[:, 0] / sums[:, 1]
    return out


def interval(samples: np.ndarray) -> list[float]:
    """Central 95 %."""
    return [round(float(v), 4) for v in np.percentile(samples, [2.5, 97.5])]


def figure(texts: Texts) -> dict[str, Any]:
    """Tokens per round with its interval; integers beside it."""
    values = table(texts)
    emitted, rounds = values.sum((0, 1))
    return {"tokens_per_round": round(emitted / rounds, 4), "interval95": interval(ratios(values)),
            "tokens": int(emitted), "rounds": int(rounds), "prompts": len(values), "seed_sets": values.shape[1]}  # fmt: skip


def compare(texts: Texts, base: Texts) -> dict[str, Any]:
    """Ratio of two policies on the same texts."""
    a, b = table(texts), table(base)
    ratio = (a.sum((0, 1))[0] / a.sum((0, 1))[1]) / (b.sum((0, 1))[0] / b.sum((0, 1))[1])
    return {"ratio": round(float(ratio), 4), "interval95": interval(ratios(a) / ratios(b))}


def judged(name: str, bar: float, value: float, low: float) -> dict[str, Any]:
    """One bar of the issue: it holds for the lower bound."""
    return {"what": name, "bar": bar, "value": value, "lower_bound": low, "met": low >= bar}


def bars_of(temperature: str, texts: dict[str, Texts]) -> list[dict[str, Any]]:
    """The issue's bars at one temperature, as far as the policies were simulated."""
    out = []
    for policy, bars in BARS:
        if policy in texts and temperature in bars:
            f = figure(texts[policy])
            out.append(judged(f"{policy}, T {temperature}", bars[temperature], f["tokens_per_round"], f["interval95"][0]))
    tree, chain = "dflash block 16 tree 15", "dflash chain 15"
    if tree in texts and chain in texts and temperature in TREE_BARS:
        c = compare(texts[tree], texts[chain])
        out.append(judged(f"{tree} / {chain}, T {temperature}", TREE_BARS[temperature], c["ratio"], c["interval95"][0]))
    for n in (15, 7):
        first, second = f"dflash chain {n}", f"dflash2 chain {n}"
        if first in texts and second in texts:
            c = compare(texts[second], texts[first])
            out.append({"what": f"{second} / {first}, T {temperature}", "bar": 1.0, "value": c["ratio"],
                        "lower_bound": c["interval95"][0], "met": c["ratio"] >= 1.0})  # fmt: skip
    return out


def summary(result: dict[str, Any], temperature: str) -> dict[str, Any]:
    """Everything about one temperature."""
    texts = result["texts"]
    per_slot = {p: [round(v / result["n_rounds"][p], 4) for v in row] for p, row in result["accepted"].items() if "chain" in p}
    hits = {
        name: {f"top{k}": [round(v / result["n_anchors"][name], 4) for v in row] for k, row in zip((1, 4, 8), rows, strict=True)}
        for name, rows in result["hits"].items()
    }
    return {
        "tokens_per_round": {policy: figure(rows) for policy, rows in texts.items()},
        "accepted_per_slot": per_slot,
        "hit_rates": hits,
        "repetition_rate": round(sum(result["repeats"]) / len(result["repeats"]), 4),
        "bars": bars_of(temperature, texts),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the card's numbers."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sim", type=Path, required=True)
    p.add_argument("--facts", type=Path, required=True)
    p.add_argument("--packages", type=Path, required=True)
    p.add_argument("--llama", type=Path, nargs="*", default=[], help="results of measure.py")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    sim = json.loads(args.sim.read_text())
    card = {
        "licence": "MIT",
        "options": sim["options"],
        "training": json.loads(args.facts.read_text()),
        "simulated": {t: summary(r, t) for t, r in sim["temperatures"].items()},
        "measured_with_llama_cpp": [json.loads(path.read_text()) for path in args.llama],
        "data": json.loads(args.packages.read_text()),
    }
    args.out.write_text(json.dumps(card, indent=1) + "\n")
    for t in card["simulated"].values():
        for bar in t["bars"]:
            print(f"{'met ' if bar['met'] else 'MISS'} {bar['what']}: {bar['value']} (lower {bar['lower_bound']}), bar {bar['bar']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
