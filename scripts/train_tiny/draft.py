"""The drafts in PyTorch: DFlash, and DFlash2 = DFlash with two-tap convolutions and a selector lattice.

A block is [anchor, MASK x (b - 1)] and is denoised in one pass without causal mask inside. Context enters as keys and
values made from the target's tapped layer inputs: fc, a norm, then each layer's own k and v, without the layer's norm.
The context holds positions before the anchor; the anchor itself comes as an embedding only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_tiny.target import RMSNorm, SwiGLU, linear, rope

CONV_TAPS = 2  # the pin's kernel size for DFlash2 drafts: own position and the one before


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft; selector_top_k > 0 makes it a DFlash2 draft."""

    n_embd: int = 256
    n_layer: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    rope_base: float = 10000.0
    n_ff: int = 576
    eps: float = 1e-6
    n_ctx: int = 2048
    n_vocab: int = 4096
    block_size: int = 16
    target_layers: tuple[int, ...] = (1, 3, 5, 7)  # INPUTS of these layers
    mask_id: int = 4095
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 0  # at most 15: the pin packs k (k + 1) numbers into a row of n_embd

    @property
    def is_dflash2(self) -> bool:
        """Whether convolutions and selector are there."""
        return self.selector_top_k > 0


def attend(q: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
    """Attention of block queries over context and own block, one softmax over both.

    Args:
        q: queries, `[B, Hkv, R, A, b, D]`: R query heads per key head, A blocks of b tokens.
        context: keys and values `[B, Hkv, T, D]`.
        block: keys and values `[B, Hkv, A, b, D]`.
        visible: which context tokens a block sees, `[B, A, T]` bool.

    Returns:
        `[B, Hkv, R, A, b, D]`.
    """
    q = q * q.shape[-1] ** -0.5
    keys, values = context
    score_c = torch.einsum("bhrand,bhtd->bhrant", q, keys).float()
    score_c = score_c.masked_fill(~visible[:, None, None, :, None], -1e30)
    score_b = torch.einsum("bhrand,bhamd->bhranm", q, block[0]).float()
    top = torch.maximum(score_c.amax(-1, keepdim=True), score_b.amax(-1, keepdim=True)).detach()
    weight_c, weight_b = (score_c - top).exp(), (score_b - top).exp()
    total = weight_c.sum(-1, keepdim=True) + weight_b.sum(-1, keepdim=True)
    weight_c, weight_b = (weight_c / total).to(values.dtype), (weight_b / total).to(values.dtype)
    return torch.einsum("bhrant,bhtd->bhrand", weight_c, values) + torch.einsum("bhranm,bhamd->bhrand", weight_b, block[1])


class BlockConv(nn.Module):
    """Two-tap depthwise convolution along a block, before and after a sublayer.

    Tap weights are base + a projection of the sublayer's input shared by groups of channels; taps stay in the block.
    Layout of `base` is `[side, tap, n_embd]`, of the projection's rows (side, tap, group), outermost first.
    """

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.n_groups, self.group = c.n_embd // c.conv_group_size, c.conv_group_size
        base = torch.zeros(2, CONV_TAPS, c.n_embd)
        base[:, 0] = 1.0  # starts as the identity
        self.base = nn.Parameter(base)
        self.proj = linear(c.n_embd, 2 * CONV_TAPS * self.n_groups, 0.02 / c.n_embd**0.5)

    def weights(self, x: Tensor) -> Tensor:
        """Tap weights `[2, CONV_TAPS, ..., n_embd]` for sublayer inputs `[..., n_embd]`."""
        dynamic = self.proj(x).unflatten(-1, (2, CONV_TAPS, self.n_groups)).repeat_interleave(self.group, -1)
        return (dynamic + self.base.to(dynamic.dtype)).movedim((-3, -2), (0, 1))

    @staticmethod
    def apply_taps(x: Tensor, taps: Tensor) -> Tensor:
        """X `[B, A, b, n]` with taps `[CONV_TAPS, B, A, b, n]`; the token before the block counts as zero."""
        return taps[0] * x + taps[1] * F.pad(x[:, :, :-1], (0, 0, 1, 0))


class DraftLayer(nn.Module):
    """Attention over context and block, then feed-forward."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.c = c
        n_q, n_kv = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        self.attn_norm, self.ffn_norm = RMSNorm(c.n_embd, c.eps), RMSNorm(c.n_embd, c.eps)
        self.q, self.k, self.v = linear(c.n_embd, n_q), linear(c.n_embd, n_kv), linear(c.n_embd, n_kv)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)
        self.out = linear(n_q, c.n_embd, (n_q * 2 * c.n_layer) ** -0.5)
        self.ffn = SwiGLU(c.n_embd, c.n_ff, 2 * c.n_layer)
        self.attn_conv = BlockConv(c) if c.is_dflash2 else None
        self.ffn_conv = BlockConv(c) if c.is_dflash2 else None

    def keys_values(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, n_embd]` at positions `[T]` or `[B, T]` -> k and v `[B, Hkv, T, D]`."""
        c = self.c
        k = self.k_norm(self.k(x).unflatten(-1, (c.n_head_kv, c.head_dim))).transpose(1, 2)
        v = self.v(x).unflatten(-1, (c.n_head_kv, c.head_dim)).transpose(1, 2)
        return rope(k, pos, c.head_dim, c.rope_base), v

    def attention(self, x: Tensor, pos: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """Normed block tokens `[B, A, b, n]` at positions `[B, A, b]` -> `[B, A, b, n]`."""
        c = self.c
        shape = x.shape[1:3]
        flat, flat_pos = x.flatten(1, 2), pos.flatten(1)
        q = self.q_norm(self.q(flat).unflatten(-1, (c.n_head, c.head_dim))).transpose(1, 2)
        q = rope(q, flat_pos, c.head_dim, c.rope_base).unflatten(2, shape).unflatten(1, (c.n_head_kv, -1))
        keys = self.keys_values(context, torch.arange(context.shape[1], device=x.device))
        k, v = self.keys_values(flat, flat_pos)
        o = attend(q, keys, (k.unflatten(2, shape), v.unflatten(2, shape)), visible)
        out: Tensor = self.out(o.flatten(1, 2).permute(0, 2, 3, 1, 4).flatten(3))
        return out

    def forward(self, x: Tensor, pos: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        """X `[B, A, b, n]`, context `[B, T, n]` -> `[B, A, b, n]`."""
        h = self.attn_norm(x)
        if self.attn_conv is None or self.ffn_conv is None:
            x = x + self.attention(h, pos, context, visible).to(x.dtype)
            return x + self.ffn(self.ffn_norm(x)).to(x.dtype)
        taps = self.attn_conv.weights(h)
        h = self.attention(BlockConv.apply_taps(h, taps[0]).to(h.dtype), pos, context, visible)
        x = x + BlockConv.apply_taps(h, taps[1]).to(x.dtype)
        h = self.ffn_norm(x)
        taps = self.ffn_conv.weights(h)
        h = self.ffn(BlockConv.apply_taps(h, taps[0]).to(h.dtype))
        return x + BlockConv.apply_taps(h, taps[1]).to(x.dtype)


class Selector(nn.Module):
    """Pairwise scores: score(a, b) = logit(b) + <prev[a] * hidden(h), next[b]> for predecessor a and successor b."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.hidden = linear(c.n_embd, c.selector_rank)
        self.prev = nn.Parameter(torch.randn(c.n_vocab, c.selector_rank) * 0.1)
        self.next = nn.Parameter(torch.randn(c.n_vocab, c.selector_rank) * 0.02)

    def condition(self, h: Tensor, before: Tensor) -> Tensor:
        """Normed hidden `[..., n_embd]` and predecessor ids `[...]` -> `[..., rank]`."""
        gate: Tensor = self.hidden(h)
        return self.prev[before].to(gate.dtype) * gate


class Draft(nn.Module):
    """A draft; logits are the target's head on what `forward` returns."""

    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.c = c
        self.fc = linear(c.n_embd * len(c.target_layers), c.n_embd)
        self.enc_norm, self.norm = RMSNorm(c.n_embd, c.eps), RMSNorm(c.n_embd, c.eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.n_layer))
        self.selector = Selector(c) if c.is_dflash2 else None

    def forward(self, embedded: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Denoise all blocks of a batch at once.

        Args:
            embedded: target embeddings of the block tokens, `[B, A, b, n_embd]`.
            features: the target's tapped layer inputs, `[B, T, taps * n_embd]`.
            anchors: positions of the anchors, `[B, A]`.

        Returns:
            Normed hidden states `[B, A, b, n_embd]`; slot 0 is the anchor's own and predicts nothing.
        """
        context = self.enc_norm(self.fc(features))
        pos = anchors[..., None] + torch.arange(embedded.shape[2], device=anchors.device)
        visible = torch.arange(features.shape[1], device=anchors.device) < anchors[..., None]
        x = embedded
        for layer in self.layers:
            x = layer(x, pos, context, visible)
        out: Tensor = self.norm(x)
        return out


def block_ids(ids: Tensor, anchors: Tensor, block_size: int, mask_id: int) -> Tensor:
    """Block inputs `[B, A, b]`: the token at each anchor, then masks."""
    block = ids.new_full((*anchors.shape, block_size), mask_id)
    block[..., 0] = ids.gather(1, anchors)
    return block
