"""The tiny target in PyTorch: architecture `qwen35`, gated delta net layers with gated attention every fourth.

Layouts are llama.cpp's own, so that export is a rename: norm weights are plain multipliers, attention's q packs
[Q | gate] per head, A is kept as its log and exported as -exp(A_log), rope rotates pairs (i, i + n_rot/2) of the first
n_rot dimensions, which equals M-RoPE for text positions (p, p, p, 0) when the sections cover all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_tiny.gdn import CHUNK, gdn_chunked, gdn_step


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target; `small` shrinks them for smoke tests."""

    n_vocab: int = 4096
    n_embd: int = 256
    n_layer: int = 8
    full_attn_interval: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 32
    rope_sections: tuple[int, ...] = (6, 5, 5, 0)
    rope_base: float = 10000.0
    gdn_dim: int = 32
    gdn_k_heads: int = 4
    gdn_v_heads: int = 8
    d_conv: int = 4
    n_ff: int = 736  # 768 with an MTP layer would be 20.04 MB in F16
    eps: float = 1e-6
    n_ctx: int = 2048

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer is a gated delta net."""
        return (layer + 1) % self.full_attn_interval != 0

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v together."""
        return self.gdn_dim * (2 * self.gdn_k_heads + self.gdn_v_heads)


SMALL = TargetConfig(n_embd=64, n_layer=4, n_head=2, n_head_kv=1, head_dim=32, n_rot=16, rope_sections=(3, 3, 2, 0), gdn_dim=16,
                     gdn_k_heads=2, gdn_v_heads=4, n_ff=96)  # fmt: skip


class RMSNorm(nn.Module):
    """Root mean square norm with a plain multiplier, computed in float32."""

    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def linear(n_in: int, n_out: int, std: float | None = None) -> nn.Linear:
    """A matrix without bias, weights normal with deviation `std` (default n_in^-1/2)."""
    layer = nn.Linear(n_in, n_out, bias=False)
    nn.init.normal_(layer.weight, std=std if std is not None else n_in**-0.5)
    return layer


def rope(x: Tensor, pos: Tensor, n_rot: int, base: float) -> Tensor:
    """Rotate the first `n_rot` dimensions of x `[B, H, T, D]` by positions `[T]` or `[B, T]`."""
    rate = base ** (-torch.arange(0, n_rot, 2, device=x.device, dtype=torch.float32) / n_rot)
    angle = pos.float()[..., None] * rate
    if angle.dim() == 3:
        angle = angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    half = n_rot // 2
    a, b, rest = x[..., :half].float(), x[..., half:n_rot].float(), x[..., n_rot:]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest], -1)


