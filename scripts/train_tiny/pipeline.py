#!/usr/bin/env python3
"""Run the training stages on one CUDA machine, each once; started again, it goes on where it stopped.

    python -m train_tiny.pipeline --corpus DIR --work DIR --out DIR --stages base,refined,target,pool,dflash,dflash2,mtp

--work keeps everything between calls on one machine; --out gets a copy of what a stage made (at most 8 files of 16 MiB,
which is what comes back from a rented machine). Copies of finished stages put back into --work count as done.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from train_tiny import merge, refine_target, train_draft, train_target
from train_tiny.check import check
from train_tiny.corpus import unpack
from train_tiny.pool import make_pool
from train_tiny.target import Target, TargetConfig
from train_tiny.training import DEVICE, load_model

STAGES = ("base", "refined", "target", "pool", "dflash", "dflash2", "mtp")
POOL_SEED = 13
POOL_PROMPTS = (128, 256, 384, 448)
POOL_CONTEXT = 640


class Pipeline:
    """Stages with their inputs and outputs in the work folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work: Path = args.work
        self.until = time.monotonic() + args.limit_s if args.limit_s else None
        self.shared: train_draft.Data | None = None  # features are the same for dflash and dflash2

    def is_done(self, stage: str) -> bool:
        """Whether a stage's result is in the work folder."""
        return (self.work / ("pool.npz" if stage == "pool" else f"{stage}.facts.json")).exists()

    def base(self) -> None:
        """Train the target from nothing."""
        options = ["--corpus", str(self.args.corpus), "--out", str(self.work / "base"), "--seconds", str(self.args.base_s)]
        train_target.run(train_target.parser().parse_args(options + self.extra()))

    def refined(self) -> None:
        """Refine the target: long contexts, fewer loops."""
        options = ["--corpus", str(self.args.corpus), "--init", str(self.work / "base"), "--out", str(self.work / "refined")]
        options += ["--seconds", str(self.args.refined_s), *self.args.refine_options.split()]
        refine_target.run(refine_target.parser().parse_args(options + self.extra()))

    def target(self) -> None:
        """Part of the refinement only: all of it makes text too hard to draft."""
        paths = ["--first", str(self.work / "base"), "--second", str(self.work / "refined"), "--out", str(self.work / "target")]
        merge.main([*paths, "--corpus", str(self.args.corpus), "--share", str(self.args.share), *self.args.merge_options.split()])

    def extra(self) -> list[str]:
        """Options that every training takes."""
        out = ["--every", str(self.args.every)]
        out += ["--steps", str(self.args.steps)] if self.args.steps else []
        out += ["--batch", str(self.args.batch)] if self.args.batch else []
        out += ["--until", str(self.until)] if self.until else []
        return out

    def pool(self) -> None:
        """Let the target write the drafts' training text."""
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(POOL_SEED)
        target = load_model(Target, TargetConfig, self.work / "target").eval().requires_grad_(False)
        corpus = torch.from_numpy(unpack(self.args.corpus / "train.xz")).to(DEVICE)
        prompts = POOL_PROMPTS * self.args.pool_rounds
        made = make_pool(target, corpus, self.args.pool_batch, POOL_CONTEXT, prompts)
        made.save(self.work / "pool.npz")
        print(f"pool: {made.ids.shape[0]} texts of {POOL_CONTEXT} tokens", flush=True)

    def draft(self, kind: str, seconds: float) -> None:
        """Train one draft."""
        paths = ["--target", str(self.work / "target"), "--pool", str(self.work / "pool.npz"), "--out", str(self.work / kind)]
        more = ["--batch", "32"] if kind == "mtp" else []
        init = {"dflash": self.args.draft_init, "dflash2": self.work / "dflash"}.get(kind)
        more += ["--init", str(init)] if init and (init.parent / f"{init.name}.json").exists() else []
        more += ["--no-compile"] if self.args.eager else []
        more += self.args.draft_options.split()
        args = train_draft.parser().parse_args([kind, *paths, "--seconds", str(seconds), *more, *self.extra()])
        self.shared = train_draft.run(args, self.shared)
        self.copy_results(kind)
        if self.args.check:
            for t, row in check(self.work, self.args.corpus / "held.xz", self.args.check, [kind]).items():
                print(f"{kind} T {t}: {json.dumps(row)}", flush=True)

    def run(self, stage: str) -> None:
        """Run one stage and copy its results."""
        start = time.monotonic()
        print(f"== {stage}", flush=True)
        if stage in ("dflash", "dflash2", "mtp"):
            self.draft(stage, float(getattr(self.args, f"{stage}_s")))
        else:
            getattr(self, stage)()
        self.copy_results(stage)
        print(f"== {stage} took {time.monotonic() - start:.0f} s", flush=True)

    def copy_results(self, stage: str) -> None:
        """Copy a stage's weights, and one file with all small facts, to the output folder."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.work.glob(f"{stage}-*.safetensors")):
            shutil.copy(path, self.args.out)
        facts: dict[str, Any] = {}
        for path in sorted(self.work.glob("*.json")):
            facts[path.name] = json.loads(path.read_text())
        (self.args.out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def restore(work: Path, results: Path) -> None:
    """Put copied results (safetensors and facts.json) back into a work folder, so that their stages count as done."""
    work.mkdir(parents=True, exist_ok=True)
    for path in results.glob("*.safetensors"):
        shutil.copy(path, work)
    facts = results / "facts.json"
    for name, content in json.loads(facts.read_text()).items() if facts.exists() else ():
        (work / name).write_text(json.dumps(content) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are not done."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--restore", type=Path, help="folder with results of finished stages")
    p.add_argument("--stages", default=",".join(STAGES))
    p.add_argument("--base-s", type=float, default=310)
    p.add_argument("--refined-s", type=float, default=120)
    p.add_argument("--refine-options", default="", help="more options of refine_target")
    p.add_argument("--share", type=float, default=0.45, help="share of the refined weights in the target")
    p.add_argument("--merge-options", default="", help="more options of merge")
    p.add_argument("--dflash-s", type=float, default=320)
    p.add_argument("--dflash2-s", type=float, default=330)
    p.add_argument("--draft-options", default="", help="more options of train_draft")
    p.add_argument("--draft-init", type=Path, help="weights that dflash begins with; dflash2 begins with dflash's")
    p.add_argument("--check", type=int, default=96, help="held-out prompts for a look at every draft, 0 for none")
    p.add_argument("--mtp-s", type=float, default=90)
    p.add_argument("--pool-batch", type=int, default=8192)
    p.add_argument("--pool-rounds", type=int, default=1)
    p.add_argument("--every", type=int, default=200)
    p.add_argument("--steps", type=int, help="steps of every training, for smoke tests")
    p.add_argument("--batch", type=int, help="batch of every training, for smoke tests")
    p.add_argument("--eager", action="store_true", help="drafts without torch.compile: for runs too short to pay for it")
    p.add_argument("--limit-s", type=float, help="training ends this long after the start, whatever its stage was given")
    p.add_argument("--go-on", action="store_true", help="after a failed stage try the others")
    args = p.parse_args(argv)
    if args.restore:
        restore(args.work, args.restore)
    args.work.mkdir(parents=True, exist_ok=True)
    pipeline, failed = Pipeline(args), False
    for stage in args.stages.split(","):
        if pipeline.is_done(stage):
            print(f"== {stage} is done", flush=True)
            continue
        try:
            pipeline.run(stage)
        except Exception:
            if not args.go_on:
                raise
            traceback.print_exc()
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
