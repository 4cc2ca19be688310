"""Figures from passes; pure functions. Definitions are in docs/testing.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from llama_dflash.bench.run import Pass
from llama_dflash.spec import RunConfig


def median_and_mad(values: Sequence[float]) -> tuple[float, float]:
    """Median and median absolute deviation of at least one value."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(v - middle) for v in values)


def n_emitted(result: Pass) -> int:
    """Tokens emitted in a pass."""
    return sum(len(c.tokens) for c in result.completions)


def n_rounds(result: Pass) -> int:
    """Target passes after the prompts; the unpatched server does not count them and emits one token in each."""
    return sum(int(c.timings.get("rounds", len(c.tokens) - 1)) for c in result.completions)


def mean_accepted(result: Pass) -> float:
    """(tokens emitted - 1) / rounds over the prompt set: the first token of a prompt comes from its prefill."""
    rounds = n_rounds(result)
    return (n_emitted(result) - len(result.completions)) / rounds if rounds else 0.0


def count(result: Pass, name: str) -> int:
    """Sum of a count in the server's timings; a server that does not count gives 0."""
    return sum(int(c.timings.get(name, 0)) for c in result.completions)


def nodes_per_round(result: Pass) -> float:
    """Drafted tokens per drafted round: the length of a chain, the nodes of a tree without its root."""
    rounds = count(result, "draft_n_rounds")
    return count(result, "draft_n") / rounds if rounds else 0.0


def accept_per_position(result: Pass) -> list[float]:
    """Share of drafted rounds that accepted the draft at each position (in a tree: depth), `[n_max]`."""
    rounds = count(result, "draft_n_rounds")
    counts: list[int] = []
    for c in result.completions:
        row = [int(n) for n in c.timings.get("draft_n_accepted_per_pos", [])]
        counts += [0] * (len(row) - len(counts))
        for i, n in enumerate(row):
            counts[i] += n
    return [round(n / rounds, 4) for n in counts] if rounds else []


def tok_s(result: Pass) -> float:
    """Generated tokens a second over the whole set, prefill and first tokens left out."""
    n = n_emitted(result) - len(result.completions)
    time_s = sum(float(c.timings["predicted_ms"]) for c in result.completions) / 1000.0
    return n / time_s if time_s > 0 else 0.0


def ms_per_round(result: Pass) -> float:
    """Wall time of one round."""
    rounds = n_rounds(result)
    return sum(float(c.timings["predicted_ms"]) for c in result.completions) / rounds if rounds else 0.0


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one differs); None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def mode_figures(passes: Sequence[Pass], config: RunConfig) -> dict[str, Any]:
    """The JSON object of one mode from its repeats; acceptance comes from the first, times from all."""
    first = passes[0]
    speed, speed_mad = median_and_mad([tok_s(p) for p in passes])
    round_ms, round_mad = median_and_mad([ms_per_round(p) for p in passes])
    out: dict[str, Any] = {
        "tok_s": round(speed, 2),
        "tok_s_mad": round(speed_mad, 2),
        "tok_s_repeats": [round(tok_s(p), 2) for p in passes],
        "ms_per_round": round(round_ms, 4),
        "ms_per_round_mad": round(round_mad, 4),
        "emitted": n_emitted(first),
        "rounds": n_rounds(first),
        "mean_accepted": round(mean_accepted(first), 4),
        "effective": first.effective,
    }
    if first.effective["mode"] in ("ar", "unknown"):
        return out
    out["n_max"] = first.effective["n_max"]
    if first.effective["mode"] == "tree":
        # llama.cpp does not tell the spine; 0 is its default.
        out |= {"budget": first.effective["budget"], "top_k": first.effective["top_k"], "spine": config.spine or 0}
    if "rollback" in first.effective:
        out["rollback"] = first.effective["rollback"]
    out["drafted"] = count(first, "draft_n")
    out["accepted"] = count(first, "draft_n_accepted")
    out["nodes_per_round"] = round(nodes_per_round(first), 4)
    out["accept_per_position"] = accept_per_position(first)
    return out
