"""The gated delta rule in PyTorch: chunked for training and prompts, one token at a time for generation.

Per head, with state S `[Dk, Dv]`, decay exp(g) and write strength beta:
    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q
Value head h uses key head h mod n_k_heads, which is how ggml broadcasts (v heads are tiled over k heads).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 32  # tokens per chunk; the inverse below is written for this size
TILE = 8  # diagonal blocks of the inverse


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 of strictly lower triangular L, `[..., CHUNK, CHUNK]`.

    L is nilpotent, so products of (I + L^(2^i)) give the inverse exactly; doing that first inside 8 x 8 tiles and
    then between the tiles keeps every power small, which tf32 products need.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        """The inverse, same shape."""
        n = lower.shape[-1]
        tile = torch.arange(n, device=lower.device) // TILE
        inside = tile[:, None] == tile[None, :]
        eye = torch.eye(n, device=lower.device, dtype=lower.dtype)
        diag, rest = torch.where(inside, lower, 0.0), torch.where(inside, 0.0, lower)
        square = diag @ diag
        diag_inverse = ((eye - diag) @ (eye + square)) @ (eye + square @ square)
        step = diag_inverse @ rest
        inverse = ((eye - step) @ (eye + step @ step)) @ diag_inverse
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """d(M^-1) = -M^-1 dM M^-1, restricted to the strict lower triangle."""
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def gdn_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Run the rule over whole sequences from a zero state.

    Args:
        q: scaled unit queries, `[B, T, Hk, D]` float32; T is a multiple of CHUNK.
        k: unit keys, `[B, T, Hk, D]`.
        v: values, `[B, T, Hv, D]`.
        g: log decay, `[B, T, Hv]`.
        beta: write strength, `[B, T, Hv]`.

    Returns:
        Outputs `[B, T, Hv, D]` and the state behind the last token, `[B, Hv, Dk, Dv]`.
    """
    n_batch, n_tokens, n_k, dim = k.shape
    n_v = v.shape[2]
    n_chunks, repeat = n_tokens // CHUNK, n_v // n_k

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, H, N, C, D]
        return x.reshape(n_batch, n_chunks, CHUNK, x.shape[2], x.shape[3]).permute(0, 3, 1, 2, 4)

    def tiled(x: Tensor) -> Tensor:
        return x.repeat(1, repeat, 1, 1, 1)

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta[..., None])
    sums = chunks(g[..., None])[..., 0].cumsum(-1)  # [B, Hv, N, C]
    causal = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    decay = torch.exp(torch.where(causal, sums[..., :, None] - sums[..., None, :], -1e30))
    kk, qk = tiled(k @ k.mT), tiled(q @ k.mT)
    q, k = tiled(q), tiled(k)
    inverse = UnitLowerInverse.apply((kk * decay * beta).tril(-1))
    from_start = sums.exp()[..., None]
    within = qk * decay
    u = inverse @ (v * beta)
    w = inverse @ (k * (beta * from_start))
    k_end = k * (sums[..., -1:] - sums).exp()[..., None]
    eye = torch.eye(dim, device=q.device, dtype=q.dtype)
    keep = sums[..., -1].exp()[..., None, None] * eye - k_end.mT @ w  # what a whole chunk does to the state
    add = k_end.mT @ u
    read = q * from_start - within @ w
    state = torch.zeros(n_batch, n_v, dim, dim, device=q.device, dtype=q.dtype)
    states = []
    # unbind, not slices: its backward is one stack instead of a zero-filled tensor per chunk
    for keep_n, add_n in zip(keep.unbind(2), add.unbind(2), strict=True):
        states.append(state)
        state = keep_n @ state + add_n
    out = read @ torch.stack(states, 2) + within @ u
    return out.permute(0, 2, 3, 1, 4).reshape(n_batch, n_tokens, n_v, dim), state


def gdn_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: q, k `[B, Hk, D]`, v `[B, Hv, D]`, g, beta `[B, Hv]`, state `[B, Hv, Dk, Dv]` -> output `[B, Hv, D]`, state."""
    repeat = v.shape[1] // k.shape[1]
    q, k = q.repeat(1, repeat, 1), k.repeat(1, repeat, 1)
    state = state * g.exp()[..., None, None]
    change = (v - (k[..., None] * state).sum(-2)) * beta[..., None]
    state = state + k[..., None] * change[..., None, :]
    return (q[..., None] * state).sum(-2), state
