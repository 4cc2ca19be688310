"""Metadata and tensors of a GGUF file of a shape, before a byte of it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llama_dflash import gguf
from llama_dflash.shapes import DraftShape, TargetShape, mixes

RMS_EPS = 1e-6
ROPE_BASE = 1e7
# mrope_section of Qwen3.5, half of the quarter of a head that is rotated.
ROPE_SECTIONS = (11, 11, 10)


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written.

    Attributes:
        shape: GGUF order, the row first.
        kind: storage type, a key of `mixes.BLOCKS`.
        gain: standard deviation of a product with values of deviation 1; for vectors and kernels the bounds are in `bounds`.
        bounds: uniform values in these bounds instead, always F32.
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "F32"
    gain: float = 1.0
    bounds: tuple[float, float] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes in the file, padding left out."""
        return mixes.n_bytes(self.kind, self.shape)


@dataclass(frozen=True)
class Layout:
    """A whole file: architecture, metadata (keys of the architecture without it) and tensors in file order."""

    name: str
    arch: str
    keys: dict[str, Any]
    tensors: tuple[Tensor, ...]
    n_vocab: int
    quant: str

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.n_bytes for t in self.tensors)

    @property
    def n_params(self) -> int:
        """Number of weights."""
        total = 0
        for t in self.tensors:
            n = 1
            for size in t.shape:
                n *= size
            total += n
        return total

    @property
    def facts(self) -> gguf.ModelFacts:
        """What the header of the file would say; there is no file, and no vocabulary in it."""
        by_kind = Counter({t.kind: 0 for t in self.tensors})
        for t in self.tensors:
            by_kind[t.kind] += t.n_bytes
        fields = {"general.architecture": self.arch, "general.name": self.name}
        fields |= {key if "." in key and key.split(".")[0] in ("tokenizer", "general") else f"{self.arch}.{key}": value
                   for key, value in self.keys.items()}  # fmt: skip
        shapes = {t.name: t.shape for t in self.tensors}
        return gguf.ModelFacts(Path(self.name), self.n_bytes, fields, shapes, by_kind.most_common(1)[0][0], ())


_NORM = (0.7, 1.3)
# Sharp attention: single tokens matter.
_SHARP = (1.2, 2.2)


def _vector(name: str, n: int, bounds: tuple[float, float] = _NORM) -> Tensor:
    return Tensor(name, (n,), bounds=bounds)


def _attention(p: str, shape: TargetShape | DraftShape, gated: bool) -> Iterator[Tensor]:
    a, n_embd = shape.attention, shape.n_embd
    yield Tensor(p + "attn_q.weight", (n_embd, a.n_head * a.head_size * (2 if gated else 1)))
    yield Tensor(p + "attn_k.weight", (n_embd, a.n_head_kv * a.head_size))
    yield Tensor(p + "attn_v.weight", (n_embd, a.n_head_kv * a.head_size), gain=1.5)
    yield Tensor(p + "attn_output.weight", (a.n_head * a.head_size, n_embd), gain=1.5)
    yield _vector(p + "attn_q_norm.weight", a.head_size, _SHARP)
    yield _vector(p + "attn_k_norm.weight", a.head_size, _SHARP)


def _delta_net(p: str, shape: TargetShape) -> Iterator[Tensor]:
    d, n_embd = shape.delta, shape.n_embd
    n_inner = d.n_head_v * d.head_size
    channels = 2 * d.n_head_k * d.head_size + n_inner
    yield Tensor(p + "attn_qkv.weight", (n_embd, channels))
    yield Tensor(p + "attn_gate.weight", (n_embd, n_inner))
    yield Tensor(p + "ssm_conv1d.weight", (d.conv_kernel, channels), bounds=(-1.0, 1.0))
    yield _vector(p + "ssm_dt.bias", d.n_head_v, (-3.0, 0.0))
    yield _vector(p + "ssm_a", d.n_head_v, (-1.0, -0.1))
    yield Tensor(p + "ssm_beta.weight", (n_embd, d.n_head_v))
    yield Tensor(p + "ssm_alpha.weight", (n_embd, d.n_head_v))
    yield _vector(p + "ssm_norm.weight", d.head_size)
    yield Tensor(p + "ssm_out.weight", (n_inner, n_embd), gain=1.5)


def _ffn(p: str, n_embd: int, n_ff: int) -> Iterator[Tensor]:
    yield Tensor(p + "ffn_gate.weight", (n_embd, n_ff))
    yield Tensor(p + "ffn_up.weight", (n_embd, n_ff))
    yield Tensor(p + "ffn_down.weight", (n_ff, n_embd))


def _experts(p: str, shape: TargetShape) -> Iterator[Tensor]:
    e, n_embd = shape.experts, shape.n_embd
    assert e is not None
    yield Tensor(p + "ffn_gate_inp.weight", (n_embd, e.n_expert))
    yield Tensor(p + "ffn_gate_exps.weight", (n_embd, e.n_ff, e.n_expert))
    yield Tensor(p + "ffn_up_exps.weight", (n_embd, e.n_ff, e.n_expert))
    yield Tensor(p + "ffn_down_exps.weight", (e.n_ff, n_embd, e.n_expert))
    yield _vector(p + "ffn_gate_inp_shexp.weight", n_embd, (-0.2, 0.2))
    yield Tensor(p + "ffn_gate_shexp.weight", (n_embd, e.n_ff_shared))
    yield Tensor(p + "ffn_up_shexp.weight", (n_embd, e.n_ff_shared))
    yield Tensor(p + "ffn_down_shexp.weight", (e.n_ff_shared, n_embd))


