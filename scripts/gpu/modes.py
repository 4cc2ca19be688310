"""Modes of drafting, and the server flags of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGETS = (15, 22, 31, 63)
ROWS = (1, 2, 4, 8, 16, 23, 32, 48, 64)
PREFILL = (512, 2048, 8192)
DEPTHS = (0, 8192, 32768)
LENGTHS = (4.8, 6.1, 8.3)  # tokens a round, by lot
TREE_LENGTH = 6.1  # the one that trees have where the length is not what is measured
N_MAX = 15  # of trees, and of chains where nothing else is said


@dataclass(frozen=True)
class Side:
    """One build."""

    name: str
    folder: Path  # with llama-server and llama-bench

    @property
    def server(self) -> Path:
        """llama-server."""
        return self.folder / "llama-server"


@dataclass(frozen=True)
class Mode:
    """Plain decoding (`n_max` 0), a chain, or a tree of `budget` nodes; `length` tokens a round are wanted by lot."""

    name: str
    n_max: int = 0
    budget: int = 0
    length: float | None = None

    def n_tokens(self, n_predict: int) -> int:
        """Tokens of a request: as many rounds as plain decoding has, and more of chains, whose last rounds are cut by the limit."""
        if self.length is not None:
            return round(n_predict * self.length)
        return 2 * n_predict if self.n_max else n_predict


def modes(budgets: Sequence[int] = BUDGETS) -> list[Mode]:
    """Plain, chains of 7 and 15 that accept what the pair gives, trees that accept by lot."""
    chains = [Mode(f"chain{n}", n) for n in (7, 15)]
    return [Mode("ar"), *chains, *(Mode(f"tree{n}", N_MAX, n, TREE_LENGTH) for n in budgets)]


def depths_of(shapes: Path, budget: int) -> list[int]:
    """Depths of the recorded trees of so many nodes."""
    out = []
    for line in shapes.read_text().splitlines():
        parents = [] if line.startswith("#") else [int(word) for word in line.split()]
        if len(parents) == budget:
            depth = [0]
            for parent in parents:
                depth.append(depth[parent] + 1)
            out.append(max(depth))
    return out


def asked_length(depths: Sequence[int], wanted: float, n_max: int = N_MAX) -> float:
    """What --spec-synth-len has to be, so that trees of these depths get `wanted` tokens a round.

    llama-server takes the same chance p at every depth and a length 1 + p + .. + p^n_max, but a round ends where its tree
    does. Where the trees are too flat for `wanted` at all, every round goes to the deepest node.
    """

    def mean(p: float, ends: Sequence[int]) -> float:
        return sum(sum(p**i for i in range(end + 1)) for end in ends) / len(ends)

    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if mean(p, depths) < wanted else (low, p)
    return round(min(mean(high, [n_max]), n_max + 1.0), 4)


@dataclass(frozen=True)
class Plan:
    """Files, sizes and repeats of a benchmark."""

    target: Path
    draft: Path
    shapes: Path | None  # None: trees as the draft gives them, accepted as the target does
    n_ctx: int = 8192
    n_predict: int = 64
    repeats: int = 5
    flags: tuple[str, ...] = ()
    bench_flags: tuple[str, ...] = ()

    def server_flags(self, mode: Mode) -> list[str]:
        """Flags of a server in this mode."""
        flags = [
            "-m",
            str(self.target),
            "-c",
            str(self.n_ctx),
            "-np",
            "1",
            "-fa",
            "on",
            "-ngl",
            "999",
            "-fit",
            "off",
            "--cache-ram",
            "0",
        ]
        if mode.n_max:
            flags += [
                "-md",
                str(self.draft),
                "-ngld",
                "999",
                "--spec-type",
                "draft-dflash",
                "--spec-draft-n-max",
                str(mode.n_max),
            ]
        if mode.budget:
            flags += ["--spec-draft-tree", str(mode.budget)]
        if mode.length is not None:
            flags += ["--spec-synth-len", str(self.asked(mode))]
            if mode.budget and self.shapes is not None:
                flags += ["--spec-synth-tree", str(self.shapes)]
        return [*flags, *self.flags]

    def asked(self, mode: Mode) -> float | None:
        """The length that the server is given."""
        depths = depths_of(self.shapes, mode.budget) if mode.budget and self.shapes is not None else []
        return asked_length(depths, mode.length, mode.n_max) if depths and mode.length is not None else mode.length


def turns(sides: Sequence[Side], todo: Sequence[Mode]) -> Iterator[tuple[Side, Mode]]:
    """Every mode on every side that has it: sides alternate, and so does the one that comes first."""
    for i, mode in enumerate(todo):
        for side in sides if i % 2 == 0 else sides[::-1]:
            if not mode.budget or side.name == "ours":
                yield side, mode