class SwiGLU(nn.Module):
    """Feed-forward layer; `n_residual` is the number of additions to the residual stream in the model."""

    def __init__(self, n: int, n_ff: int, n_residual: int) -> None:
        super().__init__()
        self.gate, self.up = linear(n, n_ff), linear(n, n_ff)
        self.down = linear(n_ff, n, (n_ff * n_residual) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def unit(x: Tensor, eps: float) -> Tensor:
    """Scale the last axis to length one."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


class GatedDeltaNet(nn.Module):
    """Gated delta net mixer with a causal convolution of d_conv taps before it."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.n_key, self.n_value = c.gdn_dim * c.gdn_k_heads, c.gdn_dim * c.gdn_v_heads
        self.qkv = linear(c.n_embd, c.conv_dim)
        self.z = linear(c.n_embd, self.n_value)
        self.alpha, self.beta = linear(c.n_embd, c.gdn_v_heads, 0.02), linear(c.n_embd, c.gdn_v_heads, 0.02)
        self.conv = nn.Parameter(torch.randn(c.conv_dim, c.d_conv) * c.d_conv**-0.5)
        self.A_log = nn.Parameter(torch.empty(c.gdn_v_heads).uniform_(1, 16).log())
        dt = torch.exp(torch.empty(c.gdn_v_heads).uniform_(-6.9, -2.3))  # between 1e-3 and 0.1
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.norm = RMSNorm(c.gdn_dim, c.eps)
        self.out = linear(self.n_value, c.n_embd, (self.n_value * 2 * c.n_layer) ** -0.5)

    def split(self, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Convolution output `[B, T, conv_dim]` and gates `[B, T, Hv]` -> q, k, v, g, beta in float32."""
        c = self.c
        y = F.silu(y.float())
        q, k, v = y.split([self.n_key, self.n_key, self.n_value], -1)
        q = unit(q.unflatten(-1, (c.gdn_k_heads, c.gdn_dim)), c.eps) * c.gdn_dim**-0.5
        k = unit(k.unflatten(-1, (c.gdn_k_heads, c.gdn_dim)), c.eps)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        return q, k, v.unflatten(-1, (c.gdn_v_heads, c.gdn_dim)), g, torch.sigmoid(b.float())

    def finish(self, o: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Norm, gate and output projection of `[B, T, Hv, D]`."""
        o = self.norm(o) * F.silu(z.float().reshape(o.shape))
        out: Tensor = self.out(o.flatten(2).to(dtype))
        return out

    def forward(self, x: Tensor, pos: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        """Whole sequences `[B, T, n_embd]` from position 0; fills the cache when given."""
        n_tokens, taps = x.shape[1], self.c.d_conv
        padded = F.pad(self.qkv(x), (0, 0, taps - 1, 0))
        y = sum(padded[:, j : j + n_tokens].float() * self.conv[:, j] for j in range(taps))
        q, k, v, g, beta = self.split(torch.as_tensor(y), self.alpha(x), self.beta(x))
        with torch.autocast(x.device.type, enabled=False):
            pad = -n_tokens % CHUNK  # k = beta = g = 0 leaves the state alone
            if pad:
                q, k, v = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k, v))
                g, beta = F.pad(g, (0, 0, 0, pad)), F.pad(beta, (0, 0, 0, pad))
            o, state = gdn_chunked(q, k, v, g, beta)
        if cache is not None:
            cache["conv"].copy_(padded[:, n_tokens:])
            cache["state"].copy_(state)
        return self.finish(o[:, :n_tokens], self.z(x), x.dtype)

    def step(self, x: Tensor, cache: dict[str, Tensor], pos: Tensor) -> Tensor:
        """One token `[B, 1, n_embd]`."""
        window = torch.cat([cache["conv"], self.qkv(x).to(cache["conv"].dtype)], 1)
        cache["conv"].copy_(window[:, 1:])
        y = (window.float() * self.conv.float().T).sum(1, keepdim=True)
        q, k, v, g, beta = (t[:, 0] for t in self.split(y, self.alpha(x), self.beta(x)))
        o, state = gdn_step(q, k, v, g, beta, cache["state"])
        cache["state"].copy_(state)
        return self.finish(o[:, None], self.z(x), x.dtype)


class GatedAttention(nn.Module):
    """Attention with normed queries and keys, partial rope and a sigmoid gate per output channel."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        self.q = linear(c.n_embd, 2 * n_q)
        self.k, self.v = linear(c.n_embd, n_kv), linear(c.n_embd, n_kv)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)
        self.out = linear(n_q, c.n_embd, (n_q * 2 * c.n_layer) ** -0.5)

    def project(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`[B, T, n_embd]` -> q `[B, H, T, D]`, k and v `[B, Hkv, T, D]`, gate `[B, T, H * D]`."""
        c = self.c
        q, gate = self.q(x).unflatten(-1, (c.n_head, 2, c.head_dim)).unbind(3)
        k = self.k(x).unflatten(-1, (c.n_head_kv, c.head_dim))
        v = self.v(x).unflatten(-1, (c.n_head_kv, c.head_dim)).transpose(1, 2)
        q = rope(self.q_norm(q).transpose(1, 2), pos, c.n_rot, c.rope_base)
        k = rope(self.k_norm(k).transpose(1, 2), pos, c.n_rot, c.rope_base)
        return q, k, v, gate.flatten(2)

    def forward(self, x: Tensor, pos: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        """Whole sequences from position 0; fills the cache when given."""
        q, k, v, gate = self.project(x, pos)
        if cache is not None:
            cache["k"][:, :, : k.shape[2]].copy_(k)
            cache["v"][:, :, : v.shape[2]].copy_(v)
        repeat = self.c.n_head // self.c.n_head_kv
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True)
        out: Tensor = self.out(o.transpose(1, 2).flatten(2) * torch.sigmoid(gate))
        return out

    def step(self, x: Tensor, cache: dict[str, Tensor], pos: Tensor) -> Tensor:
        """One token at position `pos`, `[1]` for all sequences or `[B]`."""
        c, is_shared = self.c, len(pos) == 1
        q, k, v, gate = self.project(x, pos if is_shared else pos[:, None])
        keys, values = cache["k"], cache["v"]
        if is_shared:
            keys.index_copy_(2, pos, k.to(keys.dtype))
            values.index_copy_(2, pos, v.to(values.dtype))
        else:
            rows = torch.arange(len(x), device=x.device)
            keys[rows, :, pos], values[rows, :, pos] = k[:, :, 0].to(keys.dtype), v[:, :, 0].to(values.dtype)
        q = q.reshape(len(x), c.n_head_kv, c.n_head // c.n_head_kv, c.head_dim).to(keys.dtype)
        hidden = (torch.arange(keys.shape[2], device=x.device) > pos[:, None])[:, None, None]
        score = (q @ keys.mT).float() * c.head_dim**-0.5
        weight = score.masked_fill(hidden, -1e30).softmax(-1).to(q.dtype)
        o = (weight @ values).reshape(len(x), 1, -1).to(x.dtype)
        out: Tensor = self.out(o * torch.sigmoid(gate))
        return out


class Block(nn.Module):
    """One layer: mixer and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, c: TargetConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.post_norm = RMSNorm(c.n_embd, c.eps), RMSNorm(c.n_embd, c.eps)
        self.mix = GatedDeltaNet(c) if c.is_recurrent(layer) else GatedAttention(c)
        self.ffn = SwiGLU(c.n_embd, c.n_ff, 2 * c.n_layer)

    def forward(self, x: Tensor, pos: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        """Whole sequences."""
        x = x + self.mix(self.attn_norm(x), pos, cache).to(x.dtype)
        return x + self.ffn(self.post_norm(x)).to(x.dtype)

    def step(self, x: Tensor, cache: dict[str, Tensor], pos: Tensor) -> Tensor:
        """One token."""
        mix: Any = self.mix
        x = x + mix.step(self.attn_norm(x), cache, pos).to(x.dtype)
        return x + self.ffn(self.post_norm(x)).to(x.dtype)


class Target(nn.Module):
    """The whole target; logits are `head(forward(...)[0])`."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.n_vocab, c.n_embd)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.norm = RMSNorm(c.n_embd, c.eps)
        self.head = linear(c.n_embd, c.n_vocab, 0.02)

    def forward(
        self, ids: Tensor, taps: Sequence[int] = (), cache: Sequence[dict[str, Tensor]] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Token ids `[B, T]` -> normed hidden states `[B, T, n_embd]` and the inputs of the layers in `taps`."""
        pos = torch.arange(ids.shape[1], device=ids.device)
        x, features = self.embed(ids), []
        for i, block in enumerate(self.blocks):
            if i in taps:
                features.append(x)
            x = block(x, pos, None if cache is None else cache[i])
        return self.norm(x), features

    def new_cache(self, n_batch: int, n_ctx: int, device: str, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """Empty per-layer state for `n_ctx` tokens."""
        c, out = self.c, []
        for i in range(c.n_layer):
            if c.is_recurrent(i):
                conv = torch.zeros(n_batch, c.d_conv - 1, c.conv_dim, device=device, dtype=dtype)
                out.append({"conv": conv, "state": torch.zeros(n_batch, c.gdn_v_heads, c.gdn_dim, c.gdn_dim, device=device)})
            else:
                shape = (n_batch, c.n_head_kv, n_ctx, c.head_dim)
                out.append({n: torch.zeros(shape, device=device, dtype=dtype) for n in ("k", "v")})
        return out

    def step(self, ids: Tensor, cache: Sequence[dict[str, Tensor]], pos: Tensor) -> tuple[Tensor, Tensor]:
        """One token per sequence: ids `[B]`, pos `[1]` or `[B]` -> logits `[B, n_vocab]`, normed hidden `[B, n_embd]`."""
        x = self.embed(ids)[:, None]
        for block, state in zip(self.blocks, cache, strict=True):
            layer: Any = block
            x = layer.step(x, state, pos)
        hidden = self.norm(x)[:, 0]
        return self.head(hidden), hidden