def _target_tensors(shape: TargetShape) -> Iterator[Tensor]:
    n_embd = shape.n_embd
    yield Tensor("token_embd.weight", (n_embd, shape.n_vocab), gain=2.0 if shape.tied else 8.0)
    if not shape.tied:
        yield Tensor("output.weight", (n_embd, shape.n_vocab), gain=2.0)
    yield _vector("output_norm.weight", n_embd)
    for i in range(shape.n_layer):
        p = f"blk.{i}."
        yield _vector(p + "attn_norm.weight", n_embd)
        yield _vector(p + "post_attention_norm.weight", n_embd)
        yield from _delta_net(p, shape) if shape.is_recurrent(i) else _attention(p, shape, gated=True)
        yield from _experts(p, shape) if shape.experts else _ffn(p, n_embd, shape.n_ff)


def _draft_tensors(shape: DraftShape) -> Iterator[Tensor]:
    n_embd, s = shape.n_embd, shape.selector
    yield Tensor("fc.weight", (len(shape.target_layers) * n_embd, n_embd))
    yield _vector("enc.output_norm.weight", n_embd)
    yield _vector("output_norm.weight", n_embd)
    for i in range(shape.n_layer):
        p = f"blk.{i}."
        yield _vector(p + "attn_norm.weight", n_embd)
        yield _vector(p + "ffn_norm.weight", n_embd)
        yield from _attention(p, shape, gated=False)
        yield from _ffn(p, n_embd, shape.n_ff)
        if s:
            for part in ("attn", "ffn"):
                yield Tensor(f"{p}{part}_conv_base", (n_embd, s.conv_kernel, 2), bounds=(-0.5, 0.5))
                yield Tensor(f"{p}{part}_conv_proj.weight", (n_embd, 2 * s.conv_kernel * (n_embd // s.conv_group)), gain=0.1)
    if s:
        yield Tensor("selector_predecessor.weight", (s.rank, shape.n_vocab))
        yield Tensor("selector_successor.weight", (s.rank, shape.n_vocab))
        yield Tensor("selector_hidden.weight", (n_embd, s.rank))


def _keys(shape: TargetShape | DraftShape, file_type: int) -> dict[str, Any]:
    a = shape.attention
    return {
        "general.file_type": file_type,
        "general.quantization_version": 2,
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "vocab_size": shape.n_vocab,
        "attention.head_count": a.n_head,
        "attention.head_count_kv": a.n_head_kv,
        "attention.key_length": a.head_size,
        "attention.value_length": a.head_size,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "rope.freq_base": ROPE_BASE,
    }


def _target_keys(shape: TargetShape) -> dict[str, Any]:
    d, n_rot = shape.delta, shape.attention.head_size // 4
    third = n_rot // 6
    out: dict[str, Any] = {
        "rope.dimension_count": n_rot,
        "rope.dimension_sections": [*ROPE_SECTIONS, 0] if n_rot == 64 else [n_rot // 2 - 2 * third, third, third, 0],
        "ssm.conv_kernel": d.conv_kernel,
        "ssm.inner_size": d.n_head_v * d.head_size,
        "ssm.state_size": d.head_size,
        "ssm.time_step_rank": d.n_head_v,
        "ssm.group_count": d.n_head_k,
        "full_attention_interval": shape.interval,
    }
    if e := shape.experts:
        out |= {"expert_count": e.n_expert, "expert_used_count": e.n_used, "expert_feed_forward_length": e.n_ff,
                "expert_shared_feed_forward_length": e.n_ff_shared}  # fmt: skip
    return out


def _draft_keys(shape: DraftShape) -> dict[str, Any]:
    head = shape.attention.head_size
    out: dict[str, Any] = {
        "tokenizer.ggml.mask_token_id": shape.mask_token_id,
        "rope.dimension_count": head,
        "rope.dimension_sections": [head // 2, 0, 0, 0],
        "block_size": shape.block_size,
        "target_layers": list(shape.target_layers),
    }
    if shape.window:
        out |= {"attention.sliding_window": shape.window, "attention.sliding_window_pattern": [True] * shape.n_layer}
        out["attention.causal"] = False
    if s := shape.selector:
        out |= {
            "conv_kernel_size": s.conv_kernel,
            "conv_group_size": s.conv_group,
            "selector_rank": s.rank,
            "selector_top_k": s.top_k,
        }
    return out


def of(shape: TargetShape | DraftShape, quant: str) -> Layout:
    """The file of a shape in a mix.

    Args:
        shape: a target or a draft.
        quant: a key of `mixes.MIXES`.

    Raises:
        UsageError: no such mix.
    """
    mix = mixes.find_mix(quant)
    if isinstance(shape, TargetShape):
        tensors, keys, tied = list(_target_tensors(shape)), _target_keys(shape), shape.tied
    else:
        tensors, keys, tied = list(_draft_tensors(shape)), _draft_keys(shape), True
    typed = tuple(
        t if t.bounds else replace(t, kind=mixes.tensor_type(mix, t.name, t.shape, shape.n_layer, tied)) for t in tensors
    )
    return Layout(f"random-{shape.name}", shape.arch, _keys(shape, mix.file_type) | keys, typed, shape.n_vocab, quant)
