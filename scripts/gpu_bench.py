#!/usr/bin/env python3
"""Base llama.cpp beside ours at real size on one GPU: passes, rounds, memory, tokens a second, in one JSON file.

    gpu_bench.py --build [--unpack] --work FOLDER [--side base,ours]            compile both sides, without and with the patches
    gpu_bench.py --synth --target T.gguf --draft D.gguf [--work FOLDER]         write the pair with random weights
    gpu_bench.py --work FOLDER --target T.gguf --draft D.gguf [--part modes,passes,depths,synth,tiny] [--out FILE.json]
    gpu_bench.py --split FILE [--out FILE.json]                                 add where a round's time goes, measured elsewhere
    gpu_bench.py --check FILE.json                                              recompute every median and spread

Instead of --work, --base and --ours name folders that hold llama-server and llama-bench with their libraries. Target and
draft may have random weights: what a pass costs does not depend on the values, and acceptance is set by lot, along the
tree shapes that were recorded on the tiny pair. The tiny pair itself gives real acceptance. The file is saved after every
step; another run on the same device and series adds to it, so that parts can be measured in calls of their own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu import build, figures, measure  # noqa: E402
from gpu.modes import BUDGETS, DEPTHS, PREFILL, ROWS, Plan, Side, modes  # noqa: E402
from gpu.record import Record  # noqa: E402

import vendor  # noqa: E402
from llama_dflash.errors import DFlashError  # noqa: E402

PARTS = ("modes", "passes", "depths", "synth", "tiny")
SPLIT = ("draft", "verify", "walk", "commit", "inject", "host_gaps")


def device(name: str | None) -> dict[str, str]:
    """The GPU and its driver, as nvidia-smi tells them, or just a name that was given."""
    if name:
        return {"device": name}
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    name, driver, memory = (part.strip() for part in done.stdout.splitlines()[0].split(","))
    return {"device": name, "driver": driver, "memory": memory}


def default_out(name: str, date: str) -> Path:
    """Path of a device's result of a day."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "bench" / "results" / f"{slug}-{date}.json"


def split_of(data: dict[str, Any]) -> dict[str, Any]:
    """Figures of `{"draft": [ms of each round, ..], ..}`; other lists of numbers become figures too, the rest is kept as it is.

    Raises:
        DFlashError: a piece is missing or is no list of numbers.
    """
    for key in [*SPLIT, *(key for key, value in data.items() if isinstance(value, list) and key not in SPLIT)]:
        values = data.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(v, (int, float)) for v in values):
            raise DFlashError(
                f"--split: {key} is {str(values)[:40]}, expected a list of milliseconds, one a round", "see docs/benchmarks.md"
            )
    return {key: figures.figure(value, 4) if isinstance(value, list) else value for key, value in data.items()}


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    p.add_argument("--check", type=Path, help="recompute the figures of a result")
    p.add_argument("--build", action="store_true", help="compile the sides below --work; a run that was stopped goes on")
    p.add_argument("--unpack", action="store_true", help="only make the sources of --build")
    p.add_argument("--side", type=words, default=["base", "ours"], help="sides to build")
    p.add_argument("--cmake", action="append", default=[], metavar="NAME=VALUE", help="a further option of the builds")
    p.add_argument("--synth", action="store_true", help="write --target and --draft with random weights, if there are none")
    p.add_argument("--layers", type=int, help="layers of a target that --synth writes; default: all")
    p.add_argument("--split", type=Path, help="JSON of another tool: milliseconds of each piece of each round")
    for name in ("--work", "--base", "--ours", "--target", "--draft"):
        p.add_argument(name, type=Path)
    p.add_argument("--out", "--into", type=Path, help="default: bench/results/DEVICE-DATE.json")
    p.add_argument("--part", type=words, default=None, help=f"default: {','.join(PARTS)}")
    p.add_argument(
        "--mode", type=words, help="of parts modes, depths and synth, such as ar,chain15,tree15; default: all, depths those three"
    )
    p.add_argument("--budget", type=numbers, default=list(BUDGETS), help="nodes of the trees")
    p.add_argument("--rows", type=numbers, default=list(ROWS))
    p.add_argument("--prefill", type=numbers, default=list(PREFILL))
    p.add_argument("--depth", type=numbers, default=list(DEPTHS))
    p.add_argument("--ctx", type=int, default=8192)
    p.add_argument("--n-predict", type=int, default=64)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--prompts", type=int, default=10, help="of part tiny")
    p.add_argument("--weights", choices=("random", "trained"), default="random", help="what --target and --draft hold")
    p.add_argument("--flag", action="append", default=[], help="a further flag of every llama-server")
    p.add_argument("--bench-flag", action="append", default=[], help="a further flag of llama-bench")
    p.add_argument("--device", help="what the machine is, if nvidia-smi cannot tell")
    return p


