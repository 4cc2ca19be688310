"""Tensors of a draft as pinned llama.cpp loads them (src/models/dflash.cpp), and how lists of them are told."""

from __future__ import annotations

from collections.abc import Iterable

TOP = ("fc.weight", "enc.output_norm.weight", "output_norm.weight")
_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
_FEED_FORWARD = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
LAYER = tuple(f"{name}.weight" for name in (*_ATTENTION, *_FEED_FORWARD))
DFLASH2_TOP = ("selector_hidden.weight", "selector_predecessor.weight", "selector_successor.weight")
DFLASH2_LAYER = ("attn_conv_base", "attn_conv_proj.weight", "ffn_conv_base", "ffn_conv_proj.weight")
# A draft may bring its own embedding and head; else it shares the target's.
OPTIONAL = ("token_embd.weight", "output.weight")
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def required(n_layer: int, is_dflash2: bool) -> set[str]:
    """Tensors that a draft of `n_layer` layers must have."""
    top = {*TOP, *(DFLASH2_TOP if is_dflash2 else ())}
    layer = {*LAYER, *(DFLASH2_LAYER if is_dflash2 else ())}
    return top | {f"blk.{i}.{name}" for i in range(n_layer) for name in layer}


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names in one line, the first `most` of them."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def problems(claimed: dict[str, str], n_layer: int, is_dflash2: bool) -> list[str]:
    """Why these tensors do not make a draft; empty when they do.

    Args:
        claimed: name in the source to name in the GGUF file, empty where nothing takes the tensor.
        n_layer: layers of the draft.
        is_dflash2: whether the draft has a selector and convolutions.
    """
    need = required(n_layer, is_dflash2)
    known = need | set(OPTIONAL)
    by_name: dict[str, list[str]] = {}
    for source, name in claimed.items():
        by_name.setdefault(name, []).append(source)
    unclaimed = [source for source, name in claimed.items() if name not in known]
    out = []
    if unclaimed:
        out.append(f"unclaimed tensors: {listed(unclaimed)}")
    if missing := need - by_name.keys():
        out.append(f"missing tensors: {listed(missing)}")
    out += [f"{' and '.join(sorted(v))} are both {k}" for k, v in sorted(by_name.items()) if k in known and len(v) > 1]
    return out
