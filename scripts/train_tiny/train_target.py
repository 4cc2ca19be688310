#!/usr/bin/env python3
"""Train the target on the corpus; the learning rate follows the wall clock, so a run ends on time.

python -m train_tiny.train_target --corpus DIR --out PREFIX [--seconds 400]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train_tiny.corpus import unpack
from train_tiny.target import SMALL, Target, TargetConfig
from train_tiny.training import DEVICE, Optimizers, Report, autocast, save_model, schedule, seconds_left

SEED = 11


def head_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of `[B, T, n_embd]` against `[B, T]`."""
    logits = (hidden @ head.T.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Trainer:
    """Model, optimiser and data of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.args = args
        self.config = SMALL if args.small else TargetConfig()
        self.model = Target(self.config).to(DEVICE)
        self.optimizer = Optimizers(self.model, args.lr, 0.1, not args.adamw)
        self.head_loss: Any = torch.compile(head_loss) if args.compile else head_loss
        if args.compile:
            for block in self.model.blocks:
                block.compile(dynamic=False)
        self.train, self.held = (torch.from_numpy(unpack(args.corpus / f"{n}.xz")).to(DEVICE) for n in ("train", "held"))
        self.window = torch.arange(args.seq + 1, device=DEVICE)

    def loss(self, ids: Tensor) -> Tensor:
        """Loss of windows `[B, T + 1]`."""
        with autocast():
            hidden, _ = self.model(ids[:, :-1])
            out: Tensor = self.head_loss(hidden, self.model.head.weight, ids[:, 1:])
        return out

    def windows(self, data: Tensor, at: Tensor) -> Tensor:
        """Windows of T + 1 tokens that begin at `at` `[B]`."""
        return data[at[:, None] + self.window].long()

    def batch(self) -> Tensor:
        """Random windows of the training text."""
        return self.windows(self.train, torch.randint(0, len(self.train) - self.args.seq - 1, (self.args.batch,), device=DEVICE))

    def warm_up(self) -> None:
        """Compile with learning rate 0, so that the clock starts with a compiled step."""
        for _ in range(3 if self.args.compile else 1):
            self.loss(self.batch()).backward()
            self.optimizer.step(0.0)
        self.optimizer.reset()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out packages, nats a token."""
        n, seq = self.args.batch, self.args.seq
        at = torch.arange(0, len(self.held) - seq - 1, seq, device=DEVICE)
        at = at[: max(len(at) // n, 1) * n]
        losses = [float(self.loss(self.windows(self.held, part))) for part in at.split(n)[:64] if len(part) == n]
        return sum(losses) / max(len(losses), 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save; what the card says about it."""
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    trainer = Trainer(args)
    n_parameters = sum(p.numel() for p in trainer.model.parameters())
    trainer.warm_up()
    print(f"target: {n_parameters / 1e6:.2f} M parameters, compiled after {time.monotonic() - began:.0f} s", flush=True)
    report, start = Report("target", args.every), time.monotonic()
    for scale in schedule(seconds_left(args.seconds, args.until), args.steps):
        loss = trainer.loss(trainer.batch())
        loss.backward()
        trainer.optimizer.step(scale)
        report.add([loss])
    took = time.monotonic() - start
    save_model(trainer.model, args.out, trainer.config)
    n_tokens = report.n * args.batch * args.seq
    held = trainer.evaluate()
    facts = {
        "parameters": n_parameters,
        "steps": report.n,
        "tokens": n_tokens,
        "epochs": round(n_tokens / len(trainer.train), 2),
        "seconds": round(took, 1),
        "train_loss_nats": report.last,
        "held_out_loss_nats": round(held, 4),
        "lr": args.lr,
        "batch": [args.batch, args.seq],
    }
    Path(f"{args.out}.facts.json").write_text(json.dumps(facts) + "\n")
    print(facts, f"total {time.monotonic() - began:.0f} s", flush=True)
    return facts


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=400)
    p.add_argument("--until", type=float, help="end by this time of the monotonic clock")
    p.add_argument("--steps", type=int, help="a number of steps instead of seconds")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--every", type=int, default=200)
    p.add_argument("--adamw", action="store_true", help="AdamW for every tensor")
    p.add_argument("--small", action="store_true", help="a model for smoke tests")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=DEVICE == "cuda")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training."""
    run(parser().parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
