"""ggml_gated_delta_net_tree on the CPU against the chain op (bitwise) and against numpy in float64.

test-backend-ops compares the CPU with itself, so it shows nothing here. The arrays go to the driver of
tests/native/ops as files. What an output row may depend on is checked bit by bit: every path from the root to a leaf
must be what ggml_gated_delta_net computes for the tokens of that path alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

spec = importlib.util.spec_from_file_location(
    "gated_delta_net_tree", Path(__file__).resolve().parents[1] / "golden" / "gated_delta_net_tree.py"
)
assert spec is not None
assert spec.loader is not None
golden = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden)

# Largest difference from float64, over the largest output. Rounding of one step is about sqrt(S) * 2**-24 = 7e-7 of the
# state at S = 128, and steps do not amplify it: k has norm 1, beta and exp(g) are below 1. Measured: 2.1e-7 at most, over
# 384 trees of 16 to 64 rows, S 5 to 128, both gates. The wrong orders below are off by 0.19 or more.
TOLERANCE = 2e-6

Tree: TypeAlias = list[int]


def chain(n: int) -> Tree:
    return [max(0, i - 1) for i in range(n)]


def star(n: int) -> Tree:
    return [0] * n


def binary(n: int) -> Tree:
    return [max(0, (i - 1) // 2) for i in range(n)]


def comb(n: int) -> Tree:
    """A chain with a leaf beside every node."""
    return [max(0, (i - 1) // 2 * 2 - 1) for i in range(n)]


def random_tree(rng: np.random.Generator, n: int) -> Tree:
    """Level order, as the builder makes it: parents never decrease."""
    parents = [0]
    for i in range(1, n):
        parents.append(int(rng.integers(parents[-1], min(i, parents[-1] + 4))))
    return parents


@dataclass
class Case:
    """Arrays of one run of the op; shapes as in tests/golden/gated_delta_net_tree.py."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    parents: list[Tree]
    permuted: bool = False
    gap: int = 0  # floats of the cache between two states, and before the first
    steps: np.ndarray | None = None  # None runs the chain op
    slots: int = 0

    def ordered(self) -> Case:
        """This case for the tree op."""
        rows = self.v.shape[1]
        steps = np.stack([golden.order(parents, rows) for parents in self.parents])
        return replace(self, steps=steps, slots=golden.n_slots(steps.reshape(-1, 3)))

    def only_path(self, seq: int, rows: list[int]) -> Case:
        """One sequence, the tokens of one path, for the chain op."""
        seq_k = seq // (self.v.shape[0] // self.q.shape[0])
        q, k = (x[seq_k : seq_k + 1, rows] for x in (self.q, self.k))
        v, g, beta = (x[seq : seq + 1, rows] for x in (self.v, self.g, self.beta))
        return Case(q, k, v, g, beta, self.state[seq : seq + 1], [chain(len(rows))])

    def expected(self) -> np.ndarray:
        out: np.ndarray = golden.tree(self.q, self.k, self.v, self.g, self.beta, self.state, self.parents)
        return out


def make_case(
    parents: list[Tree],
    rows: int,
    *,
    seed: int = 0,
    size: int = 16,
    heads: int = 2,
    repeat: int = 1,
    n_seqs_k: int | None = None,
    kda: bool = False,
    permuted: bool = False,
    gap: int = 0,
) -> Case:
    """Random arrays like a model's: q and k of norm 1, gates that let a state live for many tokens."""
    rng = np.random.default_rng(seed)
    n = len(parents)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q, k = (normal(n_seqs_k or n, rows, heads, size) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = normal(n, rows, heads * repeat, size)
    g = rng.uniform(-1.0, -1e-3, (n, rows, heads * repeat, size if kda else 1)).astype(np.float32)
    beta = rng.uniform(0.0, 1.0, (n, rows, heads * repeat, 1)).astype(np.float32)
    state = normal(n, heads * repeat, size, size)
    return Case(q, k, v, g, beta, state, parents, permuted=permuted, gap=gap)


Starter: TypeAlias = Callable[..., tuple[subprocess.CompletedProcess[str], list[Path]]]
Runner: TypeAlias = Callable[..., list[np.ndarray]]


@pytest.fixture(scope="module")
def driver(exact_build: Path) -> Path:
    path = exact_build / "tests" / "llama-dflash-ops"
    assert path.is_file(), f"{path} is missing: the build was configured without LLAMA_DFLASH_PROBE"
    return path


@pytest.fixture
def start(driver: Path, tmp_path: Path) -> Starter:
    """Write cases as jobs and run the driver on them."""
    n_calls = 0

    def run_driver(cases: list[Case], n_threads: int = 1) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
        nonlocal n_calls
        n_calls += 1
        folders = []
        for i, case in enumerate(cases):
            folder = tmp_path / f"{n_calls}-{i}"
            folder.mkdir()
            write_job(folder, case)
            folders.append(folder)
        command = [str(driver), "CPU", str(n_threads), *map(str, folders)]
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env), folders

    return run_driver


