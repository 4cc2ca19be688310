#!/usr/bin/env python3
"""Simulate chains and trees of the drafts on prompts: what llama.cpp accepts, without running it.

    python -m train_tiny.simulate --weights DIR --tokenizer FILE --prompts FILE... --out sim.json

For every prompt and seed the target writes its text; then each draft is asked at every position, and rounds are played
with every policy (chain or tree, see trees.py). Result: per text, rounds and tokens of every policy, hit rates per slot.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from train_tiny.draft import Draft, DraftConfig, block_ids
from train_tiny.mtp import MtpHead
from train_tiny.pool import draw
from train_tiny.target import Target, TargetConfig
from train_tiny.training import DEVICE, load_model
from train_tiny.trees import TreeShape, build_tree, depth_held, play, repetition_rate

N_CANDIDATES = 16
HITS = (1, 4, 8)
LOOKAHEAD = 16


@dataclass
class Record:
    """What one draft said at every position of one text: slots s = 0.. predict the tokens behind the anchor.

    Attributes:
        truth: index of the true token among a slot's candidates, -1 if absent, `[A][S]`.
        single: log-probabilities of the candidates, `[A][S][K]`.
        chain: drafts of the chain that are right, `[A]`.
        pair: for DFlash2, log-probabilities given each predecessor, `[A][S][K'][K']` (slot 0 has one row).
    """

    truth: list[list[int]]
    single: list[list[list[float]]]
    chain: list[int]
    pair: list[list[list[list[float]]]] = field(default_factory=list)


@torch.no_grad()
def write_texts(target: Target, prompt: Sequence[int], temperature: float, n_texts: int, n_tokens: int) -> Tensor:
    """`[n_texts, len(prompt) + n_tokens]` token ids."""
    ids = torch.tensor([list(prompt)] * n_texts, device=DEVICE)
    cache = target.new_cache(n_texts, len(prompt) + n_tokens, DEVICE, torch.float32)
    hidden, _ = target(ids, cache=cache)
    logits, heat = target.head(hidden[:, -1]), torch.full((n_texts, 1), temperature, device=DEVICE)
    out = [ids]
    for i in range(n_tokens):
        token = draw(logits, heat)
        out.append(token[:, None])
        if i + 1 < n_tokens:
            logits, _ = target.step(token, cache, torch.tensor([len(prompt) + i], device=DEVICE))
    return torch.cat(out, 1)


def labels_of(text: Tensor, anchors: Tensor, n_slots: int) -> Tensor:
    """The tokens behind each anchor, `[A, S]`."""
    return text[anchors[:, None] + torch.arange(1, n_slots + 1, device=text.device)]


def first_wrong(right: Tensor) -> list[int]:
    """Length of the all-true prefix of every row."""
    out: list[int] = right.int().cumprod(-1).sum(-1).tolist()
    return out


@torch.no_grad()
def record_draft(target: Target, draft: Draft, text: Tensor, anchors: Tensor, size: int) -> Record:
    """Ask a DFlash or DFlash2 draft with blocks of `size` at the anchors of one text `[T]`."""
    _, taps = target(text[None], taps=draft.c.target_layers)
    block = block_ids(text[None], anchors[None], size, draft.c.mask_id)
    h = draft(target.embed(block), torch.cat(taps, -1), anchors[None])[0, :, 1:]
    logits, labels = target.head(h), labels_of(text, anchors, size - 1)
    n_best = draft.c.selector_top_k or N_CANDIDATES
    values, ids = logits.log_softmax(-1).topk(n_best, -1)
    found = ids == labels[..., None]
    truth = torch.where(found.any(-1), found.float().argmax(-1), -1)
    chain = first_wrong(truth == 0)
    if draft.selector is None:
        return Record(truth.tolist(), values.tolist(), chain)
    raw, selector = logits.gather(-1, ids), draft.selector
    before = torch.cat([text[anchors][:, None, None].expand(-1, 1, n_best), ids[:, :-1]], 1)
    condition = selector.condition(h[:, :, None], before)  # [A, S, K', rank]
    pair = raw[:, :, None] + torch.einsum("askr,asbr->askb", condition, selector.next[ids])
    best = pair.argmax(-1)  # [A, S, K']: the successor of every predecessor
    at = torch.zeros(len(anchors), dtype=torch.long, device=text.device)
    right = []
    for slot in range(size - 1):
        at = best[:, slot].gather(1, at[:, None])[:, 0]
        right.append(at == truth[:, slot])
    return Record(truth.tolist(), values.tolist(), first_wrong(torch.stack(right, 1)), pair.log_softmax(-1).tolist())


@torch.no_grad()
def record_mtp(target: Target, head: MtpHead, text: Tensor, anchors: Tensor, n_slots: int) -> list[int]:
    """Right drafts of an MTP chain at every anchor; exact, since a step's inputs are true as long as all before it are."""
    hidden, _ = target(text[None])
    steps = head.unroll(target.embed(text[None]), hidden, n_slots)
    best = torch.stack([target.head(h[0, anchors + s]).argmax(-1) for s, h in enumerate(steps)], 1)
    return first_wrong(best == labels_of(text, anchors, n_slots))


