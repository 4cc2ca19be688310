#!/usr/bin/env python3
"""Simulate chains and trees of the drafts on prompts: what llama.cpp accepts, without running it.

    python -m train_tiny.simulate --weights DIR --tokenizer FILE --prompts FILE... --out sim.json

For every prompt and seed the target writes its text once; each draft is asked at every position of it in one batch, and
then every policy is played on these answers (see grow.py). The result holds the rounds of every text and policy; a text
of n tokens emits n - 1 in rounds, since the first comes from the prompt's pass. card.py and sweep.py read it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train_tiny.grow import Candidates, TreeShape, held_by_budget
from train_tiny.record import Models, Record, Texts, features_of_texts, record_draft, record_mtp, write_texts
from train_tiny.training import DEVICE
from train_tiny.trees import count_rounds, repetition_rate, room

HITS = (1, 4, 8)
LOOKAHEAD = 16  # behind the last anchor a whole block must follow
MTP_SLOTS = (3, 7)


@dataclass
class Policy:
    """One way of drafting and what it gave, per temperature.

    Attributes:
        draft: dflash, dflash2 or mtp.
        scores: unary, or pairwise for DFlash2's selector.
        block: tokens of a block with its anchor; n_max is one less.
        budget: nodes of a tree, 0 for a chain.
        top_k: children per node.
        spine: nodes of the greedy chain that come first.
        rounds: of every text, prompts outermost, then seeds.
        accepted: for chains, rounds that accepted slot 1, 2, ...
    """

    draft: str
    scores: str
    block: int
    budget: int = 0
    top_k: int = 1
    spine: int = 0
    rounds: dict[str, list[int]] = field(default_factory=dict)
    accepted: dict[str, list[int]] = field(default_factory=dict)

    def add(self, temperature: str, rounds: np.ndarray, accepted: np.ndarray) -> None:
        """What `count_rounds` gave for some texts."""
        self.rounds.setdefault(temperature, []).extend(rounds.tolist())
        if not self.budget:
            known = self.accepted.get(temperature, [0] * (self.block - 1))
            self.accepted[temperature] = [a + int(b) for a, b in zip(known, accepted, strict=True)]


@dataclass(frozen=True)
class Grid:
    """Trees to play: every combination for the first block size, the first top_k and spine for the others."""

    budgets: Sequence[int]
    top_ks: Sequence[int]
    spines: Sequence[int]
    blocks: Sequence[int]

    def shapes(self, block: int) -> list[TreeShape]:
        """The shapes for a block size."""
        if block != self.blocks[0]:
            return [TreeShape(self.top_ks[0], self.spines[0])]
        return [TreeShape(k, s) for k in self.top_ks for s in self.spines]


class Book:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.policies: dict[tuple[object, ...], Policy] = {}
        self.hits: dict[str, dict[str, list[list[int]]]] = {}
        self.n_anchors: dict[str, int] = {}
        self.repetition: dict[str, list[float]] = {}

    def policy(self, *key: object) -> Policy:
        """The policy of these fields."""
        full = (*key, *(0, 1, 0)[len(key) - 3 :])  # a chain has no more fields
        return self.policies.setdefault(full, Policy(*full))  # type: ignore[arg-type]

    def add_hits(self, name: str, temperature: str, truth: Tensor) -> None:
        """How often the text's token was among the best k of a slot, `[anchors, slots]`."""
        rows = torch.stack([((truth >= 0) & (truth < k)).sum(0) for k in HITS]).cpu()
        known = self.hits.setdefault(name, {})
        known[temperature] = (rows + torch.tensor(known.get(temperature, 0))).tolist()

    def dump(self) -> dict[str, Any]:
        """For JSON."""
        return {"policies": [asdict(p) for p in self.policies.values()], "hits": self.hits, "n_anchors": self.n_anchors,
                "repetition": self.repetition}  # fmt: skip

    @staticmethod
    def load(data: dict[str, Any]) -> Book:
        """From what `dump` gave."""
        book = Book()
        for row in data["policies"]:
            policy = Policy(**row)
            book.policies[policy.draft, policy.scores, policy.block, policy.budget, policy.top_k, policy.spine] = policy
        book.hits, book.n_anchors, book.repetition = data["hits"], data["n_anchors"], data["repetition"]
        return book


def join(records: Sequence[Record]) -> Record:
    """Records of several groups of texts as one."""

    def cat(parts: Sequence[Candidates]) -> Candidates:
        return Candidates(*(torch.cat([getattr(p, name) for p in parts]) for name in ("logp", "index", "truth")))

    pairs = [r.pair for r in records if r.pair is not None]
    return Record(cat([r.single for r in records]), cat(pairs) if pairs else None, sum(r.n_texts for r in records))