def write_job(folder: Path, case: Case) -> None:
    n_seqs, rows, heads_v, size = case.v.shape
    stride = case.state[0].size + case.gap
    cache = np.full(case.gap + n_seqs * stride, np.nan, dtype=np.float32)
    for seq in range(n_seqs):
        begin = case.gap + seq * stride
        cache[begin : begin + case.state[seq].size] = case.state[seq].ravel()
    values: dict[str, Any] = {
        "tree": int(case.steps is not None), "S": size, "H_k": case.q.shape[2], "H_v": heads_v, "T": rows,
        "n_seqs": n_seqs, "n_seqs_k": case.q.shape[0], "kda": int(case.g.shape[3] == size), "permuted": int(case.permuted),
        "offset": case.gap, "stride": stride, "n_slots": case.slots, "n_runs": 0,
    }  # fmt: skip
    (folder / "job").write_text("".join(f"{key} {value}\n" for key, value in values.items()))
    for name in ("q", "k", "v"):
        x = getattr(case, name)
        np.ascontiguousarray(x.transpose(0, 2, 1, 3) if case.permuted else x).tofile(folder / name)
    for name in ("g", "beta"):
        np.ascontiguousarray(getattr(case, name)).tofile(folder / name)
    cache.tofile(folder / "state")
    if case.steps is not None:
        np.ascontiguousarray(case.steps, dtype=np.int32).tofile(folder / "order")


@pytest.fixture
def run(start: Starter) -> Runner:
    """Outputs `[n_seqs, T, H_v, S]` of cases; the cache that holds the states must come back as it was."""

    def run_cases(cases: list[Case], n_threads: int = 1) -> list[np.ndarray]:
        done, folders = start(cases, n_threads)
        assert done.returncode == 0, done.stderr[-2000:]
        for folder in folders:
            assert (folder / "state_after").read_bytes() == (folder / "state").read_bytes()
        return [
            np.fromfile(folder / "out", dtype=np.float32).reshape(case.v.shape)
            for folder, case in zip(folders, cases, strict=True)
        ]

    return run_cases


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def assert_near_oracle(out: np.ndarray, case: Case) -> None:
    expected = case.expected()
    assert np.abs(out - expected).max() <= TOLERANCE * np.abs(expected).max()