def tree_rounds(record: Record, shape: TreeShape, n_tokens: int, pairwise: bool) -> list[int]:
    """Accepted drafts of every round with trees of one shape."""

    def depth_at(i: int) -> int:
        single, pair = record.single[i], record.pair[i] if pairwise else None

        def scores(slot: int, before: int) -> Sequence[float]:
            return single[slot] if pair is None else pair[slot][max(before, 0)]

        return depth_held(build_tree(scores, shape), record.truth[i][: shape.depth])

    return play(depth_at, n_tokens)


@dataclass
class Tally:
    """Sums over texts; plain lists and numbers, so that a run can stop and go on.

    Attributes:
        texts: per policy, rounds and tokens of every text.
        accepted: per policy, rounds that accepted the draft of each slot.
        n_rounds: per policy, rounds.
        hits: per draft, how often the true token was among the best k at each slot, `[len(HITS)][S]`.
        n_anchors: per draft, anchors counted in `hits`.
        repeats: repetition rate of every text.
        done: prompts that are finished.
    """

    texts: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    accepted: dict[str, list[int]] = field(default_factory=dict)
    n_rounds: dict[str, int] = field(default_factory=dict)
    hits: dict[str, list[list[int]]] = field(default_factory=dict)
    n_anchors: dict[str, int] = field(default_factory=dict)
    repeats: list[float] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def add(self, policy: str, prompt: int, seed: int, accepted: Sequence[int], n_slots: int) -> None:
        """One text played with one policy."""
        row = {"prompt": prompt, "seed": seed, "rounds": len(accepted), "emitted": sum(accepted) + len(accepted)}
        self.texts.setdefault(policy, []).append(row)
        sums = self.accepted.setdefault(policy, [0] * n_slots)
        for n in accepted:
            for k in range(n):
                sums[k] += 1
        self.n_rounds[policy] = self.n_rounds.get(policy, 0) + len(accepted)

    def add_hits(self, name: str, record: Record) -> None:
        """Hit rates of one text."""
        truth = torch.tensor(record.truth)
        rows = torch.stack([((truth >= 0) & (truth < k)).sum(0) for k in HITS])
        if name in self.hits:
            rows = rows + torch.tensor(self.hits[name])
        self.hits[name] = rows.tolist()
        self.n_anchors[name] = self.n_anchors.get(name, 0) + len(truth)


@dataclass(frozen=True)
class Options:
    """What is simulated."""

    n_tokens: int
    budgets: Sequence[int]
    spines: Sequence[int]
    top_k: int
    mtp_slots: Sequence[int]
    blocks: Sequence[int]


class Models:
    """Target and whatever drafts are in a folder, float32."""

    def __init__(self, weights: Path, drafts: Sequence[str]) -> None:
        self.target = load_model(Target, TargetConfig, weights / "target").eval().requires_grad_(False)
        self.drafts = {n: load_model(Draft, DraftConfig, weights / n).eval().requires_grad_(False)
                       for n in ("dflash", "dflash2") if n in drafts and (weights / f"{n}.json").exists()}  # fmt: skip
        has_mtp = "mtp" in drafts and (weights / "mtp.json").exists()
        self.mtp = load_model(MtpHead, TargetConfig, weights / "mtp").eval().requires_grad_(False) if has_mtp else None


