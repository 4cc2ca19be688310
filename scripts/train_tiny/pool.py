"""Text that the frozen target writes, for training drafts: generation in batches, then features of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train_tiny.corpus import END_ID, SPECIALS
from train_tiny.target import Target
from train_tiny.training import DEVICE, autocast

TEMPERATURES = (0.0, 0.0, 0.8, 0.8, 1.0)  # drawn evenly per text
PREFILL_BATCH = 512  # the chunked form needs much memory


@dataclass(frozen=True)
class Pool:
    """Texts `[N, T]` int16, the length of their corpus prompt `[N]` and their temperature `[N]`."""

    ids: Tensor
    n_prompt: Tensor
    temperature: Tensor

    def save(self, path: Path) -> None:
        """Write one npz."""
        arrays = {k: getattr(self, k).cpu().numpy() for k in ("ids", "n_prompt", "temperature")}
        np.savez(path, **arrays)

    @staticmethod
    def load(path: Path) -> Pool:
        """Read one npz to the device."""
        with np.load(path) as f:
            return Pool(*(torch.from_numpy(f[k]).to(DEVICE) for k in ("ids", "n_prompt", "temperature")))


def draw(logits: Tensor, temperature: Tensor) -> Tensor:
    """One token per row of `[B, n_vocab]` by the Gumbel-max rule; temperature `[B, 1]`, 0 takes the best."""
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
    return (logits + temperature * noise).argmax(-1)


def bar_end(logits: Tensor) -> Tensor:
    """Logits without the special tokens: texts run to their length, as in the package's benchmark."""
    barred = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] - len(SPECIALS)
    return logits.masked_fill(barred, -torch.inf)


class Generator:
    """Continues prompts up to `n_ctx` tokens, `n_batch` texts at a time; on CUDA a decode step is one graph."""

    def __init__(self, target: Target, n_batch: int, n_ctx: int) -> None:
        self.target, self.n_batch, self.n_ctx = target, n_batch, n_ctx
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.cache = target.new_cache(n_batch, n_ctx, DEVICE, dtype)
        self.ids = torch.zeros(n_batch, dtype=torch.long, device=DEVICE)
        self.pos = torch.zeros(1, dtype=torch.long, device=DEVICE)
        self.temperature = torch.zeros(n_batch, 1, device=DEVICE)
        self.advance: Callable[[], object] = self._capture() if DEVICE == "cuda" else self._decode

    def _decode(self) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda", cache_enabled=False):
            logits, _ = self.target.step(self.ids, self.cache, self.pos)
        self.ids.copy_(draw(bar_end(logits.float()), self.temperature))
        self.pos.add_(1)

    @torch.no_grad()
    def _capture(self) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())  # the buffers are zeroed there
        with torch.cuda.stream(side):
            for _ in range(2):
                self._decode()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        return graph.replay

    @torch.no_grad()
    def run(self, prompts: Tensor, temperature: Tensor) -> Tensor:
        """Prompts `[n_batch, P]` and temperatures `[n_batch]` -> texts `[n_batch, n_ctx]` int16."""
        n_prompt = prompts.shape[1]
        out = torch.empty(self.n_batch, self.n_ctx, dtype=torch.int16, device=DEVICE)
        out[:, :n_prompt] = prompts.to(torch.int16)
        self.temperature.copy_(temperature[:, None])
        for lo in range(0, self.n_batch, PREFILL_BATCH):
            part = slice(lo, lo + PREFILL_BATCH)
            cache = [{k: v[part] for k, v in layer.items()} for layer in self.cache]
            with autocast():
                hidden, _ = self.target(prompts[part], cache=cache)
                logits = self.target.head(hidden[:, -1])
            self.ids[part] = draw(bar_end(logits.float()), self.temperature[part])
        self.pos.fill_(n_prompt)
        for i in range(n_prompt, self.n_ctx):
            out[:, i] = self.ids.to(torch.int16)
            if i + 1 < self.n_ctx:
                self.advance()
        return out


def starts(corpus: Tensor, n: int, length: int) -> Tensor:
    """Where prompts begin in the corpus, `[n]`: half of them at the start of a file, half anywhere."""
    anywhere = torch.randint(0, len(corpus) - length, (n,), device=corpus.device)
    files = (corpus[: len(corpus) - length - 1] == END_ID).nonzero()[:, 0] + 1
    if not len(files):
        return anywhere
    at_file = files[torch.randint(0, len(files), (n,), device=corpus.device)]
    return torch.where(torch.arange(n, device=corpus.device) % 2 == 0, at_file, anywhere)


def make_pool(target: Target, corpus: Tensor, n_batch: int, n_ctx: int, prompts: Sequence[int]) -> Pool:
    """One batch of texts for every prompt length in `prompts`."""
    generator = Generator(target, n_batch, n_ctx)
    choice = torch.tensor(TEMPERATURES, device=DEVICE)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for n_prompt in prompts:
        at = starts(corpus, n_batch, n_prompt)
        ids = corpus[at[:, None] + torch.arange(n_prompt, device=DEVICE)].long()
        temperature = choice[torch.randint(0, len(choice), (n_batch,), device=DEVICE)]
        text = generator.run(ids, temperature)
        parts.append((text, torch.full((n_batch,), n_prompt, device=DEVICE), temperature))
    return Pool(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def features_of(target: Target, ids: Tensor, taps: Sequence[int], n_batch: int) -> tuple[Tensor, Tensor]:
    """Tapped inputs `[N, T, taps * n_embd]` and normed hidden states `[N, T, n_embd]` of texts `[N, T]`, bfloat16 on CUDA."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    n_embd = target.c.n_embd
    features = torch.empty(*ids.shape, len(taps) * n_embd, dtype=dtype, device=DEVICE)
    hidden = torch.empty(*ids.shape, n_embd, dtype=dtype, device=DEVICE)
    for lo in range(0, len(ids), n_batch):
        part = slice(lo, lo + n_batch)
        with autocast():
            h, tapped = target(ids[part].long(), taps=taps)
        hidden[part] = h.to(dtype)
        if taps:
            features[part] = torch.cat(tapped, -1).to(dtype)
    return features, hidden
