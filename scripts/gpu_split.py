#!/usr/bin/env python3
"""Where the time of a verify round goes, from a trace of the GPU (scripts/gpu/trace.c).

    gpu_split.py TRACE [--round-ms MS] [--mode NAME] [--out FILE.json]      pieces of every round, for gpu_bench.py --split
    gpu_split.py TRACE --kernels [N]                                        the N kernels that take most of a round

Tracing makes the host slower, so that the GPU waits longer than it does without it. `--round-ms` is the time of a round
without the trace: host_gaps is then that time less what the GPU was busy and less launch_gaps, the pauses of some
microseconds between kernels that were already queued.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

VERIFY = "gated_delta_net_tree"
COMMIT = "gated_delta_net_commit"
PASS_GAP_NS = 4_000_000  # between the last such kernel of a pass and the first of the next: drafting comes in between
PIECE_GAP_NS = 20_000  # of the draft's stream: between the injection of features and the pass over a block
LAUNCH_GAP_NS = 10_000  # a longer pause is the host's
N_WARM_UP = 4  # rounds in which graphs are captured


@dataclass(frozen=True)
class Event:
    """A kernel, copy or fill."""

    start: int
    end: int
    stream: int
    kind: str
    size: int
    name: str


def read(path: Path) -> list[Event]:
    """The events of a trace, by start."""
    events = []
    for line in path.read_text().splitlines():
        start, end, stream, kind, size, name = line.split(" ", 5)
        events.append(Event(int(start), int(end), int(stream), kind, int(size), name))
    return sorted(events, key=lambda e: e.start)


def rounds(events: Sequence[Event]) -> list[list[Event]]:
    """Events from the first delta net of a verify pass to that of the next, without the rounds that warm up.

    Rounds of different requests are cut where more than one pass of another kind lies between them.
    """
    starts: list[int] = []
    last = -PASS_GAP_NS
    for e in events:
        if VERIFY in e.name:
            if e.start - last > PASS_GAP_NS:
                starts.append(e.start)
            last = e.end
    spans = list(itertools.pairwise(starts))
    usual = statistics.median(b - a for a, b in spans) if spans else 0
    spans = [(a, b) for a, b in spans[N_WARM_UP:] if b - a < 2 * usual]
    found = []
    at = 0
    for a, b in spans:
        while events[at].start < a:
            at += 1
        end = at
        while end < len(events) and events[end].start < b:
            end += 1
        found.append(list(events[at:end]))
    return found


def busy_ms(events: Iterable[Event]) -> float:
    """Time in which at least one of them runs."""
    total, until = 0, 0
    for e in sorted(events, key=lambda e: e.start):
        total += max(0, e.end - max(until, e.start))
        until = max(until, e.end)
    return total / 1e6


def launch_gaps_ms(events: Sequence[Event]) -> float:
    """Short pauses between one and the next."""
    total, until = 0, events[0].end
    for e in events[1:]:
        total += e.start - until if 0 < e.start - until < LAUNCH_GAP_NS else 0
        until = max(until, e.end)
    return total / 1e6


def pieces(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of the pieces of one round: GPU time, but for walk, the host's between outputs and injection.

    commit runs beside inject and draft, so they add up to more than busy; walk is as traced, and a part of host_gaps.
    """
    target = next(e.stream for e in events if VERIFY in e.name)
    commit = [e for e in events if COMMIT in e.name]
    verify = [e for e in events if e.stream == target and COMMIT not in e.name and e.kind[0] != "C"]
    back = [e for e in events if e.kind == "C2" and e.stream == target]
    clusters: list[list[Event]] = []
    for e in (e for e in events if e.stream != target and e.kind[0] == "K"):
        if not clusters or e.start - max(x.end for x in clusters[-1][-8:]) > PIECE_GAP_NS:
            clusters.append([])
        clusters[-1].append(e)
    draft = [e for c in clusters if any("flash_attn" in e.name for e in c) for e in c]
    inject = [e for c in clusters if not any("flash_attn" in e.name for e in c) for e in c]
    parts = {"verify": verify, "outputs_to_host": back, "commit": commit, "inject": inject, "draft": draft}
    arrived = max((e.end for e in back), default=0)
    injected = min((e.start for e in events if e.stream != target and e.start > arrived), default=arrived)
    return {**{name: busy_ms(part) for name, part in parts.items()}, "walk": (injected - arrived) / 1e6}


def split(events: Sequence[Event], round_ms: float | None) -> dict[str, list[float]]:
    """Pieces of every round."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for one in rounds(events):
        for name, ms in pieces(one).items():
            found[name].append(ms)
        busy = busy_ms(one)
        queued = launch_gaps_ms(one)
        found["gpu_busy"].append(busy)
        found["launch_gaps"].append(queued)
        traced = (one[-1].end - one[0].start) / 1e6
        found["host_gaps"].append((round_ms if round_ms is not None else traced) - busy - queued)
        found["graph_kernels"].append(sum(e.size for e in one if e.kind == "K"))
        found["kernels"].append(sum(e.kind == "K" for e in one))
    return dict(found)


def kernels(events: Sequence[Event], n: int) -> str:
    """Table of the kernels of a middle round."""
    found = rounds(events)
    one = found[len(found) // 2]
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for e in one:
        name = e.name if e.kind == "K" else {"C1": "copy to the device", "C2": "copy to the host"}.get(e.kind, "copy or fill")
        total[name] += e.end - e.start
        count[name] += 1
    lines = [f"{sum(total.values()) / 1e6:.2f} ms in {sum(count.values())} launches"]
    lines += [f"{ns / 1e3:9.1f} us n={count[name]:4d}  {name[:100]}" for name, ns in total.most_common(n)]
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--round-ms", type=float)
    parser.add_argument("--mode", default="tree15")
    parser.add_argument("--kernels", type=int, nargs="?", const=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    events = read(args.trace)
    if not rounds(events):
        print(f"gpu_split: {args.trace}: no verify rounds of a draft tree, expected kernels named {VERIFY}", file=sys.stderr)
        return 1
    if args.kernels:
        print(kernels(events, args.kernels))
        return 0
    found = {"mode": args.mode, **{name: [round(v, 3) for v in values] for name, values in split(events, args.round_ms).items()}}
    text = json.dumps(found)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
