#!/usr/bin/env python3
"""Time of a tree pass with commit against a linear verify of as many rows, in one process, and memory of the stash.

    tree_cost.py MODEL.gguf [--rows 16] [--repeats 40] [--prompt 64] [--threads 2] [--native BUILD] --out FILE.json

Both sides decode `rows` tokens with all their logits behind the same prompt, from the same restored state. The linear
side is today's verify without snapshots (n_rs_seq = 0), which could not be rolled back. The tree side decodes a random
tree, accepts a path and replays it into the recurrent state. Sides alternate and swap order each repeat; the interval
is a bootstrap over repeats of the paired ratio. Each side has a context of its own, so each reuses its graph.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "native"))

N_BOOTSTRAP = 10000


def random_tree(rng: random.Random, rows: int, n_vocab: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of a random tree in level order."""
    parents, depth = [0], [0]
    for i in range(1, rows):
        parent = rng.choice([j for j in range(i) if depth[i - 1] - 1 <= depth[j] <= depth[i - 1]])
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return tuple(rng.randrange(n_vocab) for _ in range(rows)), tuple(parents)


def bootstrap(ratios: list[float], rng: random.Random) -> tuple[float, float]:
    """95 % interval of the median ratio."""
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(N_BOOTSTRAP))
    return medians[int(0.025 * N_BOOTSTRAP)], medians[int(0.975 * N_BOOTSTRAP)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved passes of both sides, milliseconds."""
    from tree_lib import Batch, Context, Params, Tree, native

    rng = random.Random(1)
    native()
    base = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 1}
    linear = Context(str(args.model), Params(**base, tree=0, n_threads=args.threads))
    tree = Context(str(args.model), Params(**base, tree=args.rows, n_threads=args.threads))
    prompt = [rng.randrange(tree.n_vocab) for _ in range(args.prompt)]
    for ctx in (linear, tree):
        ctx.plain(0, prompt)
    state = tree.state(0)
    assert state == linear.state(0), "both sides start from one state"

    def flush(ctx: Context) -> None:
        ctx.api.llama_state_seq_get_size(ctx.ctx, 0)  # replays what is accepted; copies nothing

    def run(ctx: Context, shape: Tree, *, as_tree: bool) -> float:
        ctx.set_state(0, state)
        batch = Batch()
        idxs = batch.tree(0, shape, args.prompt) if as_tree else batch.plain(0, shape.tokens, args.prompt)
        path = [idxs[i] for i in shape.path(rng.choice(shape.leaves()))]
        made = ctx.make(batch)
        start_s = time.perf_counter()
        status = ctx.run(made)
        if as_tree:
            ctx.accept(0, path)
        flush(ctx)
        ms = (time.perf_counter() - start_s) * 1e3
        ctx.api.llama_batch_ext_free(made)
        assert status == 0
        return ms

    times: dict[str, list[float]] = {"linear": [], "tree": []}
    for repeat in range(args.warmup + args.repeats):
        shape = Tree(*random_tree(rng, args.rows, tree.n_vocab))
        sides = [("linear", linear), ("tree", tree)]
        for name, ctx in sides if repeat % 2 else sides[::-1]:
            ms = run(ctx, shape, as_tree=name == "tree")
            if repeat >= args.warmup:
                times[name].append(round(ms, 4))
    ratios = [t / n for t, n in zip(times["tree"], times["linear"], strict=True)]
    low, high = bootstrap(ratios, rng)
    return {
        "ms": times,
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {"median": statistics.median(ratios), "low_95": low, "high_95": high},
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--native", default="installed", help="name or folder of the build")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from llama_dflash import builds

    build = builds.resolve(args.native)
    os.environ["LLAMA_DFLASH_NATIVE"] = str(build.package)
    keys = ("pin", "series_digest", "backend", "compiler")
    result = {
        "schema": 1,
        "command": "scripts/tree_cost.py " + " ".join([args.model.name, *sys.argv[2:]]),
        "build": {key: build.info[key] for key in keys},
        "device": f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads",
        "model": {"name": args.model.name, "bytes": args.model.stat().st_size},
        "rows": args.rows,
        "prompt": args.prompt,
        **measure(args),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("median_ms", "ratio")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
