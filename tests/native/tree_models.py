"""Tiny GGUF files with random weights: every architecture that draft trees have to work on, and one that they refuse.

The weights are scaled so that activations stay near one, and the decay of the delta net keeps tens of tokens alive:
a wrong state, window or mask changes the logits.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

HYBRID = ("qwen35", "qwen35moe", "qwen3next")
ATTENTION = ("qwen3", "gemma3")
NAMES = (*HYBRID, *ATTENTION, "mamba")
N_VOCAB = 320
WINDOW = 24  # of the sliding-window layers of gemma3

# name, shape in numpy order, and the function that draws the values; two-dimensional weights are stored as F16
Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Tensor: TypeAlias = tuple[str, tuple[int, ...], Draw]


def _weight(gain: float = 1.0) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        # Large matrices repeat their first rows: drawing is slower than writing.
        rows = rng.standard_normal((*shape[:-2], min(shape[-2], 4096), shape[-1]), dtype=np.float32)
        rows *= gain / np.sqrt(shape[-1])
        return np.tile(rows.astype(np.float16), (*[1] * (len(shape) - 2), -(-shape[-2] // 4096), 1))[..., : shape[-2], :]

    return draw


def _vector(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape).astype(np.float32)


_NORM = _vector(0.7, 1.3)


def _attention(p: str, n_embd: int, n_head: int, n_head_kv: int, head: int, *, gated: bool) -> Iterator[Tensor]:
    yield p + "attn_q.weight", (n_head * head * (2 if gated else 1), n_embd), _weight()
    yield p + "attn_k.weight", (n_head_kv * head, n_embd), _weight()
    yield p + "attn_v.weight", (n_head_kv * head, n_embd), _weight(1.5)
    yield p + "attn_output.weight", (n_embd, n_head * head), _weight(1.5)
    yield p + "attn_q_norm.weight", (head,), _vector(1.2, 2.2)  # sharp attention: single tokens matter
    yield p + "attn_k_norm.weight", (head,), _vector(1.2, 2.2)


def _delta_net(p: str, n_embd: int, n_k: int, n_v: int, head: int, *, fused_ba: bool) -> Iterator[Tensor]:
    channels = (2 * n_k + n_v) * head
    yield p + "attn_qkv.weight", (channels, n_embd), _weight()
    yield p + "attn_gate.weight", (n_v * head, n_embd), _weight()
    yield p + "ssm_conv1d.weight", (channels, 4), _vector(-1.0, 1.0)
    yield p + "ssm_dt.bias", (n_v,), _vector(-3.0, 0.0)
    yield p + "ssm_a", (n_v,), _vector(-1.0, -0.1)
    if fused_ba:
        yield p + "ssm_ba.weight", (2 * n_v, n_embd), _weight()
    else:
        yield p + "ssm_beta.weight", (n_v, n_embd), _weight()
        yield p + "ssm_alpha.weight", (n_v, n_embd), _weight()
    yield p + "ssm_norm.weight", (head,), _NORM
    yield p + "ssm_out.weight", (n_embd, n_v * head), _weight(1.5)


def _ffn(p: str, n_embd: int, n_ff: int) -> Iterator[Tensor]:
    yield p + "ffn_gate.weight", (n_ff, n_embd), _weight()
    yield p + "ffn_up.weight", (n_ff, n_embd), _weight()
    yield p + "ffn_down.weight", (n_embd, n_ff), _weight()


def _experts(p: str, n_embd: int, n_ff: int, n_expert: int) -> Iterator[Tensor]:
    yield p + "ffn_gate_inp.weight", (n_expert, n_embd), _weight()
    yield p + "ffn_gate_exps.weight", (n_expert, n_ff, n_embd), _weight()
    yield p + "ffn_up_exps.weight", (n_expert, n_ff, n_embd), _weight()
    yield p + "ffn_down_exps.weight", (n_expert, n_embd, n_ff), _weight()
    yield p + "ffn_gate_inp_shexp.weight", (n_embd,), _vector(-0.2, 0.2)
    yield p + "ffn_gate_shexp.weight", (n_ff, n_embd), _weight()
    yield p + "ffn_up_shexp.weight", (n_ff, n_embd), _weight()
    yield p + "ffn_down_shexp.weight", (n_embd, n_ff), _weight()


def _vocab(w: gguf.GGUFWriter, n_vocab: int) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in printable]
    chars = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(other))]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list(chars + [f"<t{i}>" for i in range(256, n_vocab)])
    w.add_token_types([1] * n_vocab)
    w.add_token_merges(["a b"])
    w.add_bos_token_id(n_vocab - 3)
    w.add_eos_token_id(n_vocab - 2)
    w.add_add_bos_token(False)


def _write(path: Path, w: gguf.GGUFWriter, tensors: list[Tensor], seed: int) -> None:
    """Tensors go to disk one by one, so that the size of a file is not bound by memory."""
    stored: list[tuple[Draw, tuple[int, ...], type]] = []
    for name, shape, draw in tensors:
        # Convolution kernels are F32: the op takes nothing else.
        half = len(shape) > 1 and "conv1d" not in name and not name.endswith(("ssm_a", "ssm_d"))
        kind: type = np.float16 if half else np.float32
        w.add_tensor_info(name, shape, np.dtype(kind), int(np.prod(shape)) * np.dtype(kind).itemsize, Q.F16 if half else Q.F32)
        stored.append((draw, shape, kind))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    rng = np.random.default_rng(seed)
    for draw, shape, kind in stored:
        w.write_tensor_data(np.ascontiguousarray(draw(rng, shape), dtype=kind))
    w.close()


def _common(
    w: gguf.GGUFWriter, n_layer: int, n_embd: int, n_ff: int, heads: tuple[int, int, int], n_vocab: int = N_VOCAB
) -> None:
    w.add_block_count(n_layer)
    w.add_context_length(8192)
    w.add_embedding_length(n_embd)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(heads[0])
    w.add_head_count_kv(heads[1])
    w.add_key_length(heads[2])
    w.add_value_length(heads[2])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(10000.0)
    _vocab(w, n_vocab)


def write_hybrid(
    path: Path,
    arch: str,
    *,
    n_layer: int = 4,
    n_embd: int = 64,
    n_ff: int = 96,
    heads: tuple[int, int, int] = (4, 2, 32),
    delta: tuple[int, int, int] = (2, 4, 32),
    n_rot: int = 16,
    interval: int = 2,
    n_vocab: int = N_VOCAB,
    tied: bool = False,
    seed: int = 1,
) -> None:
    """A model of gated delta net and attention layers.

    Args:
        path: the file.
        arch: one of HYBRID.
        heads: query heads, key/value heads, head size.
        delta: key heads, value heads, head size.
        interval: every how many layers one is full attention.
        tied: the output matrix is the embedding.
    """
    w = gguf.GGUFWriter(path, arch)
    _common(w, n_layer, n_embd, n_ff, heads, n_vocab)
    n_k, n_v, size = delta
    w.add_rope_dimension_count(n_rot)
    if arch != "qwen3next":
        w.add_rope_dimension_sections([n_rot // 2 - 2 * (n_rot // 6), n_rot // 6, n_rot // 6, 0])
    w.add_ssm_conv_kernel(4)
    w.add_ssm_inner_size(n_v * size)
    w.add_ssm_state_size(size)
    w.add_ssm_time_step_rank(n_v)
    w.add_ssm_group_count(n_k)
    w.add_uint32(f"{arch}.full_attention_interval", interval)
    n_expert = 0 if arch == "qwen35" else 4
    if n_expert:
        w.add_expert_count(n_expert)
        w.add_expert_used_count(2)
        w.add_expert_feed_forward_length(n_ff)
        w.add_expert_shared_feed_forward_length(n_ff)
    tensors: list[Tensor] = [
        ("token_embd.weight", (n_vocab, n_embd), _weight(8.0)),
        ("output_norm.weight", (n_embd,), _NORM),
    ]
    if not tied:
        tensors.append(("output.weight", (n_vocab, n_embd), _weight(2.0)))
    for i in range(n_layer):
        p = f"blk.{i}."
        tensors += [(p + "attn_norm.weight", (n_embd,), _NORM), (p + "post_attention_norm.weight", (n_embd,), _NORM)]
        if (i + 1) % interval == 0:
            tensors += _attention(p, n_embd, *heads, gated=True)
        else:
            tensors += _delta_net(p, n_embd, *delta, fused_ba=arch == "qwen3next")
        tensors += _experts(p, n_embd, n_ff, n_expert) if n_expert else _ffn(p, n_embd, n_ff)
    _write(path, w, tensors, seed)


def write_attention(path: Path, arch: str, *, n_layer: int = 4, n_embd: int = 64, n_ff: int = 96, seed: int = 2) -> None:
    """qwen3 (full attention) or gemma3 (a window of WINDOW tokens on every other layer)."""
    heads = (4, 2, 32)
    w = gguf.GGUFWriter(path, arch)
    _common(w, n_layer, n_embd, n_ff, heads)
    if arch == "gemma3":
        w.add_sliding_window(WINDOW)
        w.add_sliding_window_pattern([i % 2 == 0 for i in range(n_layer)])
    tensors: list[Tensor] = [
        ("token_embd.weight", (N_VOCAB, n_embd), _weight(1.0 if arch == "gemma3" else 8.0)),
        ("output_norm.weight", (n_embd,), _NORM),
        ("output.weight", (N_VOCAB, n_embd), _weight(2.0)),
    ]
    for i in range(n_layer):
        p = f"blk.{i}."
        tensors += [(p + "attn_norm.weight", (n_embd,), _NORM), (p + "ffn_norm.weight", (n_embd,), _NORM)]
        if arch == "gemma3":
            post = _vector(2.0, 4.0)
            tensors += [(p + "post_attention_norm.weight", (n_embd,), post), (p + "post_ffw_norm.weight", (n_embd,), post)]
        tensors += _attention(p, n_embd, *heads, gated=False)
        tensors += _ffn(p, n_embd, n_ff)
    _write(path, w, tensors, seed)


def write_mamba(path: Path, *, n_layer: int = 2, n_embd: int = 32, seed: int = 3) -> None:
    """A purely recurrent model, which cannot do draft trees."""
    inner, state, rank = 2 * n_embd, 8, 4
    w = gguf.GGUFWriter(path, "mamba")
    _common(w, n_layer, n_embd, 0, (1, 1, 32))
    w.add_ssm_conv_kernel(4)
    w.add_ssm_inner_size(inner)
    w.add_ssm_state_size(state)
    w.add_ssm_time_step_rank(rank)
    tensors: list[Tensor] = [
        ("token_embd.weight", (N_VOCAB, n_embd), _weight(4.0)),
        ("output_norm.weight", (n_embd,), _NORM),
    ]
    for i in range(n_layer):
        p = f"blk.{i}."
        tensors += [
            (p + "attn_norm.weight", (n_embd,), _NORM),
            (p + "ssm_in.weight", (2 * inner, n_embd), _weight()),
            (p + "ssm_conv1d.weight", (inner, 4), _vector(-1.0, 1.0)),
            (p + "ssm_conv1d.bias", (inner,), _vector(-0.1, 0.1)),
            (p + "ssm_x.weight", (rank + 2 * state, inner), _weight()),
            (p + "ssm_dt.weight", (inner, rank), _weight()),
            (p + "ssm_dt.bias", (inner,), _vector(-3.0, 0.0)),
            (p + "ssm_a", (inner, state), _vector(-1.0, -0.1)),
            (p + "ssm_d", (inner,), _vector(0.5, 1.5)),
            (p + "ssm_out.weight", (n_embd, inner), _weight()),
        ]
    _write(path, w, tensors, seed)


def write_08b(path: Path, *, n_layer: int = 24, n_vocab: int = 248320) -> None:
    """Random weights in the shape of Qwen3.5-0.8B, F16 (1.5 GB), for timing."""
    write_hybrid(
        path,
        "qwen35",
        n_layer=n_layer,
        n_embd=1024,
        n_ff=3584,
        heads=(8, 2, 256),
        delta=(16, 16, 128),
        n_rot=64,
        interval=4,
        n_vocab=n_vocab,
        tied=True,
    )


def write(folder: Path, name: str) -> Path:
    """Write the tiny model `name` into the folder and return its path."""
    out = folder / f"{name}.gguf"
    if name in HYBRID:
        # Other head sizes and counts in each, so that no shape is the only one seen.
        delta = {"qwen35": (2, 4, 32), "qwen35moe": (1, 4, 32), "qwen3next": (2, 6, 16)}[name]
        write_hybrid(out, name, delta=delta, n_layer=6 if name == "qwen35" else 4, seed=1 + HYBRID.index(name))
    elif name == "mamba":
        write_mamba(out)
    else:
        write_attention(out, name, seed=11 + ATTENTION.index(name))
    return out


@functools.cache
def path(name: str) -> str:
    """The file of a tiny model, written once in a test run; "trained" is the embedded target."""
    if name == "trained":
        return str(Path(__file__).parents[2] / "llama_dflash" / "models" / "tiny-target.gguf")
    return str(write(_folder(), name))


@functools.cache
def _folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="tree-models-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a random model in the shape of Qwen3.5-0.8B.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    write_08b(args.path, n_layer=args.layers)
