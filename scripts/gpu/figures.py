"""Figures of a benchmark: a median with its spread and the values it comes from."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

KEYS = ("median", "min", "max")
BOTH_SIDES = (
    "ar_ms",
    "chain7_round_ms",
    "chain15_round_ms",
    "rows",
    "pp2048_tok_s",
    "mem_ar_mb",
    "mem_chain15_mb",
    "depths",
    "synth_chain",
)
OURS = (*(f"tree{n}_round_ms" for n in (15, 22, 31, 63)), "round_split_ms", "mem_tree15_mb", "synth_tree15")
TINY = ("ar_tok_s", "chain_tok_s", "tree_tok_s", "equality")


def figure(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, least and largest of the repeats, and the repeats."""
    rounded = [round(float(v), digits) for v in values]
    return {"median": round(statistics.median(rounded), digits + 1), "min": min(rounded), "max": max(rounded), "values": rounded}


def walk(data: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure of a result, with where it stands."""
    if isinstance(data, dict):
        if "values" in data and "median" in data:
            yield path, data
            return
        for key, value in data.items():
            yield from walk(value, f"{path}.{key}" if path else key)


def wrong(data: Any) -> list[str]:
    """Figures whose median or spread is not that of their values; one line each."""
    found = []
    for path, fig in walk(data):
        if not fig["values"]:
            found.append(f"{path}: there are no values, expected one a repeat")
            continue
        again = figure(fig["values"])
        for key in KEYS:
            if key not in fig or abs(again[key] - fig[key]) > 1e-9:
                found.append(f"{path}: {key} is {fig.get(key)}, expected {again[key]}")
    return found


def lacking(data: dict[str, Any]) -> list[str]:
    """What a whole result has and this one has not (yet)."""
    wanted = {"base": BOTH_SIDES, "ours": (*BOTH_SIDES, *OURS), "tiny": TINY}
    return [f"{side}.{key}" for side, keys in wanted.items() for key in keys if data.get(side, {}).get(key) is None]


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with what `new` says; a figure is replaced whole, lists are taken from `new`."""
    out = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict) and "values" not in value
        out[key] = merge(out[key], value) if both else value
    return out
