#!/usr/bin/env python3
"""Tokens per round of chains and trees in llama-server, paired by prompt and seed, with bootstrap intervals.

    tree_gain.py [--prompt-set SET] [--prompts N] [--seeds N] [--native BUILD] --out FILE

Modes: chain n_max 15 and tree of 15 nodes, for the embedded DFlash and DFlash2 drafts; T 0 once, T 0.8 (temperature only) for
every seed. A ratio is tree over chain on the same prompts and seeds; intervals resample prompts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from llama_dflash import builds, gguf  # noqa: E402
from llama_dflash.bench import cases, report  # noqa: E402
from llama_dflash.bench.run import Job, run_pass  # noqa: E402
from llama_dflash.client import Sampling  # noqa: E402
from llama_dflash.spec import RunConfig  # noqa: E402

N_PREDICT = 128
SEED_STEP = 1000  # prompt i is sampled with seed + i
N_BOOTSTRAP = 10000
MODELS = ROOT / "llama_dflash" / "models"


def configs() -> dict[str, RunConfig]:
    """The modes by name."""
    target = MODELS / "tiny-target.gguf"
    drafts = {"dflash": MODELS / "tiny-draft.gguf", "dflash2": MODELS / "tiny-draft2.gguf"}
    out = {}
    for name, draft in drafts.items():
        out[f"{name} chain 15"] = RunConfig(target, draft).checked()
        out[f"{name} tree 15"] = RunConfig(target, draft, budget=15).checked()
    return out


def rounds(build: builds.Build, config: RunConfig, job: Job) -> list[int]:
    """Rounds of every prompt."""
    return [int(c.timings["rounds"]) for c in run_pass(build, config, job).completions]


def interval(values: np.ndarray) -> list[float]:
    """95 % percentile interval of resampled values."""
    return [round(float(v), 4) for v in np.percentile(values, [2.5, 97.5])]


def figures(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tokens per round and ratios from rounds `[n_seeds, n_prompts]` of each mode."""
    rng = np.random.default_rng(0)
    n_seeds, n_prompts = next(iter(table.values())).shape
    picks = rng.integers(n_prompts, size=(N_BOOTSTRAP, n_prompts))
    n_tokens = (N_PREDICT - 1) * n_seeds * n_prompts
    out: dict[str, Any] = {}
    for name, r in table.items():
        per_prompt = r.sum(axis=0)
        out[name] = {
            "tokens_per_round": round(n_tokens / int(r.sum()), 4),
            "interval_95": interval(n_tokens / per_prompt[picks].sum(axis=1)),
            "rounds": int(r.sum()),
            "rounds_by_seed": [int(v) for v in r.sum(axis=1)],
        }
    for draft in ("dflash", "dflash2"):
        chain, tree = (table[f"{draft} {mode} 15"].sum(axis=0) for mode in ("chain", "tree"))
        out[f"{draft} tree 15 / chain 15"] = {
            "ratio": round(float(chain.sum() / tree.sum()), 4),
            "interval_95": interval(chain[picks].sum(axis=1) / tree[picks].sum(axis=1)),
        }
    return out


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-set", default="accept")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--native", default="installed")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    build = builds.resolve(args.native)
    prompts = cases.load(args.prompt_set, args.prompts)
    flags = ("-t", args.threads)
    result: dict[str, Any] = {
        "schema": 1,
        "command": f"scripts/tree_gain.py --prompt-set {args.prompt_set} --prompts {args.prompts} --seeds {args.seeds}",
        "build": build.summary,
        "models": {p.name: gguf.read(p).summary for p in sorted(MODELS.glob("*.gguf"))},
        "prompts": [c.name for c in prompts],
        "n_predict": N_PREDICT,
    }
    for temperature, seeds in ((0.0, [0]), (0.8, [SEED_STEP * i for i in range(1, args.seeds + 1)])):
        table: dict[str, list[list[int]]] = {name: [] for name in configs()}
        for seed in seeds:
            for name, config in configs().items():
                table[name].append(rounds(build, config, Job(prompts, N_PREDICT, Sampling(temperature, seed), server_flags=flags)))
        result[f"T {temperature:g}"] = figures({name: np.array(r) for name, r in table.items()})
        report.write_json(args.out, result)
        print(result[f"T {temperature:g}"], file=sys.stderr)


if __name__ == "__main__":
    main()
