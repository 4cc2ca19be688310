#!/usr/bin/env python3
"""Golden vectors of the trained files: float32 on the CPU, from the weights that the GGUF files export.

    python -m train_tiny.golden --weights DIR --tokenizer FILE --models DIR --out tiny_pair.npz

For every prompt P of PROMPTS, logits as float16; the last token is the anchor, the n before it the context:
    P_ids           [n + 1]            tokens
    P_logits        [rows, n_vocab]    target logits of the context tokens P_rows
    P_top1          [n]                argmax of the target's logits at every context token
    P_taps          [n, taps, n_embd]  inputs of the tapped layers, in the drafts' order
    P_block_logits  [b, n_vocab]       DFlash logits of the block [anchor, MASK x (b - 1)]
    P_block_top1    [b]                their argmax
    P_dflash2       [b - 1]            chain of the DFlash2 draft, when there is one
    P_mtp           [4]                chain of the MTP head, when there is one; context and anchor as confirmed text
    P_greedy        [48]               the target's greedy text behind the anchor
    P_D_accepted    [rounds]           drafts accepted in every round of that text by D = dflash, dflash2 (n_max 15) and mtp (n_max 3)
For `short` also the same for a block of 8 (short_block8_*), for `middle` the inputs of all layers and the last layer's
output (middle_layers). `meta` is a JSON string: mask id, tapped layers, versions, sha256 of every file that went in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from train_tiny.draft import Draft, block_ids
from train_tiny.grow import TreeShape, held_by_budget
from train_tiny.record import Models, features_of_texts, record_draft, record_mtp, write_texts
from train_tiny.trees import play, room

SHORT_BLOCK = 8  # the block of n_max 7: a draft sees fewer masks then, and answers differently
MTP_STEPS = 4
GREEDY_TOKENS = 48
PROMPTS: tuple[tuple[str, int, tuple[int, ...] | None, str], ...] = (
    ("short", 5, None, "def add(a, b):\n    return a + b\n"),
    ("middle", 33, (0, 8, 16, 24, 31, 32), '''\
class Stack:
    """A last-in, first-out list."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
'''),
    ("long", 96, (0, 31, 32, 63, 64, 95), '''\
import csv
from pathlib import Path


def read_rows(path, delimiter=","):
    """Return the rows of a CSV file as dictionaries."""
    rows = []
    with Path(path).open(newline="") as f:
        for row in csv.DictReader(f, delimiter=delimiter):
            if not any(row.values()):
                continue
            rows.append({key.strip(): value.strip() for key, value in row.items()})
    return rows


def column(rows, name, default=None):
    return [row.get(name, default) for row in rows]
