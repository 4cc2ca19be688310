#!/usr/bin/env python3
"""A quick look at drafts on held-out packages, for choosing between trainings: never on the prompts that the card quotes.

python -m train_tiny.check --weights DIR --held HELD.xz
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train_tiny.corpus import unpack
from train_tiny.grow import Candidates, TreeShape, held_by_budget
from train_tiny.record import Models, Record, Texts, features_of_texts, record_draft, record_mtp, write_texts
from train_tiny.training import DEVICE
from train_tiny.trees import count_rounds, repetition_rate, room

N_TOKENS, LOOKAHEAD, N_PROMPT, BUDGET = 128, 16, 128, 15
SEED = 3


def tokens_per_round(accepted: Tensor) -> float:
    """Of all texts `[texts, anchors]` together."""
    rounds, _ = count_rounds(accepted.cpu().numpy(), LOOKAHEAD)
    return accepted.numel() / int(rounds.sum())


def policies(record: Record, n_slots: int) -> dict[str, float]:
    """Tokens per round of the chain and of trees of BUDGET nodes."""
    depth = torch.from_numpy(room(N_TOKENS, n_slots)).to(DEVICE).repeat(record.n_texts)

    def played(c: Candidates, top_k: int, budget: int) -> float:
        held = held_by_budget(c, TreeShape(top_k), depth, budget)[:, budget]
        return tokens_per_round(held.view(record.n_texts, -1))

    best = record.single if record.pair is None else record.pair
    out = {"chain": played(best, 1, n_slots), "tree": played(best, 16, BUDGET)}
    if record.pair is not None:
        out["tree_unary"] = played(record.single, 16, BUDGET)
    return {k: round(v, 3) for k, v in out.items()} | {"tree/chain": round(out["tree"] / out["chain"], 3)}


def look(models: Models, texts: Texts) -> dict[str, Any]:
    """All drafts on some texts."""
    written = texts.ids[:, texts.n_prompt : texts.n_prompt + N_TOKENS].tolist()
    out: dict[str, Any] = {"repetition": round(sum(map(repetition_rate, written)) / len(written), 3)}
    for name, draft in models.drafts.items():
        features = features_of_texts(models.target, texts, draft.c.target_layers)
        for size in (16, 8):
            out[f"{name} {size - 1}"] = policies(record_draft(models.target, draft, texts, size, features), size - 1)
    if models.mtp is not None:
        right = record_mtp(models.target, models.mtp, texts, 3)
        out["mtp 3"] = round(tokens_per_round(right.minimum(torch.from_numpy(room(N_TOKENS, 3)).to(DEVICE))), 3)
    return out


def check(weights: Path, held: Path, n_prompts: int, drafts: Sequence[str]) -> dict[str, Any]:
    """Temperatures 0 and 0.8 on prompts that lie evenly in the held-out text."""
    models, data = Models(weights, drafts), torch.from_numpy(unpack(held)).to(DEVICE)
    at = torch.arange(n_prompts, device=DEVICE) * (len(data) // n_prompts - N_PROMPT) + 1000
    prompts = data[at[:, None] + torch.arange(N_PROMPT, device=DEVICE)].long()
    torch.manual_seed(SEED)
    return {str(t): look(models, write_texts(models.target, [prompts], t, N_TOKENS, LOOKAHEAD)[0]) for t in (0.0, 0.8)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, required=True)
    p.add_argument("--held", type=Path, required=True)
    p.add_argument("--prompts", type=int, default=96)
    p.add_argument("--drafts", default="dflash,dflash2,mtp")
    args = p.parse_args(argv)
    for t, row in check(args.weights, args.held, args.prompts, args.drafts.split(",")).items():
        print(f"T {t}: {json.dumps(row)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
