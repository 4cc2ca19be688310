"""Texts of the target, and what each draft would propose at every position of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from train_tiny.draft import Draft, DraftConfig, block_ids
from train_tiny.grow import Candidates
from train_tiny.mtp import MtpHead
from train_tiny.pool import bar_end, draw
from train_tiny.target import Target, TargetConfig
from train_tiny.training import DEVICE, load_model

N_CANDIDATES = 16


class Models:
    """Target and whatever drafts are in a folder, float32."""

    def __init__(self, weights: Path, drafts: Sequence[str] = ("dflash", "dflash2", "mtp")) -> None:
        self.target = load_model(Target, TargetConfig, weights / "target").eval().requires_grad_(False)
        self.drafts = {n: load_model(Draft, DraftConfig, weights / n).eval().requires_grad_(False)
                       for n in ("dflash", "dflash2") if n in drafts and (weights / f"{n}.json").exists()}  # fmt: skip
        has_mtp = "mtp" in drafts and (weights / "mtp.json").exists()
        self.mtp = load_model(MtpHead, TargetConfig, weights / "mtp").eval().requires_grad_(False) if has_mtp else None


@dataclass(frozen=True)
class Texts:
    """Texts of one prompt: ids `[n, n_prompt + n_tokens + lookahead]`, and the positions of the anchors `[A]`.

    Anchors are the first n_tokens - 1 tokens that the target wrote; the lookahead lets every one have a full block behind it.
    """

    ids: Tensor
    n_prompt: int
    n_tokens: int

    @property
    def anchors(self) -> Tensor:
        """Positions of the anchors."""
        return torch.arange(self.n_prompt, self.n_prompt + self.n_tokens - 1, device=self.ids.device)

    def split(self, n: int) -> list[tuple[int, Texts]]:
        """Parts of n texts, each with the index of its first."""
        return [(i, Texts(self.ids[i : i + n], self.n_prompt, self.n_tokens)) for i in range(0, len(self.ids), n)]

    def labels(self, n_slots: int) -> Tensor:
        """The tokens behind each anchor, `[n, A, S]`."""
        return self.ids[:, self.anchors[:, None] + torch.arange(1, n_slots + 1, device=self.ids.device)]


@torch.no_grad()
def write_texts(target: Target, groups: Sequence[Tensor], temperature: float, n_tokens: int, lookahead: int) -> list[Texts]:
    """Let the target continue groups of prompts `[n, P]`, each of its own length P, all in one batch.

    End tokens are barred, as in the package's benchmark.
    """
    sizes, lengths, n_new = [len(g) for g in groups], [g.shape[1] for g in groups], n_tokens + lookahead
    cache = target.new_cache(sum(sizes), max(lengths) + n_new, DEVICE, torch.float32)
    logits, at = [], 0
    for prompts in groups:
        part = [{k: v[at : at + len(prompts)] for k, v in layer.items()} for layer in cache]
        logits.append(target.head(target(prompts, cache=part)[0][:, -1]))
        at += len(prompts)
    now, heat = torch.cat(logits), torch.full((sum(sizes), 1), temperature, device=DEVICE)
    pos = torch.tensor(lengths, device=DEVICE).repeat_interleave(torch.tensor(sizes, device=DEVICE))
    out = []
    for i in range(n_new):
        out.append(draw(bar_end(now), heat))
        if i + 1 < n_new:
            now, _ = target.step(out[-1], cache, pos + i)
    written = torch.stack(out, 1).split(sizes)
    return [Texts(torch.cat([g, w], 1), g.shape[1], n_tokens) for g, w in zip(groups, written, strict=True)]


@dataclass(frozen=True)
class Record:
    """A draft's answers at every anchor of the texts, texts outermost.

    Attributes:
        single: candidates by the plain logits.
        pair: for DFlash2, candidates by the selector given the predecessor's candidate.
        n_texts: texts; `single` and `pair` hold n_texts * anchors rows.
    """

    single: Candidates
    pair: Candidates | None
    n_texts: int


@torch.no_grad()
def features_of_texts(target: Target, texts: Texts, taps: Sequence[int]) -> Tensor:
    """The target's tapped layer inputs, `[n, T, taps * n_embd]`."""
    return torch.cat(target(texts.ids, taps=taps)[1], -1)


@torch.no_grad()
def record_draft(target: Target, draft: Draft, texts: Texts, size: int, features: Tensor) -> Record:
    """Ask a DFlash or DFlash2 draft with blocks of `size` at every anchor; two texts at a time, since logits are large."""
    parts = [ask(target, draft, part, size, features[i : i + 2]) for i, part in texts.split(2)]
    truth, single = (torch.cat([p[k] for p in parts]) for k in (0, 1))
    pair = [p[2] for p in parts if p[2] is not None]
    return Record(Candidates.sort(single, truth), Candidates.sort(torch.cat(pair), truth) if pair else None, len(texts.ids))


def ask(target: Target, draft: Draft, texts: Texts, size: int, features: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Per anchor: the candidate that the text goes on with, scores `[N, S, 1, K]`, and DFlash2's pairwise ones `[N, S, K, K]`."""
    n_best = draft.c.selector_top_k or N_CANDIDATES
    anchors = texts.anchors.expand(len(texts.ids), -1)
    h = draft(target.embed(block_ids(texts.ids, anchors, size, draft.c.mask_id)), features, anchors)[:, :, 1:]
    logits = target.head(h)
    raw, ids = logits.topk(n_best, -1)
    single = (raw - logits.logsumexp(-1, keepdim=True)).flatten(0, 1)[:, :, None]
    found = ids == texts.labels(size - 1)[..., None]
    truth = torch.where(found.any(-1), found.float().argmax(-1), -1).flatten(0, 1)
    if draft.selector is None:
        return truth, single, None
    first = texts.ids[:, texts.anchors][..., None, None].expand(-1, -1, 1, n_best)
    condition = draft.selector.condition(h[..., None, :], torch.cat([first, ids[:, :, :-1]], 2))  # [n, A, S, K', rank]
    scores = raw[..., None, :] + condition @ draft.selector.next[ids].mT
    return truth, single, scores.log_softmax(-1).flatten(0, 1)


@torch.no_grad()
def record_mtp(target: Target, head: MtpHead, texts: Texts, n_slots: int) -> Tensor:
    """Right drafts of an MTP chain at every anchor, `[n, A]`; exact, since a step's inputs are true while all before are."""
    hidden, _ = target(texts.ids)
    steps = head.unroll(target.embed(texts.ids), hidden, n_slots)
    best = torch.stack([target.head(h[:, texts.anchors + s]).argmax(-1) for s, h in enumerate(steps)], 2)
    return (best == texts.labels(n_slots)).int().cumprod(-1).sum(-1)