def play_text(models: Models, text: Tensor, n_prompt: int, where: tuple[int, int], options: Options, tally: Tally) -> None:
    """Play one text with every draft and policy."""
    n = options.n_tokens
    anchors = torch.arange(n_prompt, n_prompt + n - 1, device=DEVICE)
    for name, draft in models.drafts.items():
        for size in options.blocks:
            record, slots = record_draft(models.target, draft, text, anchors, size), size - 1
            tally.add_hits(f"{name} block {size}", record)
            tally.add(f"{name} chain {slots}", *where, play(record.chain.__getitem__, n), slots)
            for budget in options.budgets:
                for spine in options.spines:
                    shape = TreeShape(budget, options.top_k, spine, slots)
                    label = f"{name} block {size} tree {budget}" + (f" spine {spine}" if spine else "")
                    tally.add(label, *where, tree_rounds(record, shape, n, False), slots)
                    if record.pair:
                        tally.add(f"{label} pairwise", *where, tree_rounds(record, shape, n, True), slots)
    if models.mtp is not None:
        longest = record_mtp(models.target, models.mtp, text, anchors, max(options.mtp_slots))
        for slots in options.mtp_slots:
            capped = [min(v, slots) for v in longest]
            tally.add(f"mtp chain {slots}", *where, play(capped.__getitem__, n), slots)


def simulate(
    models: Models, prompts: Sequence[Sequence[int]], temperature: float, n_seeds: int, options: Options, tally: Tally, until: float
) -> bool:
    """Play the prompts that are not done yet; False when the time was up before."""
    for i, prompt in enumerate(prompts):
        if i in tally.done:
            continue
        if time.monotonic() > until:
            return False
        torch.manual_seed(1000 * i + 17)
        texts = write_texts(models.target, prompt, temperature, n_seeds, options.n_tokens + LOOKAHEAD)
        for seed, text in enumerate(texts):
            tally.repeats.append(repetition_rate(text[len(prompt) : len(prompt) + options.n_tokens].tolist()))
            play_text(models, text, len(prompt), (i, seed), options, tally)
        tally.done.append(i)
    return True


def parser() -> argparse.ArgumentParser:
    """Options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weights", type=Path, required=True)
    p.add_argument("--tokenizer", type=Path, required=True)
    p.add_argument("--prompts", type=Path, nargs="+", required=True)
    p.add_argument("--out", type=Path, required=True, help="an unfinished file is continued")
    p.add_argument("--drafts", default="dflash,dflash2,mtp")
    p.add_argument("--blocks", type=int, nargs="+", default=[16, 8])
    p.add_argument("--n-prompts", type=int, help="of every file")
    p.add_argument("--n-tokens", type=int, default=128)
    p.add_argument("--seeds", type=int, default=10, help="texts per prompt at temperature 0.8")
    p.add_argument("--budgets", type=int, nargs="*", default=[8, 15, 22, 31, 63])
    p.add_argument("--spines", type=int, nargs="*", default=[0])
    p.add_argument("--top-k", type=int, default=N_CANDIDATES)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--seconds", type=float, default=1e9, help="stop after this time; run again to go on")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate at temperatures 0 and 0.8; exit status 3 when there is more to do."""
    args = parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    until = time.monotonic() + args.seconds
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    texts = [entry["text"] for path in args.prompts for entry in json.loads(path.read_text())["prompts"][: args.n_prompts]]
    prompts = [tokenizer.encode(text).ids for text in texts]
    options = Options(args.n_tokens, args.budgets, args.spines, args.top_k, (3, 7), args.blocks)
    models = Models(args.weights, args.drafts.split(","))
    known = json.loads(args.out.read_text())["temperatures"] if args.out.exists() else {}
    tallies = {str(t): Tally(**known.get(str(t), {})) for t in args.temperatures}
    finished = True
    for t in args.temperatures:
        finished &= simulate(models, prompts, t, args.seeds if t else 1, options, tallies[str(t)], until)
    shapes = {"n_tokens": args.n_tokens, "top_k": args.top_k, "n_prompts": len(prompts), "seeds": args.seeds}
    out = {"options": shapes, "temperatures": known | {t: asdict(tally) for t, tally in tallies.items()}}
    args.out.write_text(json.dumps(out) + "\n")
    print({t: f"{len(tally.done)} of {len(prompts)} prompts" for t, tally in tallies.items()}, flush=True)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main())
