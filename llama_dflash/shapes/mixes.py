"""Which type each tensor gets in a quantised file: the part of llama.cpp's src/llama-quant.cpp that these shapes meet."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llama_dflash.errors import UsageError


@dataclass(frozen=True)
class Block:
    """A storage type: values and bytes of one block, and the type that takes over where a row is no multiple of it."""

    n_values: int
    n_bytes: int
    fallback: str = "F16"


BLOCKS = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q4_K": Block(256, 144, "Q5_0"),
    "Q5_K": Block(256, 176, "Q5_1"),
    "Q6_K": Block(256, 210, "Q8_0"),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
}


@dataclass(frozen=True)
class Mix:
    """A file type: its number in `general.file_type`, its base type, and the type of what gets more bits (K_M mixes)."""

    file_type: int
    base: str
    more: str
    output: str


MIXES = {
    "f16": Mix(1, "F16", "F16", "F16"),
    "q8_0": Mix(7, "Q8_0", "Q8_0", "Q8_0"),
    "q4_k_m": Mix(15, "Q4_K", "Q6_K", "Q6_K"),
    "q5_k_m": Mix(17, "Q5_K", "Q6_K", "Q6_K"),
    "q6_k": Mix(18, "Q6_K", "Q6_K", "Q6_K"),
}
_MORE_BITS = re.compile(r"blk\.\d+\.(attn_qkv|attn_v|ffn_down\w*)\.weight")
_UNQUANTISED = re.compile(r".*(_norm\.weight|ffn_gate_inp\.weight|ssm_conv1d\.weight)")


def n_bytes(kind: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of type `kind`; its shape in GGUF order."""
    block = BLOCKS[kind]
    return math.prod(shape) // block.n_values * block.n_bytes


def find_mix(quant: str) -> Mix:
    """The mix `quant`, such as `q4_k_m`; raises UsageError if there is none."""
    if quant.lower() not in MIXES:
        raise UsageError(f"quant {quant!r} is unknown", f"expected one of {', '.join(MIXES)}")
    return MIXES[quant.lower()]


def _use_more_bits(layer: int, n_layer: int) -> bool:
    return layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2


def tensor_type(mix: Mix, name: str, shape: Sequence[int], n_layer: int, tied: bool) -> str:
    """Type of a tensor in a file of this mix.

    Args:
        mix: the file's mix.
        name: such as `blk.3.ffn_down.weight`.
        shape: GGUF order, the row first.
        n_layer: layers of the model.
        tied: the model has no output matrix of its own, so that its embedding is stored like one.
    """
    if len(shape) < 2 or not name.endswith("weight") or _UNQUANTISED.fullmatch(name):
        return "F32"
    kind = mix.base
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        kind = mix.output if shape[0] % BLOCKS[mix.base].n_values == 0 else "Q8_0"
    elif _MORE_BITS.fullmatch(name) and _use_more_bits(int(name.split(".")[1]), n_layer):
        # One such tensor of each kind stands in every layer, so that llama.cpp's counters are the layer.
        kind = mix.more
    for _ in range(2):
        if shape[0] % BLOCKS[kind].n_values:
            kind = BLOCKS[kind].fallback
    return kind
