#!/usr/bin/env python3
"""Train a draft (DFlash or DFlash2) or the MTP head on text that the frozen target wrote.

    python -m train_tiny.train_draft dflash|dflash2|mtp --target PREFIX --pool POOL.npz --out PREFIX [--seconds 300]

Features of the whole pool are computed once and stay on the device. Anchors lie in generated text only, since that is
where a draft works; block sizes 8 and 16 take turns, so that every n_max up to 15 is served.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from train_tiny.draft import Draft, DraftConfig, block_ids
from train_tiny.mtp import MtpHead
from train_tiny.pool import Pool, features_of
from train_tiny.target import Target, TargetConfig
from train_tiny.training import (
    DEVICE,
    Optimizers,
    Report,
    autocast,
    load_model,
    load_weights,
    save_model,
    schedule,
    seconds_left,
    slot_weights,
    soft_cross_entropy,
)

SEED = 12
BLOCKS = (16, 8)
FLOOR = 0.3  # weight of a slot whose predecessors were wrong: trees use those too
MTP_STEPS = 4
# per slot `[N]`: loss, whether the best token is the label, log-probability of the label
Losses: TypeAlias = tuple[Tensor, Tensor, Tensor]


def draft_config(kind: str, c: TargetConfig) -> DraftConfig:
    """The draft that fits a target; shrunk with it."""
    top_k, sizes = (15 if kind == "dflash2" else 0), {}
    if c.n_layer < 8:
        sizes = {"n_layer": 2, "n_ff": 64, "target_layers": (1, 2, 3), "selector_rank": 8}
        top_k = min(top_k, 7)
    return DraftConfig(
        n_embd=c.n_embd, n_head=c.n_head, n_head_kv=c.n_head_kv, head_dim=c.head_dim, n_vocab=c.n_vocab, n_ctx=c.n_ctx,
        mask_id=c.n_vocab - 1, selector_top_k=top_k, **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


class Data:
    """The pool with its features, and random batches of it."""

    def __init__(self, target: Target, pool: Pool, taps: Sequence[int]) -> None:
        self.pool = pool
        self.features, self.hidden = features_of(target, pool.ids, taps, 64)
        self.order, self.at = torch.zeros(0), 0

    def rows(self, n: int) -> Tensor:
        """The next n texts of a shuffled pass, `[n]`."""
        if self.at + n > len(self.order):
            self.order, self.at = torch.randperm(len(self.pool.ids), device=DEVICE), 0
        self.at += n
        return self.order[self.at - n : self.at]

    def anchors(self, rows: Tensor, n: int, block_size: int) -> Tensor:
        """Random positions `[len(rows), n]` from the last prompt token to the last full block."""
        first = self.pool.n_prompt[rows] - 1
        span = self.pool.ids.shape[1] - block_size - first
        return first[:, None] + (torch.rand(len(rows), n, device=DEVICE) * span[:, None]).long()


class DraftTask:
    """Loss of a DFlash or DFlash2 draft."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        self.args, self.target = args, target
        self.config: Any = draft_config(args.kind, target.c)
        self.taps = self.config.target_layers
        self.model: Any = Draft(self.config).to(DEVICE)
        if args.init:
            known = {k: v.float() for k, v in load_weights(args.init)[1].items()}
            self.model.load_state_dict(known, strict=False)  # a DFlash2 draft lacks nothing but convolutions and selector then

    def parts(self) -> Sequence[nn.Module]:
        """Modules to compile one by one."""
        return list(self.model.layers)

    def loss(self, data: Data, step: int) -> list[Tensor]:
        """Weighted loss, then loss and hit rate of slot 1 and mean accepted tokens of the block."""
        size = BLOCKS[step % len(BLOCKS)]
        rows = data.rows(self.args.batch)
        anchors = data.anchors(rows, self.args.anchors * BLOCKS[0] // size, size)
        ids = data.pool.ids[rows].long()
        at = (anchors[..., None] + torch.arange(1, size, device=DEVICE)).flatten(1)
        with torch.no_grad():
            embedded = self.target.embed(block_ids(ids, anchors, size, self.config.mask_id))
        hidden = self.model(embedded, data.features[rows], anchors)[:, :, 1:]
        labels = ids.gather(1, at)
        known = data.hidden[rows].gather(1, (at - 1)[..., None].expand(-1, -1, data.hidden.shape[-1]))
        temperature = data.pool.temperature[rows][:, None].expand_as(at)
        before = ids.gather(1, at - 1)
        outs = self.slot_loss(
            hidden.flatten(0, 2), known.flatten(0, 1), labels.flatten(), temperature.flatten(), before.flatten()
        )
        loss, correct, label_logp = (x.view(-1, size - 1) for x in outs)
        weight = slot_weights(correct, label_logp.detach(), 7.0 if size > 8 else 4.0, FLOOR, self.args.tree_share)
        total = (loss * weight).sum() / weight.sum()
        return [total, loss[:, 0].mean(), correct[:, 0].float().mean(), correct.float().cumprod(-1).sum(-1).mean()]

    def slot_loss(self, hidden: Tensor, known: Tensor, labels: Tensor, temperature: Tensor, before: Tensor) -> Losses:
        """Losses of slots `[N]`; a DFlash2 draft is scored given the true predecessor, as its chain is."""
        head = self.target.head.weight
        selector = self.model.selector
        if selector is None:
            out: Losses = self.single(hidden, head, known, labels, temperature)
            return out
        condition = selector.condition(hidden, before)
        pair, single, correct, label_logp = self.paired(hidden, head, condition, selector.next, known, labels, temperature)
        return pair + 0.5 * single, correct, label_logp

    @staticmethod
    def single(hidden: Tensor, head: Tensor, known: Tensor, labels: Tensor, temperature: Tensor) -> Losses:
        """Losses of plain logits."""
        head = head.to(hidden.dtype)
        return soft_cross_entropy(hidden @ head.T, labels, known.to(head.dtype) @ head.T, temperature)

    @staticmethod
    def paired(
        hidden: Tensor, head: Tensor, condition: Tensor, follow: Tensor, known: Tensor, labels: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss with the selector, loss without it (it picks the candidates), correctness and label's log-probability with it."""
        head = head.to(hidden.dtype)
        plain, teacher = hidden @ head.T, known.to(head.dtype) @ head.T
        scored = plain + condition @ follow.T.to(condition.dtype)
        pair, correct, label_logp = soft_cross_entropy(scored, labels, teacher, temperature)
        single, _, _ = soft_cross_entropy(plain, labels, teacher, temperature)
        return pair, single, correct, label_logp

    def compile(self) -> None:
        """Compile layers and losses."""
        for part in self.parts():
            part.compile(dynamic=False)
        self.single = torch.compile(self.single, dynamic=False)  # type: ignore[method-assign]
        self.paired = torch.compile(self.paired, dynamic=False)  # type: ignore[method-assign]


class MtpTask(DraftTask):
    """Loss of the MTP head, unrolled over MTP_STEPS draft steps."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        self.args, self.target = args, target
        self.config = target.c
        self.taps = ()
        self.model = MtpHead(target.c).to(DEVICE)

    def parts(self) -> Sequence[nn.Module]:
        """None."""
        return []

    def loss(self, data: Data, step: int) -> list[Tensor]:
        """As DraftTask.loss; the draft that ends at position p stands for steps 1..n at p - n + 1..p."""
        rows = data.rows(self.args.batch)
        ids = data.pool.ids[rows].long()
        known = data.hidden[rows]
        embedded = self.target.embed(ids).detach()
        outs = self.model.unroll(embedded, known.to(embedded.dtype), MTP_STEPS)
        n = MTP_STEPS
        last = ids.shape[1] - n
        # step s of the draft behind position p lies at p + s: align all steps on p
        hidden = torch.stack([o[:, s : last + s] for s, o in enumerate(outs)], 2)
        teacher = torch.stack([known[:, s : last + s] for s in range(n)], 2)
        labels = torch.stack([ids[:, s + 1 : last + s + 1] for s in range(n)], 2)
        temperature = data.pool.temperature[rows][:, None, None].expand_as(labels)
        outs = self.single(hidden.flatten(0, 2), self.target.head.weight, teacher.flatten(0, 2), labels.flatten(),
                           temperature.flatten())  # fmt: skip
        loss, correct, label_logp = (x.view(-1, n) for x in outs)
        generated = torch.arange(last, device=DEVICE) >= data.pool.n_prompt[rows][:, None] - 1
        weight = slot_weights(correct, label_logp.detach(), 4.0, FLOOR) * generated.reshape(-1, 1)
        counted = generated.flatten().float() / generated.sum()
        total = (loss * weight).sum() / weight.sum()
        accepted = correct.float().cumprod(-1).sum(-1)
        return [total, (loss[:, 0] * counted).sum(), (correct[:, 0] * counted).sum(), (accepted * counted).sum()]

    def compile(self) -> None:
        """Compile the loss; the unrolled steps take minutes to compile and gain little."""
        self.single = torch.compile(self.single, dynamic=False)  # type: ignore[method-assign]


def run(args: argparse.Namespace, data: Data | None = None) -> Data:
    """Train and save one draft; the features in use come back, so that the next draft need not compute them."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64  # two block sizes for every layer
    torch.manual_seed(SEED)
    began = time.monotonic()
    target = load_model(Target, TargetConfig, args.target).eval().requires_grad_(False)
    task = MtpTask(args, target) if args.kind == "mtp" else DraftTask(args, target)
    if data is None:
        data = Data(target, Pool.load(args.pool), task.taps)
    if args.compile:
        task.compile()
    optimizer = Optimizers(task.model, args.lr, 0.05, not args.adamw)
    for step in range(4 if args.compile else 0):  # compile both block sizes before the clock starts
        with autocast():
            task.loss(data, step)[0].backward()
        optimizer.step(0.0)
    optimizer.reset()
    n_parameters = sum(p.numel() for p in task.model.parameters())
    print(f"{args.kind}: {n_parameters / 1e6:.2f} M parameters, ready after {time.monotonic() - began:.0f} s", flush=True)
    report, start = Report(args.kind, args.every), time.monotonic()
    for scale in schedule(seconds_left(args.seconds, args.until), args.steps):
        with autocast():
            values = task.loss(data, report.n)
        values[0].backward()
        optimizer.step(scale)
        report.add(values)
    save_model(task.model, args.out, task.config)
    facts = {
        "parameters": n_parameters,
        "steps": report.n,
        "seconds": round(time.monotonic() - start, 1),
        "pool_texts": len(data.pool.ids),
        "pool_tokens": data.pool.ids.numel(),
        "passes_over_pool": round(report.n * args.batch / len(data.pool.ids), 2),
        "loss_slot1loss_slot1hit_accepted": report.last,
        "lr": args.lr,
        "tree_share": args.tree_share,
        "init": bool(args.init),
    }
    Path(f"{args.out}.facts.json").write_text(json.dumps(facts) + "\n")
    print(facts, f"total {time.monotonic() - began:.0f} s", flush=True)
    return data


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=("dflash", "dflash2", "mtp"))
    p.add_argument("--target", type=Path, required=True)
    p.add_argument("--pool", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--init", type=Path, help="begin with the weights of another draft, such as dflash for dflash2")
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--until", type=float, help="end by this time of the monotonic clock")
    p.add_argument("--steps", type=int, help="a number of steps instead of seconds")
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--anchors", type=int, default=48, help="blocks of 16 per text; twice as many of 8")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--tree-share", type=float, default=0.5, help="weight slots by their use in a tree rather than a chain")
    p.add_argument("--every", type=int, default=200)
    p.add_argument("--adamw", action="store_true", help="AdamW for every tensor")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=DEVICE == "cuda")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training."""
    run(parser().parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
