"""Muon: momentum, then the nearest orthogonal matrix as the update; equal shapes are done in one batch.

The quintic iteration and its coefficients are those of torch.optim.Muon, which takes one matrix at a time: thousands of
small launches a step for a model of many small matrices. Updates are scaled to the size that AdamW's have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
N_ITERATIONS = 5


def orthogonalize(x: Tensor) -> Tensor:
    """Matrices `[n, rows, cols]` with all singular values moved near 1, in bfloat16."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    y = (x.mT if is_tall else x).bfloat16()
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(N_ITERATIONS):
        gram = y @ y.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, poly, y, beta=a)
    return y.mT if is_tall else y


class Muon(torch.optim.Optimizer):
    """For two-dimensional parameters only; Nesterov momentum, decoupled weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self._update(params, shape, group)

    def _update(self, params: list[Tensor], shape: torch.Size, group: dict[str, float]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        looked_ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        update = orthogonalize(torch.stack(list(looked_ahead))).to(params[0].dtype)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * max(shape) ** 0.5
        torch._foreach_add_(params, list(update.unbind(0)), alpha=-group["lr"] * scale)
