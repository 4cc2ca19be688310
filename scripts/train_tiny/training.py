"""What the training programs share: weights on disk, optimiser, schedule, loss."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from train_tiny.muon import Muon

PIECE_BYTES = 15 * 2**20  # files that come back from the training machine are at most 16 MiB each
HELD_PROBABILITY = 0.05  # paths above it are nodes of a tree of about 15
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Model = TypeVar("Model", bound=nn.Module)


def autocast() -> AbstractContextManager[Any]:
    """Bfloat16 products on CUDA, float32 elsewhere."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


def is_matrix(name: str, p: Tensor) -> bool:
    """Tensors that are stored in float16 and get weight decay: matrices other than convolution kernels."""
    return p.dim() == 2 and "conv" not in name.rsplit(".", 1)[-1]


def save_model(model: nn.Module, prefix: Path, config: Any) -> None:
    """Write PREFIX.json and PREFIX-N.safetensors: matrices float16, the rest float32."""
    pieces: list[dict[str, Tensor]] = [{}]
    n_bytes = 0
    for name, p in model.state_dict().items():
        name = name.replace("_orig_mod.", "")
        t = p.detach().cpu()
        t = (t.half() if is_matrix(name, t) else t.float()).contiguous()
        if n_bytes + t.nbytes > PIECE_BYTES:
            pieces.append({})
            n_bytes = 0
        pieces[-1][name] = t
        n_bytes += t.nbytes
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for i, piece in enumerate(pieces):
        save_file(piece, f"{prefix}-{i}.safetensors")
    Path(f"{prefix}.json").write_text(json.dumps(asdict(config)) + "\n")


def load_weights(prefix: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of a saved model."""
    config = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(Path(f"{prefix}.json").read_text()).items()}
    weights: dict[str, Tensor] = {}
    for path in sorted(prefix.parent.glob(f"{prefix.name}-*.safetensors")):
        weights |= load_file(path)
    return config, weights


def load_model(kind: type[Model], config_kind: type[Any], prefix: Path, device: str = DEVICE) -> Model:
    """Rebuild a saved model in float32."""
    config, weights = load_weights(prefix)
    model = kind(config_kind(**config))
    model.load_state_dict({k: v.float() for k, v in weights.items()})
    return model.to(device)


class Optimizers:
    """Muon for the matrices inside layers, AdamW for embeddings, head, norms and kernels; one learning rate for both."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, use_muon: bool = True) -> None:
        self.lr = lr
        hidden, plain, decayed = [], [], []
        for name, p in model.named_parameters():
            outer = any(part in name for part in ("embed", "head.", "selector"))
            if is_matrix(name, p) and not outer and use_muon:
                hidden.append(p)
            elif is_matrix(name, p) and "embed" not in name:
                decayed.append(p)
            else:
                plain.append(p)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        fused = DEVICE == "cuda"
        self.all: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)]
        if hidden:
            self.all.append(Muon(hidden, lr, weight_decay))
        self.parameters = hidden + decayed + plain

    def step(self, scale: float) -> None:
        """Clip, step with `scale` times the learning rate, forget the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Forget the moments (after warm-up steps at learning rate 0)."""
        for optimizer in self.all:
            optimizer.state.clear()


def schedule(seconds: float, max_steps: int | None, warmup: float = 0.03) -> Iterator[float]:
    """Learning rate scale per step, by the wall clock or by steps: linear warm-up, cosine to zero."""
    start, step = time.monotonic(), 0
    while True:
        done = step / max_steps if max_steps else (time.monotonic() - start) / seconds
        if done >= 1:
            return
        yield min(1.0, done / warmup) * 0.5 * (1 + math.cos(math.pi * done))
        step += 1


def seconds_left(wanted: float, until: float | None) -> float:
    """The wanted training time, cut so that it ends at `until` on the monotonic clock."""
    return wanted if until is None else max(1.0, min(wanted, until - time.monotonic()))


def soft_cross_entropy(logits: Tensor, labels: Tensor, teacher: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy against the target's own distribution, which has less noise than the token it drew.

    Args:
        logits: `[N, n_vocab]`.
        labels: the drawn tokens, `[N]`.
        teacher: the target's logits at the same places, `[N, n_vocab]`.
        temperature: what the text was drawn with, `[N]`; 0 means greedy, where the token is the distribution.

    Returns:
        Loss `[N]`, whether the best token is the label `[N]`, log-probability of the label `[N]`.
    """
    logits = logits.float()
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    soft = (teacher.float() / temperature.clamp(min=0.1)[:, None]).softmax(-1)
    known = log_q.gather(-1, labels[:, None])[:, 0]
    loss = torch.where(temperature > 0, -(soft * log_q).sum(-1), -known)
    return loss, logits.argmax(-1) == labels, known


def before(x: Tensor, first: float) -> Tensor:
    """Move the slots `[..., n]` one to the right; `first` comes in."""
    return F.pad(x[..., :-1].float(), (1, 0), value=first)


def slot_weights(correct: Tensor, known: Tensor, decay: float, floor: float, tree_share: float = 0.0) -> Tensor:
    """Weights of slots: exp decay times how likely the slot is used.

    A chain uses a slot when all earlier ones were right, a tree also when the text so far was probable enough to be held.

    Args:
        correct: whether the best token is the label, `[..., n]`.
        known: log-probabilities of the labels, `[..., n]`.
        decay: slots after which a weight has fallen to 1 / e.
        floor: share of a slot that neither uses.
        tree_share: share of the tree against the chain.

    Returns:
        `[..., n]`.
    """
    n = correct.shape[-1]
    in_chain = before(correct.float().cumprod(-1), 1.0)
    in_tree = before(known.cumsum(-1) > math.log(HELD_PROBABILITY), 1.0)
    used = (1 - tree_share) * in_chain + tree_share * in_tree
    return torch.exp(-torch.arange(n, device=correct.device) / decay) * (floor + used)


class Report:
    """Prints running means every `every` steps and keeps the last for the card."""

    def __init__(self, name: str, every: int) -> None:
        self.name, self.every = name, every
        self.n, self.total, self.start = 0, torch.zeros(1), time.monotonic()
        self.last: list[float] = []

    def add(self, values: Sequence[Tensor]) -> None:
        """Add one step's scalars."""
        row = torch.stack([v.detach().float() for v in values])
        self.total = row if self.n % self.every == 0 else self.total + row
        self.n += 1
        if self.n % self.every == 0:
            self.last = [round(float(v) / self.every, 4) for v in self.total]
            took = time.monotonic() - self.start
            print(f"{self.name} step {self.n} {took:.0f} s {took / self.n * 1e3:.1f} ms/step {self.last}", flush=True)
