#!/usr/bin/env python3
"""Measure chains with llama-server: tokens per round of DFlash, DFlash2, MTP and n-gram drafts on one target.

    python -m train_tiny.measure --models DIR --prompts FILE... --policies dflash:15,dflash2:15,mtp:3,ngram:15 --out llama.json

Runs with the package's environment, without torch. Output rows are those of simulate.py, so card.py reads both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_dflash import builds
from llama_dflash.client import Completion, Sampling
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig
from train_tiny.trees import repetition_rate

SLOT = ("-np", "1", "-c", "2048")


def server_flags(models: Path, policy: str) -> list[str]:
    """Drafting flags of one policy, `kind:n_max`, or `ar`."""
    kind, _, n_max = policy.partition(":")
    common = ["--spec-draft-n-max", n_max]
    if kind in ("dflash", "dflash2"):
        file = models / ("tiny-draft.gguf" if kind == "dflash" else "tiny-draft2.gguf")
        return ["-md", str(file), "--spec-type", "draft-dflash", *common]
    if kind == "mtp":
        return ["--spec-type", "draft-mtp", *common]
    if kind == "ngram":
        return ["--spec-type", "ngram-simple", *common]
    if kind == "ar":
        return []
    raise SystemExit(f"measure: policy {policy!r}, expected ar or dflash, dflash2, mtp, ngram with :n_max")


def rounds_of(done: Completion) -> int:
    """Target passes after the prompt: the patched server counts them, else emitted minus accepted."""
    accepted = int(done.timings.get("draft_n_accepted") or 0)
    return int(done.timings.get("rounds", len(done.tokens) - 1 - accepted))


def measure(server: Server, prompts: Sequence[str], temperature: float, n_seeds: int, n_tokens: int) -> dict[str, Any]:
    """All prompts and seed sets at one temperature."""
    rows, repeats, per_slot, n_rounds = [], [], [0] * 16, 0
    for seed in range(n_seeds):
        for i, prompt in enumerate(prompts):
            done = server.client.complete(prompt, n_tokens, Sampling(temperature, 1000 * seed), i, ignore_eos=True)
            rows.append({"prompt": i, "seed": seed, "rounds": rounds_of(done), "emitted": len(done.tokens) - 1})
            repeats.append(repetition_rate(done.tokens))
            n_rounds += int(done.timings.get("draft_n_rounds", 0))
            for k, n in enumerate(done.timings.get("draft_n_accepted_per_pos", [])[:16]):
                per_slot[k] += int(n)
    slots = [round(n / n_rounds, 4) for n in per_slot] if n_rounds else []
    return {"texts": rows, "accepted_per_slot": slots, "repetition_rate": round(sum(repeats) / len(repeats), 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the policies one after the other."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True)
    p.add_argument("--target", default="tiny-target.gguf")
    p.add_argument("--prompts", type=Path, nargs="+", required=True)
    p.add_argument("--policies", default="dflash:15,dflash:7")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--seeds", type=int, default=10)
    p.add_argument("--n-prompts", type=int, help="of every file")
    p.add_argument("--n-tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--native", default="installed")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    build = builds.resolve(args.native)
    prompts = [e["text"] for path in args.prompts for e in json.loads(path.read_text())["prompts"][: args.n_prompts]]
    out: dict[str, Any] = {"build": build.summary, "n_tokens": args.n_tokens, "n_prompts": len(prompts), "temperatures": {}}
    for policy in args.policies.split(","):
        flags = (*SLOT, "-t", str(args.threads), *server_flags(args.models, policy))
        with Server(build, RunConfig(args.models / args.target), extra=flags) as server:
            for temperature in args.temperatures:
                n_seeds = args.seeds if temperature else 1
                result = measure(server, prompts, temperature, n_seeds, args.n_tokens)
                out["temperatures"].setdefault(str(temperature), {})[policy] = result
                emitted, rounds = (sum(r[k] for r in result["texts"]) for k in ("emitted", "rounds"))
                print(
                    f"{policy} T {temperature}: {emitted / rounds:.3f} tokens per round, repeats {result['repetition_rate']}",
                    flush=True,
                )
    args.out.write_text(json.dumps(out) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
