"""The operators around a draft tree on the CPU, through ctypes: convolution, packed rows, commit of accepted tokens.

test-backend-ops compares the CPU with itself, so it shows nothing here. Bits are checked: a path of a tree must get what
ggml_ssm_conv gives for its tokens alone, a committed state what ggml_gated_delta_net makes of them, and what an operator
has no business with must stay as it was. Arrays are ggml's layouts read backwards, outermost dimension first.

One file over 400 lines: the worker imports it by name, and the three operators share what drives them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tree_lib import WorkerDied

# Largest difference from float64, over the sum of the products' sizes: up to nine roundings of 2**-24.
TOLERANCE = 1e-6

Tree: TypeAlias = list[int]
Run: TypeAlias = Callable[..., Any]


def random_tree(rng: np.random.Generator, n: int) -> Tree:
    """Parents, each before its children; row 0 is the root and its own parent."""
    return [0, *(int(rng.integers(0, i)) for i in range(1, n))]


def path_to(parents: Tree, row: int) -> list[int]:
    rows = [row]
    while rows[-1]:
        rows.append(parents[rows[-1]])
    return rows[::-1]


# --------------------------------------------------------------------------------------------------------------------
# only in the worker


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 26, np.dtype(np.int64): 27}


@functools.cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libggml-base and libggml-cpu of the build that LLAMA_DFLASH_NATIVE names."""
    folder = Path(os.environ["LLAMA_DFLASH_NATIVE"]) / "_vendor" / "llama_cpp" / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    cpu.ggml_cpu_init()
    return base, cpu


