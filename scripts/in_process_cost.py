#!/usr/bin/env python3
"""Speed of the Python `Llama` with draft trees beside llama-speculative-simple, on the same prompts, in one run.

    in_process_cost.py [--native exact] [--budget 15] [--prompts 20] [--n-predict 128] [--repeats 5] [--threads 1] --out FILE.json

Both sides decode greedily with the embedded pair, from a build that has the program (the exact preset). The time is that
of generation: behind the prompt in the program, behind the first token in Python, where it holds all of
`create_completion` (detokenizing, looking for stop strings). Sides alternate and swap order each repeat; the ratio is
that of tokens a second over the whole set, paired per repeat.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
ROUNDS = re.compile(r"n_rounds += (\d+)")


def by_program(program: Path, args: argparse.Namespace, models: Path, prompt: str) -> dict[str, Any]:
    """Tokens, seconds and rounds of llama-speculative-simple for a prompt."""
    command = [str(program), "-m", str(models / "tiny-target.gguf"), "-md", str(models / "tiny-draft.gguf"), "-p", prompt, "--no-escape"]
    command += ["--spec-type", "draft-dflash", "--spec-draft-tree", str(args.budget), "-n", str(args.n_predict)]
    command += ["--temp", "0", "-c", "2048", "-fa", "on", "--ignore-eos", "-t", str(args.threads), "-tb", str(args.threads), "-lv", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    log = done.stdout + done.stderr
    decoded, rounds = DECODED.search(log), ROUNDS.search(log)
    if not decoded or not rounds:
        raise RuntimeError(f"no figures in the log of {program.name}: {log[-2000:]}")
    return {"tokens": int(decoded[1]), "s": float(decoded[2]), "rounds": int(rounds[1])}


def python_side(args: argparse.Namespace, models: Path) -> Any:
    """A function that completes a prompt with the Python `Llama`: tokens, seconds and rounds."""
    from llama_dflash import Llama, SpecConfig

    class Timed(Llama):
        first_s = 0.0

        def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
            self.first_s = 0.0
            for token in super().generate(*args, **kwargs):
                self.first_s = self.first_s or time.perf_counter()
                yield token

    llm = Timed(
        models / "tiny-target.gguf",
        draft_model_path=models / "tiny-draft.gguf",
        spec=SpecConfig(tree=args.budget),
        n_ctx=2048,
        n_batch=2048,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        flash_attn=True,
        verbose=False,
    )
    no_end = {llm.token_eos(): float("-inf")}

    def complete(text: str) -> dict[str, Any]:
        llm.reset()
        llm.reset_spec_stats()
        llm.create_completion(text, max_tokens=args.n_predict, temperature=0, logit_bias=no_end)
        end_s = time.perf_counter()
        stats = llm.spec_stats
        return {"tokens": stats.n_tokens - 1, "s": end_s - llm.first_s, "rounds": stats.n_rounds}

    return complete


def measure(args: argparse.Namespace, program: Path) -> dict[str, Any]:
    """All repeats of both sides."""
    from llama_dflash import _paths
    from llama_dflash.bench import cases

    models = _paths.find("models/tiny-target.gguf").parent
    texts = [case.text for case in cases.load("heldout", args.prompts)]
    complete = python_side(args, models)
    repeats: dict[str, list[dict[str, Any]]] = {"python": [], "program": []}
    for repeat in range(-1, args.repeats):  # the first one warms up
        for side in ("python", "program")[:: 1 if repeat % 2 else -1]:
            run = complete if side == "python" else functools.partial(by_program, program, args, models)
            runs = [run(text) for text in texts]
            total: dict[str, Any] = {key: sum(r[key] for r in runs) for key in ("tokens", "s", "rounds")}
            total["tok_s"] = total["tokens"] / total["s"]
            print(f"repeat {repeat}: {side}: {total['tok_s']:.1f} tok/s, {total['rounds']} rounds", file=sys.stderr)
            if repeat >= 0:
                repeats[side].append(total)
    speeds = {side: [run["tok_s"] for run in runs] for side, runs in repeats.items()}
    ratios = [p / n for p, n in zip(speeds["python"], speeds["program"], strict=True)]
    return {
        "repeats": repeats,
        "tok_s": {side: {"median": statistics.median(s), "min": min(s), "max": max(s)} for side, s in speeds.items()},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--native", default="exact", help="name or folder of the build")
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from llama_dflash import builds

    build = builds.resolve(args.native)
    os.environ["LLAMA_DFLASH_NATIVE"] = str(build.package)
    program = build.package.parent / "tests" / "llama-speculative-simple"
    if not program.is_file():
        print(f"{program} is missing, expected a build of the exact preset; pass --native exact", file=sys.stderr)
        return 1
    result = {
        "schema": 1,
        "command": f"scripts/in_process_cost.py --native {build.info['preset']} --budget {args.budget} --prompts {args.prompts}"
        f" --n-predict {args.n_predict} --repeats {args.repeats} --threads {args.threads}",
        "build": {key: build.info[key] for key in ("pin", "series_digest", "backend", "compiler")},
        "device": f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads",
        "budget": args.budget,
        "prompts": args.prompts,
        "n_predict": args.n_predict,
        **measure(args, program),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("tok_s", "ratio")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