def run(args: argparse.Namespace, record: Record, plan: Plan, sides: Sequence[Side]) -> None:
    """The parts that were asked for."""
    known = modes(args.budget)
    unknown = set(args.mode or ()) - {m.name for m in known}
    if unknown:
        raise DFlashError(
            f"--mode {', '.join(unknown)}, expected some of {', '.join(m.name for m in known)}", "see also --budget"
        )
    todo = [m for m in known if not args.mode or m.name in args.mode]
    for part in args.part:
        if part == "modes":
            measure.rounds_of_modes(sides, plan, record, todo)
        elif part == "passes":
            measure.passes(sides, plan, record, args.rows, args.prefill)
        elif part == "depths":
            few = [m for m in todo if args.mode or m.name in ("ar", "chain15", "tree15")]
            measure.at_depths(sides, plan, record, few, args.depth)
        elif part == "synth":
            measure.synthetic(sides, plan, record, todo)
        elif part == "tiny":
            measure.tiny(sides, plan, record, args.prompts)


def open_record(args: argparse.Namespace) -> Record:
    """The result file, with what it says about itself."""
    where = device(args.device)
    date = datetime.date.today().isoformat()
    head = {
        "schema": 1,
        **where,
        "date": date,
        "series_digest": vendor.digest(vendor.read_series()),
        "pin": vendor.read_pin().commit,
    }
    return Record(args.out or default_out(where["device"], date), head)


def benchmark(args: argparse.Namespace) -> int:
    """Measure and save; 1 when a step failed."""
    if args.work is not None:
        args.base, args.ours = (getattr(args, side) or args.work / side / "build" / "bin" for side in ("base", "ours"))
    tiny_only = args.part == ["tiny"]
    needed = ("base", "ours") if tiny_only else ("base", "ours", "target", "draft")
    for name in needed:
        if getattr(args, name) is None:
            raise DFlashError(f"--{name} is missing, expected a {'folder' if name in ('base', 'ours') else 'file'}", "see --help")
    for part in args.part:
        if part not in PARTS:
            raise DFlashError(f"--part {part}, expected some of {', '.join(PARTS)}", "see --help")
    plan = Plan(args.target, args.draft, ROOT / "bench" / "shapes" / "tiny-pair.txt", args.ctx, args.n_predict, args.repeats)
    plan = replace(plan, flags=tuple(args.flag), bench_flags=tuple(args.bench_flag))
    sides = [Side("base", args.base), Side("ours", args.ours)]
    builds = {side.name: build.facts(side.name, side.folder) for side in sides}
    record = open_record(args)
    record.logs.mkdir(parents=True, exist_ok=True)
    record.put({"builds": builds, **({} if tiny_only else {"conditions": measure.conditions(plan, args.weights)})})
    run(args, record, plan, sides)
    print(record.path)
    return 1 if record.failures else 0


def check(path: Path) -> int:
    """Recompute; 1 when a figure is not that of its values."""
    data = json.loads(path.read_text())
    problems = figures.wrong(data)
    print("\n".join(problems) or f"{path}: all {len(list(figures.walk(data)))} figures are those of their values")
    if missing := figures.lacking(data):
        print(f"not measured: {', '.join(missing)}")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args = parser().parse_args(argv)
    try:
        if args.check:
            return check(args.check)
        if (args.build or args.unpack) and args.work is None:
            raise DFlashError("--work is missing, expected a folder", "see --help")
        for side in args.side if args.build or args.unpack else ():
            print(build.build(side, args.work.resolve(), args.cmake) if args.build else build.unpack(side, args.work.resolve()))
        if args.synth:
            if args.target is None or args.draft is None:
                raise DFlashError("--synth needs --target and --draft, expected two files to write", "see --help")
            build.synth(args.target, args.draft, args.work, args.layers)
        if args.split:
            open_record(args).put({"ours": {"round_split_ms": split_of(json.loads(args.split.read_text()))}})
        if args.part is None:
            if args.build or args.unpack or args.synth or args.split:
                return 0
            args.part = list(PARTS)
        return benchmark(args)
    except (DFlashError, vendor.VendorError, OSError, subprocess.SubprocessError) as e:
        print(f"gpu_bench: error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a time limit leaves no server behind
    sys.exit(main())
