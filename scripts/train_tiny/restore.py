#!/usr/bin/env python3
"""Get weights and tokenizer back from the GGUF files, for simulating and for golden vectors without a training.

    python -m train_tiny.restore --models ../llama_dflash/models --out DIR

The inverse of export.py: matrices are float16 on both sides, so nothing is lost but the last digits of A_log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models

from train_tiny.corpus import SPECIALS, dress
from train_tiny.draft import Draft, DraftConfig
from train_tiny.export import draft_name, mtp_name, target_name
from train_tiny.mtp import MtpHead
from train_tiny.target import Target, TargetConfig
from train_tiny.training import save_model


def field(reader: Any, key: str) -> Any:
    """Value of a metadata key, None if it is absent."""
    found = reader.get_field(key)
    return None if found is None else found.contents()


def take(model: torch.nn.Module, reader: Any, name_of: Callable[[str], str]) -> None:
    """Load a model's tensors by the names that export gave them."""
    known = {t.name: t for t in reader.tensors}
    state = {}
    for name, value in model.state_dict().items():
        tensor = known[name_of(name)]
        array = np.array(tensor.data, np.float32).reshape(tuple(value.shape))
        state[name] = torch.from_numpy(np.log(-array) if name.endswith("A_log") else array)
    model.load_state_dict(state)


def tokenizer(reader: Any) -> Tokenizer:
    """The tokenizer that corpus.py learnt."""
    tokens, merges = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.merges")
    vocab = {token: i for i, token in enumerate(tokens[: -len(SPECIALS)])}
    tok = dress(Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in merges])))
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tok


def main(argv: Sequence[str] | None = None) -> int:
    """Restore everything that is there."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(args.models / "tiny-target.gguf")
    tokenizer(reader).save(str(args.out / "tokenizer.json"))
    config = TargetConfig(n_ff=field(reader, "qwen35.feed_forward_length"))
    shape = {"n_layer": config.n_layer, "full_attn_interval": config.full_attn_interval}
    target, head = Target(config), MtpHead(config)
    take(target, reader, lambda name: target_name(name, shape))
    save_model(target, args.out / "target", config)
    take(head, reader, lambda name: mtp_name(name, shape))
    save_model(head, args.out / "mtp", config)
    for name, file in (("dflash", "tiny-draft.gguf"), ("dflash2", "tiny-draft2.gguf")):
        reader = gguf.GGUFReader(args.models / file)
        draft = DraftConfig(
            n_layer=field(reader, "dflash.block_count"),
            n_ff=field(reader, "dflash.feed_forward_length"),
            selector_top_k=field(reader, "dflash.selector_top_k") or 0,
        )
        model = Draft(draft)
        take(model, reader, draft_name)
        save_model(model, args.out / name, draft)
    return 0


if __name__ == "__main__":
    sys.exit(main())