def assert_paths_equal_chains(run: Runner, out: np.ndarray, case: Case) -> None:
    """Every root-to-leaf path, bitwise; padding rows equal the root."""
    paths = [(seq, golden.path(p, leaf)) for seq, p in enumerate(case.parents) for leaf in golden.leaves(p)]
    assert {(seq, row) for seq, rows in paths for row in rows} == {
        (seq, i) for seq, p in enumerate(case.parents) for i in range(len(p))
    }
    chains = run([case.only_path(seq, rows) for seq, rows in paths])
    for (seq, rows), alone in zip(paths, chains, strict=True):
        assert_same_bits(out[seq, rows], alone[0])
    for seq, parents in enumerate(case.parents):
        for row in range(len(parents), out.shape[1]):
            assert_same_bits(out[seq, row], out[seq, 0])


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kda": {"kda": True},
    "gqa": {"repeat": 3},
    "gqa-kda": {"repeat": 3, "kda": True, "size": 32},
    "permuted": {"permuted": True, "repeat": 2},
    "view": {"gap": 40},
    "odd": {"size": 5, "heads": 3, "kda": True},
    "model": {"size": 128, "heads": 2, "repeat": 2, "permuted": True, "gap": 64},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_chain_order_is_the_chain_op(run: Runner, shape: str) -> None:
    for n_seqs in (1, 2, 4):
        case = make_case([chain(9)] * n_seqs, 9, seed=n_seqs, **SHAPES[shape])
        tree_case = case.ordered()
        assert tree_case.slots == 0
        tree_out, chain_out = run([tree_case, replace(case, gap=0)])
        assert_same_bits(tree_out, chain_out)
        assert_near_oracle(tree_out, case)
        assert_near_oracle(chain_out, case)


@pytest.mark.parametrize("shape", SHAPES)
def test_paths_of_random_trees(run: Runner, shape: str) -> None:
    """Trees of one to three sequences with their own sizes, padded to 16 rows."""
    rng = np.random.default_rng(7)
    for seed, n_seqs in enumerate((1, 2, 3)):
        parents = [random_tree(rng, int(rng.integers(2, 17))) for _ in range(n_seqs)]
        case = make_case(parents, 16, seed=seed, **SHAPES[shape]).ordered()
        out = run([case])[0]
        assert_near_oracle(out, case)
        assert_paths_equal_chains(run, out, case)


@pytest.mark.parametrize("make_tree", [star, binary, comb], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("n", "rows"), [(1, 1), (1, 16), (16, 16), (17, 32), (33, 64)])
def test_paths_of_shaped_trees(run: Runner, make_tree: Callable[[int], Tree], n: int, rows: int) -> None:
    case = make_case([make_tree(n)], rows, seed=n).ordered()
    out = run([case])[0]
    assert_near_oracle(out, case)
    assert_paths_equal_chains(run, out, case)


def test_sequences_share_q_and_k(run: Runner) -> None:
    rng = np.random.default_rng(11)
    for n_seqs_k in (1, 2):
        case = make_case([random_tree(rng, 12) for _ in range(4)], 16, n_seqs_k=n_seqs_k, repeat=2).ordered()
        out = run([case])[0]
        assert_near_oracle(out, case)
        assert_paths_equal_chains(run, out, case)


def test_threads_and_more_slots_change_nothing(run: Runner) -> None:
    case = make_case([random_tree(np.random.default_rng(3), 16)] * 2, 16, heads=3).ordered()
    out = run([case])[0]
    assert_same_bits(run([case], n_threads=4)[0], out)
    assert_same_bits(run([replace(case, slots=16)])[0], out)


# Orders that are valid and belong to another tree: (row of steps, column, value). The tree is comb(7), whose steps are
#   {0,-2,0} {2,-1,-1} {1,0,0} {4,-1,-1} {3,0,0} {5,-1,-1} {6,0,-1}
WRONG_ORDERS = {
    "sibling continues from its sibling": (2, 1, golden.KEEP),
    "leaf continues from its sibling": (6, 1, golden.KEEP),
    "child starts from the committed state": (3, 1, golden.START),
    "node is not stored, so its child loads the grandparent": (4, 2, golden.NONE),
}


@pytest.mark.parametrize("wrong", WRONG_ORDERS)
def test_wrong_orders_are_seen(run: Runner, wrong: str) -> None:
    """Negative controls of both checks."""
    case = make_case([comb(7)], 8).ordered()
    assert case.steps is not None
    assert case.steps[0].tolist() == [
        [0, -2, 0], [2, -1, -1], [1, 0, 0], [4, -1, -1], [3, 0, 0], [5, -1, -1], [6, 0, -1], [7, -3, 0],
    ]  # fmt: skip
    row, column, value = WRONG_ORDERS[wrong]
    assert case.steps[0, row, column] != value
    case.steps[0, row, column] = value
    out = run([case])[0]
    with pytest.raises(AssertionError):
        assert_near_oracle(out, case)
    with pytest.raises(AssertionError):
        assert_paths_equal_chains(run, out, case)