'''),
)  # fmt: skip


def half(x: Tensor) -> np.ndarray:
    """Float16 halves the file; its rounding costs about 1e-7 of cosine."""
    return x.numpy().astype(np.float16)


def top1(logits: Tensor) -> np.ndarray:
    """Argmax of every row, taken before the rounding to float16."""
    return logits.argmax(-1).numpy().astype(np.int32)


def block_hidden(models: Models, draft: Draft, ids: Tensor, layers: Tensor, size: int) -> Tensor:
    """Draft hidden states `[size, n_embd]` of one block behind the context `ids[:, :-1]`."""
    anchors = torch.tensor([[ids.shape[1] - 1]])
    features = layers[:, list(draft.c.target_layers)].flatten(1)[None]
    block = models.target.embed(block_ids(ids, anchors, size, draft.c.mask_id))
    out: Tensor = draft(block, features, anchors)[0, 0]
    return out


def selector_chain(models: Models, draft: Draft, hidden: Tensor, anchor: int) -> list[int]:
    """Greedy walk through the selector's lattice, `[b - 1]`."""
    selector, before, out = draft.selector, anchor, []
    assert selector is not None
    for h in hidden[1:]:
        values, ids = models.target.head(h).topk(draft.c.selector_top_k)
        scores = values + selector.next[ids] @ selector.condition(h, torch.tensor(before))
        before = int(ids[scores.argmax()])
        out.append(before)
    return out


def mtp_chain(models: Models, ids: Tensor) -> list[int]:
    """Chain of the MTP head behind the anchor, each step fed with the token drafted before, `[MTP_STEPS]`."""
    assert models.mtp is not None
    text, n_confirmed, out = ids, ids.shape[1], []
    for step in range(MTP_STEPS):
        confirmed, _ = models.target(text[:, :n_confirmed])
        # positions behind the anchor have no target state; unroll never reads it there
        hidden = torch.cat([confirmed, confirmed.new_zeros(1, step, confirmed.shape[-1])], 1)
        h = models.mtp.unroll(models.target.embed(text), hidden, step + 1)[step]
        out.append(int(models.target.head(h[0, -1]).argmax()))
        text = torch.cat([text, torch.tensor([[out[-1]]])], 1)
    return out


def played(models: Models, ids: Tensor) -> dict[str, np.ndarray]:
    """Greedy text behind `ids` `[1, n + 1]` and what chains accept in its rounds."""
    texts = write_texts(models.target, [ids], 0.0, GREEDY_TOKENS, models.drafts["dflash"].c.block_size)[0]
    arrays = {"greedy": texts.ids[0, texts.n_prompt :][:GREEDY_TOKENS].numpy().astype(np.int32)}
    for name, draft in models.drafts.items():
        features = features_of_texts(models.target, texts, draft.c.target_layers)
        record, n_slots = record_draft(models.target, draft, texts, draft.c.block_size, features), draft.c.block_size - 1
        depth = torch.from_numpy(room(GREEDY_TOKENS, n_slots))
        held = held_by_budget(record.pair or record.single, TreeShape(1), depth, n_slots)[:, -1].numpy()
        arrays[f"{name}_accepted"] = np.array(play(held[None])[0], np.int32)
    if models.mtp is not None:
        n_slots = MTP_STEPS - 1
        held = np.minimum(record_mtp(models.target, models.mtp, texts, n_slots).numpy(), room(GREEDY_TOKENS, n_slots))
        arrays["mtp_accepted"] = np.array(play(held)[0], np.int32)
    return arrays


def golden(models: Models, name: str, ids: list[int], rows: Sequence[int] | None) -> dict[str, np.ndarray]:
    """Arrays of one prompt."""
    tokens, target, draft = torch.tensor([ids]), models.target, models.drafts["dflash"]
    last: list[Tensor] = []
    hook = target.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    hidden, inputs = target(tokens[:, :-1], taps=range(target.c.n_layer))
    hook.remove()
    logits, layers = target.head(hidden)[0], torch.stack([*inputs, last[0]], 2)[0]
    kept = list(rows) if rows is not None else list(range(len(ids) - 1))
    block = target.head(block_hidden(models, draft, tokens, layers, draft.c.block_size))
    arrays = {
        "ids": np.array(ids, np.int32),
        "rows": np.array(kept, np.int32),
        "logits": half(logits[kept]),
        "top1": top1(logits),
        "taps": half(layers[:, list(draft.c.target_layers)]),
        "block_logits": half(block),
        "block_top1": top1(block),
    }
    if "dflash2" in models.drafts:
        second = models.drafts["dflash2"]
        chain = selector_chain(models, second, block_hidden(models, second, tokens, layers, second.c.block_size), ids[-1])
        arrays["dflash2"] = np.array(chain, np.int32)
    if models.mtp is not None:
        arrays["mtp"] = np.array(mtp_chain(models, tokens), np.int32)
    arrays |= played(models, tokens)
    if name == "short":
        block8 = target.head(block_hidden(models, draft, tokens, layers, SHORT_BLOCK))
        arrays |= {"block8_logits": half(block8), "block8_top1": top1(block8)}
    if name == "middle":
        arrays["layers"] = half(layers)
    return {f"{name}_{key}": value for key, value in arrays.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the npz and print what is in it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path, required=True)
    p.add_argument("--models", type=Path, required=True, help="folder of the exported GGUF files")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args(argv)
    torch.set_num_threads(1)  # a fixed order of additions
    torch.use_deterministic_algorithms(True)
    models = Models(args.weights, ("dflash", "dflash2", "mtp"))
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    arrays: dict[str, Any] = {}
    with torch.inference_mode():
        for name, n_context, rows, text in PROMPTS:
            ids = tokenizer.encode(text).ids[: n_context + 1]
            if len(ids) <= n_context:
                raise SystemExit(f"golden: {name} has {len(ids)} tokens, {n_context + 1} are needed")
            arrays |= golden(models, name, ids, rows)
    files = [*sorted(args.weights.glob("*.safetensors")), args.tokenizer, *sorted(args.models.glob("*.gguf"))]
    meta = {
        "mask_id": models.drafts["dflash"].c.mask_id,
        "target_layers": list(models.drafts["dflash"].c.target_layers),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32 on the CPU, stored as float16",
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    np.savez_compressed(args.out, meta=np.array(json.dumps(meta, sort_keys=True)), **arrays)
    print(f"{args.out}: {args.out.stat().st_size} bytes, {len(arrays)} arrays")
    return 0


if __name__ == "__main__":
    sys.exit(main())
