#!/usr/bin/env python3
"""Record the shapes of the tiny pair's draft trees for --spec-synth-tree: trees of random weights are flat.

    record_shapes.py [--prompts N] [--native BUILD] > bench/shapes/tiny-pair.txt

Greedy rounds of the held-out prompts, evenly picked, as many per budget. Deterministic on one build.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from llama_dflash import builds  # noqa: E402
from llama_dflash.bench import cases  # noqa: E402
from llama_dflash.client import Sampling  # noqa: E402
from llama_dflash.server import Server  # noqa: E402
from llama_dflash.spec import RunConfig  # noqa: E402

BUDGETS = (4, 8, 15, 22, 31, 63)
SHAPES_PER_BUDGET = 64
N_PREDICT = 128
DEBUG_LEVEL = "5"


def shapes(build: builds.Build, budget: int, n_prompts: int) -> list[str]:
    """Parent lists of all whole trees, in order."""
    models = ROOT / "llama_dflash" / "models"
    config = RunConfig(models / "tiny-target.gguf", models / "tiny-draft.gguf", budget=budget).checked()
    lines: list[str] = []
    with Server(build, config, extra=("-np", "1", "-t", "1", "-c", "2048", "-lv", DEBUG_LEVEL), on_line=lines.append) as server:
        for i, case in enumerate(cases.load("accept", n_prompts)):
            server.client.complete(case.text, N_PREDICT, Sampling(), i, ignore_eos=True)
    found = [m[1] for line in lines if (m := re.search(r"tree shape:((?: \d+)+)", line))]
    return [s.strip() for s in found if len(s.split()) == budget]


def main() -> None:
    """Print the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--native", default="installed")
    args = parser.parse_args()
    build = builds.resolve(args.native)
    print(
        f"# Draft trees of the embedded pair, greedy, {args.prompts} prompts x {N_PREDICT} tokens, by scripts/record_shapes.py."
    )
    print("# A line holds the parents of nodes 1, 2, .. in level order.")
    for budget in BUDGETS:
        found = shapes(build, budget, args.prompts)
        step = max(1, len(found) // SHAPES_PER_BUDGET)
        picked = found[::step][:SHAPES_PER_BUDGET]
        print(f"# {budget} nodes: {len(picked)} of {len(found)} rounds")
        print("\n".join(picked))


if __name__ == "__main__":
    main()