class Graph:
    """A ggml context with room for its tensors, and one operator."""

    def __init__(self, n_bytes: int) -> None:
        self.base, self.cpu = libraries()
        self.base.ggml_init.restype = ctypes.c_void_p
        self.ctx = ctypes.c_void_p(self.base.ggml_init(InitParams(n_bytes, None, False)))

    def call(self, name: str, *args: Any) -> ctypes.c_void_p:
        """A function of libggml-base that takes the context and gives a tensor; integers are int64_t or size_t."""
        function = getattr(self.base, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(self.ctx, *(ctypes.c_int64(x) if isinstance(x, int) else x for x in args)))

    def tensor(self, array: np.ndarray) -> ctypes.c_void_p:
        shape = array.shape[::-1]
        ne = (ctypes.c_int64 * len(shape))(*shape)
        t = self.call("ggml_new_tensor", ctypes.c_int(TYPES[array.dtype]), ctypes.c_int(len(shape)), ne)
        self._view(t, array.shape, array.dtype)[...] = array
        return t

    def _view(self, t: ctypes.c_void_p, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self.base.ggml_get_data.restype = ctypes.c_void_p
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = (ctypes.c_char * n_bytes).from_address(self.base.ggml_get_data(t))
        return np.frombuffer(buffer, dtype=dtype).reshape(shape)

    def read(self, t: ctypes.c_void_p, shape: Sequence[int]) -> np.ndarray:
        res: np.ndarray = self._view(t, shape, np.float32).copy()
        return res

    def compute(self, out: ctypes.c_void_p, n_threads: int) -> None:
        graph = self.call("ggml_new_graph")
        self.base.ggml_build_forward_expand(graph, out)
        self.cpu.ggml_graph_compute_with_ctx.restype = ctypes.c_int
        assert self.cpu.ggml_graph_compute_with_ctx(self.ctx, graph, ctypes.c_int(n_threads)) == 0

    def free(self) -> None:
        self.base.ggml_free(self.ctx)


def graph_for(*arrays: np.ndarray) -> Graph:
    return Graph(8 * sum(x.nbytes for x in arrays) + (8 << 20))


def ssm_conv(states: np.ndarray, x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The chain op on `[d_inner, d_conv - 1]` old inputs and `[T, d_inner]` new ones: `[T, d_inner]`."""
    inputs = np.ascontiguousarray(np.concatenate([states, x.T], axis=1)[None])
    graph = graph_for(inputs, c)
    out = graph.call("ggml_ssm_conv", graph.tensor(inputs), graph.tensor(c))
    graph.compute(out, 1)
    res = graph.read(out, x.shape)
    graph.free()
    return res


def ssm_conv_tree(states: np.ndarray, x: np.ndarray, c: np.ndarray, windows: np.ndarray, gap: int, n_threads: int) -> np.ndarray:
    """States `[n_seqs, d_inner, d_conv - 1]`, x `[n_seqs, T, d_inner]`; both are views with `gap` NaN between rows."""
    n_seqs, rows, d_inner = x.shape
    taps = c.shape[1]
    cache = np.pad(states.reshape(n_seqs, -1), ((0, 0), (0, gap)), constant_values=np.nan)
    wide = np.pad(x, ((0, 0), (0, 0), (gap, gap)), constant_values=np.nan)
    graph = graph_for(cache, wide, c, windows)
    view = functools.partial(graph.call, "ggml_view_3d")
    out = graph.call(
        "ggml_ssm_conv_tree",
        view(graph.tensor(cache), taps - 1, d_inner, n_seqs, 4 * (taps - 1), 4 * cache.shape[1], 0),
        view(graph.tensor(wide), d_inner, rows, n_seqs, 4 * wide.shape[2], 4 * rows * wide.shape[2], 4 * gap),
        graph.tensor(c),
        graph.tensor(windows),
    )
    graph.compute(out, n_threads)
    res = graph.read(out, x.shape)
    graph.free()
    return res


def pack_rows(a: np.ndarray, ids: np.ndarray, parts: list[np.ndarray], gap: int, n_threads: int) -> np.ndarray:
    """`a` afterwards; the parts are views with `gap` NaN between rows."""
    wide = [np.pad(x, ((0, 0), (0, gap)), constant_values=np.nan) for x in parts]
    graph = graph_for(a, ids, *wide)
    t = graph.tensor(a)
    views = [
        graph.call("ggml_view_2d", graph.tensor(w), x.shape[1], x.shape[0], 4 * w.shape[1], 0)
        for x, w in zip(parts, wide, strict=True)
    ]
    srcs = (ctypes.c_void_p * len(views))(*views)
    out = graph.call("ggml_pack_rows", t, graph.tensor(ids), srcs, ctypes.c_int(len(views)))
    graph.compute(out, n_threads)
    res = graph.read(t, a.shape)
    np.testing.assert_array_equal(graph.read(out, a.shape), res)
    graph.free()
    return res


def commit(
    s: np.ndarray, r: np.ndarray, rows: np.ndarray, paths: np.ndarray, heads_k: int, n_threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """s `[n_cells, H_v, S, S]` and r `[n_cells, n_channels, d_conv - 1]` afterwards."""
    graph = graph_for(s, r, rows, paths)
    flat = [graph.tensor(x.reshape(len(x), -1)) for x in (s, r)]
    out = graph.call("ggml_gated_delta_net_commit", *flat, graph.tensor(rows), graph.tensor(paths), s.shape[2], heads_k)
    graph.compute(out, n_threads)
    res = graph.read(flat[0], s.shape), graph.read(flat[1], r.shape)
    assert graph.read(out, s.shape).tobytes() == res[0].tobytes()
    graph.free()
    return res


def gated_delta_net(k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray) -> np.ndarray:
    """State `[H_v, S, S]` of the chain op behind tokens k `[T, H_k, S]`, v `[T, H_v, S]`, g and beta `[T, H_v]`."""
    graph = graph_for(k, v, g, beta, state)
    t = [graph.tensor(x[None]) for x in (k, v, g[..., None], beta[..., None], state)]
    out = graph.call("ggml_gated_delta_net", t[0], *t, 1)  # k stands in for q: only the state is read
    graph.compute(out, 1)
    res = graph.read(out, (v.size + state.size,))[v.size :].reshape(state.shape)
    graph.free()
    return res


# --------------------------------------------------------------------------------------------------------------------


def assert_same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@dataclass
class Conv:
    states: np.ndarray
    x: np.ndarray
    c: np.ndarray
    parents: list[Tree]
    windows: np.ndarray

    def out(self, run: Run, gap: int = 0, n_threads: int = 1) -> np.ndarray:
        res: np.ndarray = run(ssm_conv_tree, self.states, self.x, self.c, self.windows, gap, n_threads)
        return res

    def check(self, run: Run, out: np.ndarray) -> None:
        """Every path against the chain op bit by bit, all rows near numpy; padding rows equal the root."""
        for seq, parents in enumerate(self.parents):
            for row in range(len(parents)):
                rows = path_to(parents, row)
                alone = run(ssm_conv, self.states[seq], self.x[seq, rows], self.c)
                assert_same_bits(out[seq, rows], alone)
            for row in range(len(parents), out.shape[1]):
                assert_same_bits(out[seq, row], out[seq, 0])
            inputs = np.concatenate([self.states[seq].T, self.x[seq]]).astype(np.float64)
            for row, parent_path in enumerate(path_to(parents, i) for i in range(len(parents))):
                taps = self.c.shape[1]
                window = [*range(taps - 1), *(taps - 1 + i for i in parent_path)][-taps:]
                products = inputs[window] * self.c.T
                assert (np.abs(out[seq, row] - products.sum(axis=0)) <= TOLERANCE * np.abs(products).sum(axis=0)).all()


def make_conv(parents: list[Tree], rows: int, taps: int = 4, channels: int = 37, seed: int = 0) -> Conv:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    windows = np.empty((len(parents), rows, taps), dtype=np.int32)
    for seq, tree in enumerate(parents):
        for row in range(rows):
            nodes = path_to(tree, row if row < len(tree) else 0)
            windows[seq, row] = [*range(taps - 1), *(taps - 1 + i for i in nodes)][-taps:]
    states, x, c = normal(len(parents), channels, taps - 1), normal(len(parents), rows, channels), normal(channels, taps)
    return Conv(states, x, c, parents, windows.reshape(len(parents), -1))


@pytest.mark.parametrize("taps", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("channels", [1, 37, 300])
def test_convolution_of_paths(run: Run, taps: int, channels: int) -> None:
    """300 channels are more than what is gathered at a time; trees of their own sizes, padded."""
    rng = np.random.default_rng(taps)
    case = make_conv([random_tree(rng, n) for n in (12, 16, 1)], 16, taps, channels)
    out = case.out(run)
    case.check(run, out)
    assert_same_bits(case.out(run, gap=24), out)
    assert_same_bits(case.out(run, n_threads=3), out)


def test_wrong_windows_are_seen(run: Run) -> None:
    """Negative control: a node that continues from its sibling instead of its parent, one input too many from the cell."""
    right = make_conv([[0, 0, 0, 1]], 4)
    assert right.windows.reshape(4, 4).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [2, 3, 4, 6]]
    for row, window in ((3, [2, 3, 5, 6]), (1, [0, 1, 3, 4]), (2, [2, 3, 4, 5])):
        windows = right.windows.copy().reshape(4, 4)
        windows[row] = window
        wrong = replace(right, windows=windows.reshape(1, -1))
        with pytest.raises(AssertionError):
            right.check(run, wrong.out(run))


@pytest.mark.parametrize("value", [-1, 3 + 4])
def test_bad_windows_abort(run: Run, value: int) -> None:
    case = make_conv([[0, 0, 0, 1]] * 2, 4)
    case.windows[1, 5] = value
    with pytest.raises(WorkerDied, match="no such input"):
        case.out(run)


PARTS = ([64], [40, 8, 16, 2, 2], [5, 1, 200, 3, 7, 11])


@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_packed_rows(run: Run, sizes: list[int]) -> None:
    """Rows that no token names keep their bits, NaN among them; the last row is the one of all padding."""
    rng = np.random.default_rng(1)
    for n_tokens, n_padding in ((1, 0), (9, 0), (9, 7)):
        a = rng.integers(0, 2**32, (17, sum(sizes)), dtype=np.uint32).view(np.float32)
        parts = [rng.standard_normal((n_tokens + n_padding, n)).astype(np.float32) for n in sizes]
        ids = np.concatenate([rng.permutation(16)[:n_tokens], np.full(n_padding, 16)]).astype(np.int64)
        expected = a.copy()
        expected[ids[:n_tokens]] = np.concatenate(parts, axis=1)[:n_tokens]
        n_read = 16 if n_padding else 17
        for gap, n_threads in ((0, 1), (8, 1), (3, 4)):
            out = run(pack_rows, a, ids, parts, gap, n_threads)
            assert_same_bits(out[:n_read], expected[:n_read])
        if n_tokens > 1:  # negative control: two tokens that change places
            ids[[0, 1]] = ids[[1, 0]]
            with pytest.raises(AssertionError):
                assert_same_bits(run(pack_rows, a, ids, parts, 0, 1)[:n_read], expected[:n_read])


@pytest.mark.parametrize("value", [-1, 4])
def test_bad_ids_abort(run: Run, value: int) -> None:
    a = np.zeros((4, 6), dtype=np.float32)
    part = np.ones((2, 3), dtype=np.float32)
    with pytest.raises(WorkerDied, match="no such row"):
        run(pack_rows, a, np.array([0, value], dtype=np.int64), [part, part], 0, 1)


@dataclass
class Commit:
    """Packed rows as parts: x `[n_rows, n_channels]`, k `[n_rows, H_k, S]`, v `[n_rows, H_v, S]`, g and beta `[n_rows, H_v]`."""

    s: np.ndarray
    r: np.ndarray
    x: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    paths: list[list[int]]

    def out(self, run: Run, n_threads: int = 1, n_max: int = 0) -> tuple[np.ndarray, np.ndarray]:
        parts = (self.x, self.k, self.v, self.g, self.beta)
        rows = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        # what is behind a path must not be read
        paths = np.full((len(self.paths), 1 + max(n_max, 1, *map(len, self.paths))), 2**30, dtype=np.int32)
        for cell, path in enumerate(self.paths):
            paths[cell, : 1 + len(path)] = [len(path), *path]
        res: tuple[np.ndarray, np.ndarray] = run(commit, self.s, self.r, rows, paths, self.k.shape[1], n_threads)
        return res

    def check(self, run: Run, out: tuple[np.ndarray, np.ndarray]) -> None:
        """States against the chain op, inputs against numpy, bit by bit."""
        for cell, path in enumerate(self.paths):
            state = self.s[cell]
            if path:
                state = run(gated_delta_net, self.k[path], self.v[path], self.g[path], self.beta[path], state)
            assert_same_bits(out[0][cell], state)
            taps = self.r.shape[2]
            assert_same_bits(out[1][cell], np.concatenate([self.r[cell], self.x[path].T], axis=1)[:, -taps:])


def make_commit(
    paths: list[list[int]], size: int = 16, heads: int = 2, repeat: int = 1, channels: int = 50, taps: int = 4
) -> Commit:
    """16 rows like a model's: k of norm 1, gates that let a state live for many tokens.

    Rows of no path are NaN; cells that are left alone have random bits.
    """
    rng = np.random.default_rng(size + taps)
    heads_v = heads * repeat

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    k = normal(16, heads, size)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = rng.uniform(-1.0, -1e-3, (16, heads_v)).astype(np.float32)
    beta = rng.uniform(0.0, 1.0, (16, heads_v)).astype(np.float32)
    case = Commit(
        normal(len(paths), heads_v, size, size), normal(len(paths), channels, taps - 1), normal(16, channels), k,
        normal(16, heads_v, size), g, beta, paths,
    )  # fmt: skip
    unused = sorted(set(range(16)).difference(*paths))
    for part in (case.x, case.k, case.v, case.g, case.beta):
        part[unused] = np.nan
    for cell, path in enumerate(paths):
        if not path:
            for part in (case.s, case.r):
                part[cell] = rng.integers(0, 2**32, part[cell].shape, dtype=np.uint32).view(np.float32)
    return case


PATHS = [[0, 3, 4, 9, 2, 15], [], [7], [8, 9], [], [1, 0, 5]]
SHAPES: dict[str, dict[str, int]] = {
    "plain": {},
    "gqa": {"repeat": 3, "heads": 1, "size": 32},
    "odd": {"size": 5, "heads": 3, "repeat": 2, "channels": 7, "taps": 3},
    "two taps": {"taps": 2},
    "nine taps": {"taps": 9},
    "channels": {"channels": 2500, "size": 64},  # more than a chunk has
    "model": {"size": 128, "heads": 2, "repeat": 3, "channels": 1280},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_committed_paths(run: Run, shape: str) -> None:
    case = make_commit(PATHS, **SHAPES[shape])
    out = case.out(run)
    case.check(run, out)
    for n_threads, n_max in ((4, 0), (1, 40)):
        other = case.out(run, n_threads, n_max)
        assert_same_bits(other[0], out[0])
        assert_same_bits(other[1], out[1])


def test_two_commits_are_one(run: Run) -> None:
    whole = make_commit([[0, 3, 4, 9, 2], [5, 6, 7], [1]])
    first = replace(whole, paths=[[0, 3], [5], []])
    s, r = first.out(run)
    then = replace(whole, s=s, r=r, paths=[[4, 9, 2], [6, 7], [1]])
    for a, b in zip(then.out(run), whole.out(run), strict=True):
        assert_same_bits(a, b)


def test_nothing_accepted(run: Run) -> None:
    case = make_commit([[], []])
    case.check(run, case.out(run))


WRONG_PATHS = {
    "last token forgotten": [[0, 3, 4], [5, 6]],
    "first token forgotten": [[3, 4, 9], [5, 6]],
    "two tokens swapped": [[0, 4, 3, 9], [5, 6]],
    "path of another cell": [[0, 3, 4, 9], [0, 3]],
    "cell left alone": [[0, 3, 4, 9], []],
}


@pytest.mark.parametrize("wrong", WRONG_PATHS)
def test_wrong_paths_are_seen(run: Run, wrong: str) -> None:
    """Negative controls; the state alone and the inputs alone must show them where they differ."""
    right = make_commit([[0, 3, 4, 9], [5, 6]])
    out = replace(right, paths=WRONG_PATHS[wrong]).out(run)
    for seen in (out, (out[0], right.out(run)[1])):
        with pytest.raises(AssertionError):
            right.check(run, seen)
    if wrong != "first token forgotten":  # four taps keep the last three inputs, which are the same then
        with pytest.raises(AssertionError):
            right.check(run, (right.out(run)[0], out[1]))


BAD_PATHS = {
    "length negative": ([-1, 0, 0], "no such length"),
    "length too large": ([3, 0, 0], "no such length"),
    "row negative": ([2, 0, -1], "no such row"),
    "row too large": ([1, 16, 0], "no such row"),
}


@pytest.mark.parametrize("bad", BAD_PATHS)
def test_bad_paths_abort(run: Run, bad: str) -> None:
    case = make_commit([[0, 1], [2, 3]])
    values, message = BAD_PATHS[bad]
    rows = np.zeros((16, 50 + 2 * 16 * 2 + 4), dtype=np.float32)
    paths = np.array([[1, 0, 0], values], dtype=np.int32)
    with pytest.raises(WorkerDied, match=message):
        run(commit, case.s, case.r, rows, paths, 2, 1)


@pytest.mark.parametrize(("op", "n_min"), [("SSM_CONV_TREE", 30), ("PACK_ROWS", 20), ("GATED_DELTA_NET_COMMIT", 50)])
def test_upstream_cases_run(exact_build: Path, op: str, n_min: int) -> None:
    """They compare the CPU with itself; a device's tests need them to run at all."""
    command = [str(exact_build / "tests" / "test-backend-ops"), "test", "-b", "CPU", "-o", op]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    found = re.search(r"(\d+)/(\d+) tests passed", done.stdout)
    assert found
    assert int(found[1]) == int(found[2]) >= n_min
    assert "not supported" not in done.stdout
