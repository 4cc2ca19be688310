"""The target's MTP head in PyTorch: one gated attention layer that predicts the token after next.

At position p it takes the token x_p and a hidden state of position p - 1: in the first step the target's normed one,
in later steps its own. llama.cpp keeps the first step's keys for confirmed positions and adds one key per drafted token,
so training unrolls the steps with exactly those keys visible.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train_tiny.target import GatedAttention, RMSNorm, SwiGLU, TargetConfig, linear


def shift(x: Tensor, n: int = 1) -> Tensor:
    """Move `[B, T, ...]` n positions to the right; zeros come in."""
    return torch.cat([torch.zeros_like(x[:, :n]), x[:, : x.shape[1] - n]], 1)


class MtpHead(nn.Module):
    """Layer n_layer of the target's file; shares embedding and output head with the target."""

    def __init__(self, c: TargetConfig) -> None:
        super().__init__()
        self.c = c
        self.enorm, self.hnorm = RMSNorm(c.n_embd, c.eps), RMSNorm(c.n_embd, c.eps)
        self.eh_proj = linear(2 * c.n_embd, c.n_embd)
        self.attn_norm, self.post_norm = RMSNorm(c.n_embd, c.eps), RMSNorm(c.n_embd, c.eps)
        self.mix = GatedAttention(c)
        self.ffn = SwiGLU(c.n_embd, c.n_ff, 2)
        self.head_norm = RMSNorm(c.n_embd, c.eps)

    def step(self, embedded: Tensor, hidden: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One draft step at all positions at once.

        Args:
            embedded: embeddings of the tokens at positions 0..T-1, `[B, T, n_embd]`.
            hidden: hidden state of the position before each, `[B, T, n_embd]`.
            keys: keys and values `[B, Hkv, T, D]` of the earlier steps; this step's are appended.

        Returns:
            Normed hidden states `[B, T, n_embd]`: the head's input, and the next step's hidden.
        """
        pos = torch.arange(embedded.shape[1], device=embedded.device)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        q, k, v, gate = self.mix.project(self.attn_norm(x), pos)
        keys.append((k, v))
        o = unrolled_attention(q.unflatten(1, (self.c.n_head_kv, -1)), keys)
        o = o.flatten(1, 2).transpose(1, 2).flatten(2)
        x = x + self.mix.out(o.to(gate.dtype) * torch.sigmoid(gate)).to(x.dtype)
        x = x + self.ffn(self.post_norm(x)).to(x.dtype)
        out: Tensor = self.head_norm(x)
        return out

    def unroll(self, embedded: Tensor, target_hidden: Tensor, n_steps: int) -> list[Tensor]:
        """Hidden states of `n_steps` steps, each `[B, T, n_embd]`; step s is valid from position s - 1 on.

        Step s at position p stands for a draft whose confirmed text ends at p - s + 1, so its label is x_{p + 1}.
        """
        hidden, keys, out = target_hidden, [], []
        keys_so_far: list[tuple[Tensor, Tensor]] = keys
        for _ in range(n_steps):
            hidden = self.step(embedded, shift(hidden), keys_so_far)
            out.append(hidden)
        return out


def unrolled_attention(q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of step s = len(keys): first-step keys up to p - s + 1, then one key of each later step.

    Args:
        q: queries `[B, Hkv, R, T, D]`.
        keys: keys and values `[B, Hkv, T, D]` of steps 1..s, indexed by position.

    Returns:
        `[B, Hkv, R, T, D]`.
    """
    n_steps, n_tokens = len(keys), q.shape[3]
    q = q * q.shape[-1] ** -0.5
    first_k, first_v = keys[0]
    pos = torch.arange(n_tokens, device=q.device)
    hidden = pos[None, :] > pos[:, None] - (n_steps - 1)
    score = torch.einsum("bhrtd,bhsd->bhrts", q, first_k).float().masked_fill(hidden, -1e30)
    own, own_v = [], []
    for j, (k, v) in enumerate(keys[1:], 2):
        back = n_steps - j  # step j's key lies that many positions before the query
        k, v = (F.pad(t[:, :, : n_tokens - back], (0, 0, back, 0)) for t in (k, v))
        own.append((q * k[:, :, None]).sum(-1, keepdim=True).float())
        own_v.append(v[:, :, None])
    weight = torch.cat([score, *own], -1).softmax(-1).to(first_v.dtype)
    out = torch.einsum("bhrts,bhsd->bhrtd", weight[..., :n_tokens], first_v)
    for i, v in enumerate(own_v):
        out = out + weight[..., n_tokens + i, None] * v
    return out
