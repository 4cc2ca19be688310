#!/usr/bin/env python3
"""Turn simulator, training and llama.cpp results into card.json, and print the bars.

    python -m train_tiny.card --sim sim.json... --facts facts.json --packages packages.json [--llama llama.json...] --out card.json

Needs numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_tiny.figures import Simulation, compare, figure, mean_with_interval, shares

CHAIN_BARS = {(16, "0.0"): 3.8, (16, "0.8"): 1.95, (8, "0.0"): 3.4, (8, "0.8"): 1.85}
TREE_BARS = {"0.0": 1.15, "0.8": 1.20}
PROTOTYPE_REPETITION = 0.587  # greedy, 128 tokens, the prototype pair on the sets accept and tests
BUDGETS = (8, 15, 22, 31, 63)


def name_of(draft: str, scores: str, block: int, budget: int) -> str:
    """What the card calls a policy."""
    what = f"tree {budget}" if budget else "chain"
    return f"{draft} {what}, n_max {block - 1}" + (", unary scores" if (draft, scores) == ("dflash2", "unary") else "")


def policies() -> list[tuple[str, str, int, int]]:
    """What the card quotes: draft, scores, block, budget."""
    out = [("mtp", "unary", 4, 0), ("mtp", "unary", 8, 0)]
    for block in (16, 8):
        for draft, scores in (("dflash", "unary"), ("dflash2", "pairwise"), ("dflash2", "unary")):
            out += [(draft, scores, block, budget) for budget in (0, *BUDGETS)]
    return out


def key_of(draft: str, scores: str, block: int, budget: int) -> tuple[object, ...]:
    """Fields of the simulator's policy: a tree has up to 16 children per node and no spine."""
    return draft, scores, block, budget, 16 if budget else 1, 0


def judged(what: str, bar: float, value: float, low: float, met: bool) -> dict[str, Any]:
    """One bar of the issue."""
    return {"what": what, "bar": bar, "value": value, "lower_bound": low, "met": met}


def bars_of(sim: Simulation, temperature: str) -> list[dict[str, Any]]:
    """The bars at one temperature; they hold for the lower bound, except DFlash2 against DFlash, which is of the figures."""
    out = []
    for block in (16, 8):
        chain = sim.rounds(temperature, *key_of("dflash", "unary", block, 0))
        second = sim.rounds(temperature, *key_of("dflash2", "pairwise", block, 0))
        if chain is None:
            continue
        f, bar = figure(chain, sim.n_emitted), CHAIN_BARS[block, temperature]
        low = f["interval95"][0]
        out.append(judged(f"dflash chain, n_max {block - 1}, T {temperature}", bar, f["tokens_per_round"], low, low >= bar))
        tree = sim.rounds(temperature, *key_of("dflash", "unary", block, 15))
        if tree is not None and block == 16:
            c, bar = compare(tree, chain), TREE_BARS[temperature]
            low = c["interval95"][0]
            out.append(judged(f"dflash tree of 15 / chain, n_max 15, T {temperature}", bar, c["ratio"], low, low >= bar))
        if second is not None:
            c = compare(second, chain)
            what = f"dflash2 chain / dflash chain, n_max {block - 1}, T {temperature}"
            out.append(judged(what, 1.0, c["ratio"], c["interval95"][0], c["ratio"] >= 1.0))
    return out


def repetition_bar(sim: Simulation) -> dict[str, Any]:
    """Greedy text must not loop more than the prototype's."""
    f = mean_with_interval(sim.table("0.0", sim.repetition["0.0"]))
    met = f["mean"] <= PROTOTYPE_REPETITION
    return judged("greedy repetition (at most)", PROTOTYPE_REPETITION, f["mean"], f["interval95"][1], met)


def summary(sim: Simulation, temperature: str) -> dict[str, Any]:
    """Everything about one temperature."""
    figures, per_slot = {}, {}
    for policy in policies():
        rounds = sim.rounds(temperature, *key_of(*policy))
        if rounds is not None:
            figures[name_of(*policy)] = figure(rounds, sim.n_emitted)
            if not policy[3]:
                played = sim.policies[key_of(*policy)]
                per_slot[name_of(*policy)] = shares(played["accepted"][temperature], sum(played["rounds"][temperature]))
    hits = {}
    for name, found in sim.hits.items():
        rows, n_anchors = found[temperature]
        hits[name] = {f"top{k}": shares(row, n_anchors) for k, row in zip((1, 4, 8), rows, strict=True)}
    return {
        "texts": sim.table(temperature, sim.repetition[temperature]).shape,
        "tokens_per_round": figures,
        "accepted_per_slot": per_slot,
        "hit_rates": hits,
        "repetition_rate": mean_with_interval(sim.table(temperature, sim.repetition[temperature])),
        "bars": bars_of(sim, temperature) + ([repetition_bar(sim)] if temperature == "0.0" else []),
    }


def cell(figures: dict[str, Any]) -> str:
    """A figure with its interval."""
    return f"{figures['tokens_per_round']:.2f} ({figures['interval95'][0]:.2f}-{figures['interval95'][1]:.2f})"


def markdown(card: dict[str, Any]) -> str:
    """The figures as tables for the model card."""
    simulated: dict[str, Any] = card["simulated"]
    heads = [f"T {float(t):g}, {s['texts'][0]} prompts x {s['texts'][1]} texts" for t, s in simulated.items()]
    lines = ["| tokens per round | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name in next(iter(simulated.values()))["tokens_per_round"]:
        cells = [cell(s["tokens_per_round"][name]) if name in s["tokens_per_round"] else "-" for s in simulated.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| share of rounds that accepted slot 1, 2, ... | |", "|---|---|"]
    for t, s in simulated.items():
        for name, row in s["accepted_per_slot"].items():
            lines.append(f"| {name}, T {float(t):g} | " + " ".join(f"{v:.2f}" for v in row) + " |")
    lines += ["", "| hit rate, top-1 / top-4 / top-8 | slots 1, 2, 4, 8 (7 for blocks of 8) |", "|---|---|"]
    for t, s in simulated.items():
        for name, rows in s["hit_rates"].items():
            slots = [0, 1, 3, min(7, len(rows["top1"]) - 1)]
            cells = [" / ".join(f"{rows[k][i]:.2f}" for k in ("top1", "top4", "top8")) for i in slots]
            lines.append(f"| {name}, T {float(t):g} | " + ", ".join(cells) + " |")
    rates = [f"T {float(t):g} {s['repetition_rate']['mean']:.3f}" for t, s in simulated.items()]
    return "\n".join([*lines, "", "Repetition rate of the texts: " + ", ".join(rates) + "."]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the card's numbers."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sim", type=Path, nargs="+", required=True)
    p.add_argument("--facts", type=Path, required=True)
    p.add_argument("--packages", type=Path, required=True)
    p.add_argument("--llama", type=Path, nargs="*", default=[], help="results of measure.py")
    p.add_argument("--markdown", type=Path, help="write the figures as tables too")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    sim = Simulation(args.sim)
    card = {
        "licence": "MIT",
        "options": sim.options,
        "training": json.loads(args.facts.read_text()),
        "simulated": {t: summary(sim, t) for t in sim.temperatures},
        "measured_with_llama_cpp": [json.loads(path.read_text()) for path in args.llama],
        "data": json.loads(args.packages.read_text()),
    }
    args.out.write_text(json.dumps(card, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(card))
    for t in card["simulated"].values():
        for bar in t["bars"]:
            print(
                f"{'met ' if bar['met'] else 'MISS'} {bar['what']}: {bar['value']} (bound {bar['lower_bound']}), bar {bar['bar']}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
