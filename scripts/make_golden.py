#!/usr/bin/env python3
"""Compute the golden vectors of the tiny pair in PyTorch: float32, CPU, from the weights that the GGUF files export.

    make_golden.py --pair DIR [--out tests/golden/tiny_pair.npz]

DIR is the prototype pair: model.py, common.py, tokenizer.json and w/{target,draft}*. Needs torch, safetensors
and tokenizers; the tests that read the result (tests/native/test_golden.py) need numpy only.

For every prompt P of PROMPTS, tokens first, logits as float16:
    P_ids           [n + 1]            context of n tokens, then the anchor
    P_logits        [rows, n_vocab]    target logits of the context tokens P_rows
    P_top1          [n]                argmax of the target's logits at every context token
    P_taps          [n, taps, n_embd]  inputs of the tapped layers, in the draft's order
    P_block_logits  [b, n_vocab]       draft logits of the block [anchor, MASK x (b - 1)], b = block_size
    P_block_top1    [b]                their argmax
For the prompt `short` also the same for a block of 8 (short_block8_*), for `middle` the inputs of all layers and
the last layer's output (middle_layers, [n, n_layer + 1, n_embd]), so that a tap on a neighbouring layer shows.
`meta` is a JSON string: mask id, tapped layers, versions, sha256 of every file that went in.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHORT_BLOCK = 8  # the block of n_max 7: a draft sees fewer masks then, and answers differently
# name, number of context tokens, target rows kept (None: all), text; the token after the context is the anchor
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


@dataclasses.dataclass(frozen=True)
class Pair:
    """The PyTorch models and the module that defines them."""

    module: ModuleType
    target: Any
    draft: Any


def load_pair(folder: Path) -> Pair:
    """Load target and draft in float32 on the CPU."""
    sys.path.insert(0, str(folder))
    model, common = importlib.import_module("model"), importlib.import_module("common")
    target = common.load_model(model.Target, model.TargetConfig, str(folder / "w" / "target"))
    draft = common.load_model(model.Draft, model.DraftConfig, str(folder / "w" / "draft"))
    return Pair(model, target.eval(), draft.eval())


def prompt_ids(tokenizer: Tokenizer, text: str, n_context: int) -> list[int]:
    """The first `n_context + 1` ids of a text."""
    ids: list[int] = tokenizer.encode(text).ids[: n_context + 1]
    if len(ids) <= n_context:
        raise SystemExit(f"make_golden: the text has {len(ids)} tokens, {n_context + 1} are needed: {text[:40]!r}")
    return ids


def run_target(pair: Pair, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, n_vocab]` and layer inputs `[n, n_layer + 1, n_embd]`, the last being the last layer's output."""
    outputs: list[torch.Tensor] = []
    hook = pair.target.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    hidden, inputs = pair.target(context, taps=range(pair.target.c.n_layer))
    hook.remove()
    return pair.target.head(hidden)[0], torch.stack([*inputs, outputs[0]], 2)[0]


def run_draft(pair: Pair, ids: torch.Tensor, layers: torch.Tensor, block_size: int) -> torch.Tensor:
    """Draft logits `[block_size, n_vocab]` of one block behind the context `ids[:, :-1]`."""
    n_context = ids.shape[1] - 1
    draft, trained = pair.draft, pair.draft.c
    draft.c = dataclasses.replace(trained, block_size=block_size)
    anchors = torch.tensor([n_context])
    features = layers[:, list(trained.target_layers)].flatten(1)[None]
    block = pair.target.embed(pair.module.block_tokens(ids, anchors, draft.c))
    hidden = draft(block, features, anchors, draft.block_mask(anchors, n_context))
    draft.c = trained
    logits: torch.Tensor = pair.target.head(hidden)[0]
    return logits


def half(x: torch.Tensor) -> np.ndarray:
    """Float16 halves the file; its rounding costs about 1e-7 of cosine."""
    return x.numpy().astype(np.float16)


def top1(logits: torch.Tensor) -> np.ndarray:
    """Argmax of every row, taken before the rounding to float16."""
    return logits.argmax(-1).numpy().astype(np.int32)


def golden(pair: Pair, name: str, ids: list[int], rows: Sequence[int] | None) -> dict[str, np.ndarray]:
    """Arrays of one prompt."""
    tokens = torch.tensor([ids])
    logits, layers = run_target(pair, tokens[:, :-1])
    kept = list(rows) if rows is not None else list(range(len(ids) - 1))
    block = run_draft(pair, tokens, layers, pair.draft.c.block_size)
    arrays = {
        "ids": np.array(ids, np.int32),
        "rows": np.array(kept, np.int32),
        "logits": half(logits[kept]),
        "top1": top1(logits),
        "taps": half(layers[:, list(pair.draft.c.target_layers)]),
        "block_logits": half(block),
        "block_top1": top1(block),
    }
    if name == "short":
        block8 = run_draft(pair, tokens, layers, SHORT_BLOCK)
        arrays |= {"block8_logits": half(block8), "block8_top1": top1(block8)}
    if name == "middle":
        arrays["layers"] = half(layers)
    return {f"{name}_{key}": value for key, value in arrays.items()}


def provenance(folder: Path) -> dict[str, str]:
    """sha256 of the weights, the definitions and the exported GGUF files."""
    weights = [p for stem in ("target", "draft") for p in sorted((folder / "w").glob(f"{stem}[-.]*"))]
    files = [folder / "model.py", folder / "common.py", folder / "tokenizer.json", *weights]
    files += [ROOT / "llama_dflash" / "models" / f"tiny-{stem}.gguf" for stem in ("target", "draft")]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the npz and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder of the prototype pair")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "golden" / "tiny_pair.npz")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed order of additions
    torch.use_deterministic_algorithms(True)
    pair = load_pair(args.pair.resolve())
    tokenizer = Tokenizer.from_file(str(args.pair / "tokenizer.json"))
    arrays: dict[str, Any] = {}
    with torch.inference_mode():
        for name, n_context, rows, text in PROMPTS:
            arrays |= golden(pair, name, prompt_ids(tokenizer, text, n_context), rows)
    meta = {
        "mask_id": pair.draft.c.mask_id,
        "target_layers": list(pair.draft.c.target_layers),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "dtype": "float32 on the CPU, stored as float16",
        "sha256": provenance(args.pair),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, meta=np.array(json.dumps(meta, sort_keys=True)), **arrays)
    for key, value in arrays.items():
        print(f"{key:20} {value.dtype!s:8} {list(value.shape)}")
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
