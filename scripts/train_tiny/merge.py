#!/usr/bin/env python3
"""Take the mean of two saved targets' weights: as much of a refinement as is wanted, without training again.

    python -m train_tiny.merge --first PREFIX --second PREFIX --share 0.45 --corpus DIR --out PREFIX

The second must have been trained on from the first (Wortsman et al., 2022, arXiv:2109.01903, do this for fine-tuned models).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from train_tiny.corpus import unpack
from train_tiny.record import write_texts
from train_tiny.refine_target import held_out
from train_tiny.target import Target, TargetConfig
from train_tiny.training import DEVICE, load_model, load_weights, save_model
from train_tiny.trees import repetition_rate

N_PROMPT, N_TOKENS = 128, 128


def mean(first: Path, second: Path, share: float) -> Target:
    """`share` of the second and the rest of the first."""
    model = load_model(Target, TargetConfig, first).eval().requires_grad_(False)
    other = load_weights(second)[1]
    model.load_state_dict({k: torch.lerp(v, other[k].float().to(v.device), share) for k, v in model.state_dict().items()})
    return model


def greedy_repetition(model: Target, data: torch.Tensor, n_prompts: int) -> float:
    """Repetition rate of greedy text behind evenly spread held-out prompts."""
    at = torch.arange(n_prompts, device=DEVICE) * (len(data) // n_prompts - N_PROMPT) + 1000
    prompts = data[at[:, None] + torch.arange(N_PROMPT, device=DEVICE)].long()
    texts = write_texts(model, [prompts], 0.0, N_TOKENS, 0)[0]
    rates = [repetition_rate(t) for t in texts.ids[:, N_PROMPT:].tolist()]
    return round(sum(rates) / len(rates), 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Merge, and say what the three models are like."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--first", type=Path, required=True)
    p.add_argument("--second", type=Path, required=True)
    p.add_argument("--share", type=float, default=0.45)
    p.add_argument("--corpus", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--prompts", type=int, default=96)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--seq", type=int, default=2048)
    args = p.parse_args(argv)
    data = torch.from_numpy(unpack(args.corpus / "held.xz")).to(DEVICE)
    facts: dict[str, Any] = {"share": args.share}
    for name, share in (("first", 0.0), ("second", 1.0), ("merged", args.share)):
        model = mean(args.first, args.second, share)
        facts[name] = {
            "held_out_nats": {
                str(seq): held_out(model, data, seq, args.batch * args.seq // seq, 16) for seq in (args.seq, args.seq // 4)
            },
            "greedy_repetition": greedy_repetition(model, data, args.prompts),
        }
        print(name, share, facts[name], flush=True)
    save_model(model, args.out, model.c)
    Path(f"{args.out}.facts.json").write_text(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
