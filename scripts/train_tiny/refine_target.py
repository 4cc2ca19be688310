#!/usr/bin/env python3
"""Go on training the target: long sequences of the corpus, and its own greedy text with loops made unlikely.

    python -m train_tiny.refine_target --corpus DIR --init PREFIX --out PREFIX [--seconds 120]

A model this small falls into loops when it writes greedily, and a draft predicts loops easily, so that acceptance would
look better than a real model's. Sequence-level unlikelihood (Welleck et al., 2019, arXiv:1908.04319): the target writes
texts, and every token that ends an n-gram which its text already held costs -log(1 - p). Texts are written anew a few
times, since the penalty moves the loops.
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
from train_tiny.pool import Generator, starts
from train_tiny.target import Target, TargetConfig
from train_tiny.train_target import head_loss
from train_tiny.training import DEVICE, Optimizers, Report, autocast, load_model, save_model, schedule, seconds_left
from train_tiny.trees import repetition_rate

SEED = 14
GRAM = 8  # as the repetition rate counts
RATE_TOKENS = 128  # length that the repetition rate is quoted for


def repeats(ids: Tensor, first: Tensor, n: int = GRAM) -> Tensor:
    """Tokens `[B, T]` that end an n-gram which lies earlier in the same row, both at or behind position `first` `[B]`."""
    n_tokens = ids.shape[1]
    gram = torch.zeros_like(ids)  # a hash that wraps around
    for j in range(n):
        gram = gram * 1_000_003 + F.pad(ids[:, : n_tokens - (n - 1 - j)], (n - 1 - j, 0))
    at = torch.arange(n_tokens, device=ids.device)
    whole = at >= first[:, None] + n - 1
    same = (gram[:, :, None] == gram[:, None, :]) & whole[:, :, None] & whole[:, None, :] & (at[:, None] > at[None, :])
    return same.any(-1)


def unlikelihood(hidden: Tensor, head: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
    """-log(1 - p) of the labels that `wanted` `[B, T]` marks, summed; hidden `[B, T, n_embd]`."""
    logits = (hidden @ head.T.to(hidden.dtype)).float()
    p = (logits.gather(-1, labels[..., None])[..., 0] - logits.logsumexp(-1)).exp()
    return (-torch.log1p(-p.clamp(max=0.999)) * wanted).sum()


def window(data: Tensor, at: Tensor, seq: int) -> Tensor:
    """Windows of seq + 1 tokens at `at` `[B]`."""
    return data[at[:, None] + torch.arange(seq + 1, device=data.device)].long()


class Writer:
    """Greedy texts of the model in training, written by a copy that is not compiled."""

    def __init__(self, args: argparse.Namespace, model: Target, corpus: Tensor) -> None:
        self.args, self.corpus = args, corpus
        self.copy = Target(model.c).to(DEVICE).eval().requires_grad_(False)
        self.generator: Generator | None = None
        self.ids, self.first = torch.zeros(0), torch.zeros(0)
        self.rates: list[float] = []

    @torch.no_grad()
    def take(self, model: Target) -> Target:
        """The copy, with the model's weights."""
        for mine, theirs in zip(self.copy.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
        return self.copy

    @property
    def pressure(self) -> float:
        """Share of the penalty that is in force: all while loops are frequent, half at the goal, little below it."""
        return min(1.0, self.rates[-1] / (2 * self.args.goal))

    def write(self, model: Target) -> float:
        """Write anew with the model's weights; the repetition rate of the new texts."""
        self.take(model)
        if self.generator is None:
            self.generator = Generator(self.copy, self.args.texts, self.args.text_tokens)
        parts, firsts = [], []
        for n_prompt in self.args.prompt_tokens:
            at = starts(self.corpus, self.args.texts, n_prompt)
            prompts = self.corpus[at[:, None] + torch.arange(n_prompt, device=DEVICE)].long()
            parts.append(self.generator.run(prompts, torch.zeros(len(prompts), device=DEVICE)).long())
            firsts.append(torch.full((len(prompts),), n_prompt, device=DEVICE))
        self.ids, self.first = torch.cat(parts), torch.cat(firsts)
        self.rates.append(round(self.rate(), 4))
        return self.rates[-1]

    def rate(self) -> float:
        """Mean repetition rate of the first written tokens of up to 256 texts."""
        rows = torch.randperm(len(self.ids))[:256].tolist()
        texts = [self.ids[i, int(self.first[i]) :][:RATE_TOKENS].tolist() for i in rows]
        return sum(repetition_rate(t, GRAM) for t in texts) / len(texts)


class Refiner:
    """Model, data and losses."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.args = args
        self.model = load_model(Target, TargetConfig, args.init)
        self.optimizer = Optimizers(self.model, args.lr, 0.1)
        self.head_loss: Any = torch.compile(head_loss, dynamic=False) if args.compile else head_loss
        self.unlikelihood: Any = torch.compile(unlikelihood, dynamic=False) if args.compile else unlikelihood
        self.train, self.held = (torch.from_numpy(unpack(args.corpus / f"{n}.xz")).to(DEVICE) for n in ("train", "held"))
        self.writer = Writer(args, self.model, self.train)
        if args.compile:
            for block in self.model.blocks:
                block.compile(dynamic=False)

    def corpus_loss(self, ids: Tensor) -> Tensor:
        """Cross-entropy of windows `[B, T + 1]`."""
        with autocast():
            hidden, _ = self.model(ids[:, :-1])
            out: Tensor = self.head_loss(hidden, self.model.head.weight, ids[:, 1:])
        return out

    def loop_loss(self) -> Tensor:
        """Unlikelihood of some of the written texts, per written token."""
        rows = torch.randint(0, len(self.writer.ids), (self.args.loop_batch,), device=DEVICE)
        ids, first = self.writer.ids[rows], self.writer.first[rows]
        marked = repeats(ids, first)
        with autocast():
            hidden, _ = self.model(ids)
            total = self.unlikelihood(hidden[:, :-1], self.model.head.weight, ids[:, 1:], marked[:, 1:].float())
        out: Tensor = total / (ids.shape[1] - first).sum()
        return out

    def step(self, scale: float) -> list[Tensor]:
        """One update; the two losses."""
        at = torch.randint(0, len(self.train) - self.args.seq - 1, (self.args.batch,), device=DEVICE)
        plain = self.corpus_loss(window(self.train, at, self.args.seq))
        plain.backward()
        loops = self.loop_loss()
        (self.args.alpha * self.writer.pressure * loops).backward()
        self.optimizer.step(scale)
        return [plain.detach(), loops.detach()]

    def held_out(self) -> dict[str, float]:
        """Held-out loss of the present weights, by the copy that is not compiled."""
        return held_out(self.writer.take(self.model), self.held, self.args.seq, self.args.batch, self.args.held_batches)


@torch.no_grad()
def held_out(model: Target, data: Tensor, seq: int, n_batch: int, n_batches: int) -> dict[str, float]:
    """Held-out loss in nats a token: of all tokens in windows of `seq`, and of those behind position seq / 2."""
    at = torch.arange(0, len(data) - seq - 1, seq, device=DEVICE)
    at = at[: max(1, min(n_batches, len(at) // n_batch)) * n_batch]
    whole, late = [], []
    for part in at.split(n_batch):
        ids = window(data, part, seq)
        with autocast():
            hidden, _ = model(ids[:, :-1])
            for rows, start in ((whole, 0), (late, seq // 2)):
                rows.append(float(head_loss(hidden[:, start:], model.head.weight, ids[:, 1 + start :])))
    return {"all": round(sum(whole) / len(whole), 4), "second_half": round(sum(late) / len(late), 4)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and save; what the card says about it."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    began = time.monotonic()
    refiner = Refiner(args)
    rates = refiner.writer.rates
    refiner.writer.write(refiner.model)
    for _ in range(2 if args.compile else 0):
        refiner.step(0.0)
    refiner.optimizer.reset()
    before = refiner.held_out()
    print(f"refine: ready after {time.monotonic() - began:.0f} s, repetition {rates[0]}, held-out {before}", flush=True)
    seconds = seconds_left(args.seconds, args.until)
    report, start = Report("refine", args.every), time.monotonic()
    for scale in schedule(seconds, args.steps):
        done = report.n / args.steps if args.steps else (time.monotonic() - start) / seconds
        if done * args.rounds >= len(rates):
            refiner.writer.write(refiner.model)
            print(f"refine: repetition {rates[-1]} at step {report.n}", flush=True)
        report.add(refiner.step(scale))
    took = time.monotonic() - start
    save_model(refiner.model, args.out, refiner.model.c)
    refiner.writer.write(refiner.model)
    facts = {
        "steps": report.n,
        "seconds": round(took, 1),
        "tokens": report.n * args.batch * args.seq,
        "batch": [args.batch, args.seq],
        "loop_batch": [args.loop_batch, args.text_tokens],
        "alpha": args.alpha,
        "goal": args.goal,
        "lr": args.lr,
        "corpus_and_loop_loss": report.last,
        "held_out_nats_before": before,
        "held_out_nats": refiner.held_out(),
        "repetition_of_training_texts": rates,
    }
    Path(f"{args.out}.facts.json").write_text(json.dumps(facts) + "\n")
    print(facts, f"total {time.monotonic() - began:.0f} s", flush=True)
    return facts


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--init", type=Path, required=True, help="weights to begin with")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--until", type=float, help="end by this time of the monotonic clock")
    p.add_argument("--steps", type=int, help="a number of steps instead of seconds")
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--loop-batch", type=int, default=32)
    p.add_argument("--alpha", type=float, default=1.0, help="weight of the unlikelihood")
    p.add_argument("--goal", type=float, default=0.15, help="repetition rate of greedy text at which the penalty is halved")
    p.add_argument("--texts", type=int, default=1024, help="texts written per prompt length and round")
    p.add_argument("--text-tokens", type=int, default=512)
    p.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 128, 256])
    p.add_argument("--rounds", type=int, default=10, help="how often texts are written")
    p.add_argument("--held-batches", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--every", type=int, default=100)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=DEVICE == "cuda")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training."""
    run(parser().parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
