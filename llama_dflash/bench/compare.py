"""Where two modes' texts part, and whether arithmetic noise explains it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_dflash.bench.cases import Case
from llama_dflash.bench.run import Job, Pass
from llama_dflash.bench.stats import first_difference
from llama_dflash.builds import Build
from llama_dflash.client import Client
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

N_TOP = 8
# A divergence is noise if the two best tokens were closer than this many noise floors (docs/testing.md).
NOISE_FACTOR = 10.0


def divergences(cases: Sequence[Case], reference: Pass, other: Pass) -> list[dict[str, Any]]:
    """Prompts whose tokens differ: `{"prompt", "position", "reference", "got"}`; `position` counts generated tokens."""
    out = []
    for case, a, b in zip(cases, reference.completions, other.completions, strict=True):
        position = first_difference(a.tokens, b.tokens)
        if position is not None:
            ids = [tokens[position] if position < len(tokens) else None for tokens in (a.tokens, b.tokens)]
            out.append({"prompt": case.name, "position": position, "reference": ids[0], "got": ids[1]})
    return out


def _gaps(logprobs: dict[int, float]) -> dict[int, float]:
    """Distance of each token's logit to the best one's."""
    best = max(logprobs.values())
    return {token: best - value for token, value in logprobs.items()}


def _row(probabilities: dict[str, Any]) -> dict[int, float]:
    return _gaps({int(e["id"]): float(e["logprob"]) for e in probabilities["top_logprobs"]})


def _noise_and_gap(client: Client, job: Job, i_prompt: int, position: int) -> tuple[float, float]:
    """Largest logit difference between decoding token by token and as one batch, and the top-2 gap, at one position.

    Both forms are plain decodes of the same tokens: whatever differs here is arithmetic, not drafting.
    """
    text = job.cases[i_prompt].text
    fields = {"n_probs": N_TOP, **({"ignore_eos": True} if job.ignore_eos else {})}
    body = {"prompt": text, "n_predict": position + 1, "cache_prompt": False, "return_tokens": True}
    reply = client.post("/completion", {**body, **job.sampling.fields(i_prompt), **fields})
    single = _row(reply["completion_probabilities"][position])
    prompt_ids = client.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    batch = _gaps(client.top_logprobs([*prompt_ids, *reply["tokens"][:position]], N_TOP))
    noise = max((abs(batch[t] - single[t]) for t in batch.keys() & single.keys()), default=0.0)
    return noise, sorted(single.values())[1]


def explain(build: Build, config: RunConfig, job: Job, reference: Pass, found: list[dict[str, Any]]) -> float:
    """Add the AR top-2 logit gap and the noise floor to each divergence, in place; returns the noise floor.

    The noise floor is the largest difference that plain decoding with `build` shows between token by token and
    one batch, over the diverged positions and the last positions of the other prompts.
    """
    by_name = {d["prompt"]: d for d in found}
    noise_floor = 0.0
    with Server(build, RunConfig(config.target), extra=("-np", "1", *job.server_flags)) as server:
        for i, (case, done) in enumerate(zip(job.cases, reference.completions, strict=True)):
            divergence = by_name.get(case.name)
            position = divergence["position"] if divergence else len(done.tokens) - 1
            noise, gap = _noise_and_gap(server.client, job, i, position)
            noise_floor = max(noise_floor, noise)
            if divergence:
                divergence["top2_gap"] = round(gap, 6)
    for divergence in found:
        divergence["noise_floor"] = round(noise_floor, 6)
    return noise_floor


def unexplained(found: Sequence[dict[str, Any]], noise_floor: float) -> list[dict[str, Any]]:
    """Divergences with a gap that noise does not explain."""
    return [d for d in found if d["top2_gap"] >= NOISE_FACTOR * noise_floor]
