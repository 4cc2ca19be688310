#!/usr/bin/env python3
"""Sum up the simulator's tree sweep: one row per policy and temperature, and a plot.

    python -m train_tiny.sweep --sim sim.json... --out DIR

Writes sweep.json and, when matplotlib is there, sweep.svg. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_tiny.figures import FIELDS, Simulation, compare, figure

SERIES = (("dflash", "unary", "DFlash"), ("dflash2", "unary", "DFlash2, unary"), ("dflash2", "pairwise", "DFlash2, pairwise"))


def rows_of(sim: Simulation) -> list[dict[str, Any]]:
    """All policies; a tree also against the chain of the same draft, scores and block."""
    out = []
    for key, policy in sim.policies.items():
        for t in policy["rounds"]:
            rounds = sim.rounds(t, *key)
            assert rounds is not None
            row = dict(zip(FIELDS, key, strict=True)) | {"temperature": float(t)} | figure(rounds, sim.n_emitted)
            chain = sim.rounds(t, *key[:3], 0, 1, 0)
            if row["budget"] and chain is not None:
                row["over_chain"] = compare(rounds, chain)
            out.append(row)
    return out


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per round over the budget, a panel per temperature and draft, a line per spine (top_k 16) and top_k (no spine)."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    temperatures = sorted({r["temperature"] for r in rows})
    figure_, axes = plt.subplots(
        len(temperatures), len(SERIES), figsize=(12, 3.4 * len(temperatures)), squeeze=False, sharex=True
    )
    for line, t in zip(axes, temperatures, strict=True):
        for ax, (draft, scores, title) in zip(line, SERIES, strict=True):
            mine = [r for r in rows if (r["draft"], r["scores"], r["temperature"], r["block"]) == (draft, scores, t, 16)]
            lines = [(16, s, "-", f"spine {s}" if s else "no spine") for s in (0, 4, 8, 15)]
            lines += [(k, 0, ":", f"no spine, top-k {k}") for k in (2, 4)]
            for top_k, spine, style, label in lines:
                points = sorted(
                    (r["budget"], r["tokens_per_round"])
                    for r in mine
                    if (r["top_k"], r["spine"]) == (top_k, spine) and r["budget"]
                )
                ax.plot(*zip(*points, strict=True), style, marker=".", label=label) if points else None
            for r in mine:
                if not r["budget"]:
                    ax.axhline(r["tokens_per_round"], color="black", linewidth=0.8, label="chain of 15")
            ax.set_xscale("log", base=2)
            ax.set_title(f"{title}, T {t:g}", fontsize=10)
        line[0].set_ylabel("tokens per round")
    for ax in axes[-1]:
        ax.set_xlabel("nodes")
    axes[0][0].legend(fontsize=7)
    figure_.tight_layout()
    figure_.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows and the plot."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sim", type=Path, nargs="+", required=True)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    sim = Simulation(args.sim)
    rows = rows_of(sim)
    args.out.mkdir(parents=True, exist_ok=True)
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    (args.out / "sweep.json").write_text(f'{{\n "options": {json.dumps(sim.options)},\n "rows": [\n{body}\n ]\n}}\n')
    print(f"{len(rows)} rows")
    try:
        plot(rows, args.out / "sweep.svg")
    except ImportError:
        print("no matplotlib here, so no plot")
    return 0


if __name__ == "__main__":
    sys.exit(main())