def play_record(book: Book, name: str, record: Record, size: int, n_tokens: int, grid: Grid, temperature: str) -> None:
    """All policies on one draft's answers."""
    n_slots, n = size - 1, record.n_texts
    depth = torch.from_numpy(room(n_tokens, n_slots)).to(DEVICE).repeat(n)
    book.add_hits(f"{name} block {size}", temperature, record.single.truth)
    kinds: list[tuple[str, Candidates]] = [("unary", record.single)]
    kinds += [("pairwise", record.pair)] if record.pair is not None else []
    for scores, candidates in kinds:
        chain = held_by_budget(candidates, TreeShape(1), depth, n_slots)[:, -1].view(n, -1)
        book.policy(name, scores, size).add(temperature, *count_rounds(chain.cpu().numpy(), n_slots))
        for shape in grid.shapes(size):
            held = held_by_budget(candidates, shape, depth, max(grid.budgets)).to(torch.int8).cpu().numpy().astype(np.int64)
            for budget in grid.budgets:
                policy = book.policy(name, scores, size, budget, shape.top_k, shape.spine)
                policy.add(temperature, *count_rounds(held[:, budget].reshape(n, -1), n_slots))


@dataclass(frozen=True)
class Run:
    """What is simulated, and where it is written after every group of prompts."""

    models: Models
    prompts: Sequence[Sequence[int]]
    n_tokens: int
    n_seeds: int
    n_group: int
    grid: Grid
    options: dict[str, Any]
    out: Path

    def simulate(self, book: Book, heat: float) -> None:
        """The prompts that are not done yet, at one temperature."""
        n_texts, temperature, began = (self.n_seeds if heat else 1), str(heat), time.monotonic()
        for first in range(len(book.repetition.get(temperature, [])) // n_texts, len(self.prompts), self.n_group):
            group = self.prompts[first : first + self.n_group]
            torch.manual_seed(1000 * first + 17)
            prompts = [torch.tensor([list(p)] * n_texts, device=DEVICE) for p in group]
            groups = write_texts(self.models.target, prompts, heat, self.n_tokens, LOOKAHEAD)
            for texts in groups:
                written = texts.ids[:, texts.n_prompt :][:, : self.n_tokens].tolist()
                book.repetition.setdefault(temperature, []).extend(map(repetition_rate, written))
            n_anchors = len(group) * n_texts * (self.n_tokens - 1)
            book.n_anchors[temperature] = book.n_anchors.get(temperature, 0) + n_anchors
            self.play(book, groups, temperature)
            part = self.out.with_suffix(".part")
            part.write_text(json.dumps({"options": self.options, **book.dump()}) + "\n")
            part.replace(self.out)
            done = min(first + self.n_group, len(self.prompts))
            print(f"T {heat}: {done} of {len(self.prompts)} prompts, {time.monotonic() - began:.0f} s", flush=True)

    def play(self, book: Book, groups: Sequence[Texts], temperature: str) -> None:
        """All drafts on the texts of some prompts."""
        models = self.models
        for name, draft in models.drafts.items():
            features = [features_of_texts(models.target, texts, draft.c.target_layers) for texts in groups]
            for size in self.grid.blocks:
                answers = (record_draft(models.target, draft, t, size, f) for t, f in zip(groups, features, strict=True))
                play_record(book, name, join(list(answers)), size, self.n_tokens, self.grid, temperature)
        if models.mtp is not None:
            longest = torch.cat([record_mtp(models.target, models.mtp, texts, max(MTP_SLOTS)) for texts in groups]).cpu().numpy()
            for slots in MTP_SLOTS:
                capped = np.minimum(np.minimum(longest, slots), room(self.n_tokens, slots))
                book.policy("mtp", "unary", slots + 1).add(temperature, *count_rounds(capped, slots))


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path, required=True)
    p.add_argument("--prompts", type=Path, nargs="+", required=True)
    p.add_argument("--out", type=Path, required=True, help="an unfinished file is continued")
    p.add_argument("--drafts", default="dflash,dflash2,mtp")
    p.add_argument("--n-prompts", type=int, help="of every file")
    p.add_argument("--n-tokens", type=int, default=128)
    p.add_argument("--seeds", type=int, default=10, help="texts per prompt at temperatures above 0")
    p.add_argument("--budgets", type=int, nargs="+", default=[1, 4, 8, 15, 22, 31, 63])
    p.add_argument("--top-ks", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    p.add_argument("--spines", type=int, nargs="+", default=[0, 4, 8, 15])
    p.add_argument("--blocks", type=int, nargs="+", default=[16, 8])
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--group", type=int, default=40 if DEVICE == "cuda" else 1, help="prompts at once")
    p.add_argument("--threads", type=int, default=1)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and write."""
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    texts = [entry["text"] for path in args.prompts for entry in json.loads(path.read_text())["prompts"][: args.n_prompts]]
    prompts = [tokenizer.encode(text).ids for text in texts]
    options = {
        "n_tokens": args.n_tokens,
        "n_prompts": len(prompts),
        "seeds": args.seeds,
        "prompts": [p.name for p in args.prompts],
    }
    book = Book()
    if args.out.exists():
        known = json.loads(args.out.read_text())
        if known["options"] != options:
            raise SystemExit(f"simulate: {args.out} has options {known['options']}, expected {options}")
        book = Book.load(known)
    grid = Grid(args.budgets, args.top_ks, args.spines, args.blocks)
    models = Models(args.weights, args.drafts.split(","))
    run = Run(models, prompts, args.n_tokens, args.seeds, args.group, grid, options, args.out)
    for heat in args.temperatures:
        run.simulate(book, heat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