def test_wrong_padding_is_seen(run: Runner) -> None:
    case = make_case([star(3)], 4).ordered()
    assert case.steps is not None
    case.steps[0, 3, 2] = 1
    out = run([case])[0]
    with pytest.raises(AssertionError):
        assert_near_oracle(out, case)
    with pytest.raises(AssertionError):
        assert_paths_equal_chains(run, out, case)


# {0,-2,0} {1,-1,-1} {2,0,-1} {3,-3,0} is right: star(3), one row of padding, one slot
BAD_ORDERS = {
    "node too large": (2, [4, 0, -1], "no such node"),
    "node negative": (2, [-1, 0, -1], "no such node"),
    "node twice": (2, [1, 0, -1], "two steps for a node"),
    "no state yet": (0, [0, -1, 0], "no working state to continue with"),
    "src too large": (2, [2, 1, -1], "no such slot to load"),
    "src unknown": (2, [2, -4, -1], "no such slot to load"),
    "slot not stored": (0, [0, -2, -1], "slot is loaded before it is stored"),
    "dst too large": (1, [1, -1, 1], "no such slot to store"),
    "dst negative": (1, [1, -1, -2], "no such slot to store"),
    "copy of no row": (3, [3, -3, 4], "no such row to copy"),
    "copy of a negative row": (3, [3, -3, -1], "no such row to copy"),
    "copy of a later row": (1, [1, -3, 2], "row to copy is not written yet"),
}


@pytest.mark.parametrize("bad", BAD_ORDERS)
def test_bad_orders_abort(start: Starter, bad: str) -> None:
    case = make_case([star(3)] * 2, 4).ordered()
    assert case.steps is not None
    row, step, message = BAD_ORDERS[bad]
    case.steps[1, row] = step
    done, _ = start([case])
    assert done.returncode == -signal.SIGABRT
    assert message in done.stderr


def test_upstream_cases_run(exact_build: Path) -> None:
    """They compare the CPU with itself; a device's tests need them to run at all."""
    command = [str(exact_build / "tests" / "test-backend-ops"), "test", "-b", "CPU", "-o", "GATED_DELTA_NET_TREE"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    found = re.search(r"(\d+)/(\d+) tests passed", done.stdout)
    assert found
    assert int(found[1]) == int(found[2]) >= 72
    assert "not supported" not in done.stdout


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    n = draw(st.integers(1, 70))
    return [0, *(draw(st.integers(0, i - 1)) for i in range(1, n))]


@given(trees(), st.integers(0, 5))
def test_order_visits_every_path_in_few_slots(parents: Tree, padding: int) -> None:
    """Executed with paths instead of states."""
    n = len(parents)
    steps = golden.order(parents, n + padding)
    working: list[int] = []
    slots: dict[int, list[int]] = {}
    for node, src, dst in steps[:n].tolist():
        working = {golden.KEEP: working, golden.START: []}[src] if src < 0 else slots[src]
        working = [*working, node]
        assert working == golden.path(parents, node)
        if dst >= 0:
            slots[dst] = working
    assert sorted(steps[:n, 0].tolist()) == list(range(n))
    assert steps[n:].tolist() == [[row, golden.COPY, 0] for row in range(n, n + padding)]
    assert golden.n_slots(steps) <= max(0, (n + 1).bit_length() - 2)


def test_order_refuses_what_is_no_tree() -> None:
    for parents, rows in (([], 1), ([0, 0], 1), ([1], 1), ([0, 1], 2), ([0, -1], 2), ([0, 2, 0], 3)):
        with pytest.raises(ValueError, match="expected"):
            golden.order(parents, rows)


def test_order_of_a_full_binary_tree_needs_the_most_slots() -> None:
    for depth in range(1, 7):
        assert golden.n_slots(golden.order(binary(2**depth - 1), 2**depth)) == depth - 1
