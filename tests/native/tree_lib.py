"""Draft trees through ctypes, and a worker process that keeps the library out of the test process.

One process can hold one libllama, and the other native tests use other builds. So a test calls
`worker(package).run(function, *args)`: the function, named by module and name, runs in a process that has the build of
that folder loaded, and its result or failure comes back. Only that process may call `native()`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import os
import pickle
import select
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np

F16, Q8_0 = 1, 8  # ggml_type


class Tree(NamedTuple):
    """A draft tree in level order; node 0 is the root, and its parent is itself."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        nodes = [node]
        while nodes[-1]:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def words(self, node: int) -> list[int]:
        """The tokens from the root to `node`."""
        return [self.tokens[i] for i in self.path(node)]

    def leaves(self) -> list[int]:
        inner = set(self.parents[1:])
        return [i for i in range(len(self.tokens)) if i not in inner]


def chain(tokens: Sequence[int]) -> Tree:
    """A tree without branches."""
    return Tree(tuple(tokens), tuple(max(0, i - 1) for i in range(len(tokens))))


@dataclass(frozen=True)
class Params:
    """What a context is made of.

    Attributes:
        n_ctx: cells of each cache; there is one per sequence, or one for all with kv_unified.
        tree: the largest tree, 0 for a context that never sees one.
    """

    n_ctx: int = 2048
    n_batch: int = 1024
    n_ubatch: int = 512
    n_seq_max: int = 4
    kv_unified: bool = False
    flash: bool = True
    type_k: int = F16
    type_v: int = F16
    swa_full: bool = True  # the exact build does not reuse the cells of a window
    n_rs_seq: int = 0
    embeddings: bool = False
    tree: int = 64
    n_threads: int = 1


# --------------------------------------------------------------------------------------------------------------------
# the library: only in the worker

_LOG: deque[str] = deque(maxlen=400)


@functools.cache
def native() -> ModuleType:
    """The bindings of the build that LLAMA_DFLASH_NATIVE names, with their log caught."""
    from llama_dflash._bindings import llama_cpp

    api: ModuleType = llama_cpp.llama_cpp

    def log(level: int, text: bytes, _data: Any) -> None:
        if level in (3, 4):  # warnings and errors
            _LOG.append(text.decode(errors="replace").rstrip("\n"))

    api._tree_log = api.llama_log_callback(log)  # type: ignore[attr-defined]  # it must stay alive
    api.llama_log_set(api._tree_log, ctypes.c_void_p(0))
    api.llama_backend_init()
    return api


# name: mangled symbol, argument types, result type
_TREE_FUNCTIONS: dict[str, tuple[str, list[Any], Any]] = {
    "init": ("_Z15llama_tree_initP13llama_contextj", [ctypes.c_void_p, ctypes.c_uint32], ctypes.c_bool),
    "n_max": ("_Z16llama_tree_n_maxPK13llama_context", [ctypes.c_void_p], ctypes.c_uint32),
    "set_parent": (
        "_Z26llama_batch_ext_set_parentP15llama_batch_extii",
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32],
        ctypes.c_bool,
    ),
    "accept": (
        "_Z17llama_tree_acceptP13llama_contextiPKim",
        [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t],
        ctypes.c_bool,
    ),
}


@functools.cache
def tree_function(name: str) -> Callable[..., Any]:
    """A function of the tree interface; AttributeError names the symbol when the build lacks it."""
    symbol, argtypes, restype = _TREE_FUNCTIONS[name]
    function: Any = getattr(native()._lib, symbol)
    function.argtypes, function.restype = argtypes, restype
    return function  # type: ignore[no-any-return]


@functools.cache
def load_model(path: str) -> Any:
    api = native()
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"{path} does not load: {list(_LOG)[-5:]}")
    return model


@dataclass
class Batch:
    """Rows of a decode; the indices that the methods return are batch indices."""

    rows: list[tuple[int, int, int, int | None, bool]] = field(default_factory=list)  # seq, token, pos, parent, output

    def plain(self, seq: int, tokens: Sequence[int], pos: int, *, output: bool = True) -> list[int]:
        start = len(self.rows)
        self.rows += [(seq, token, pos + i, None, output) for i, token in enumerate(tokens)]
        return list(range(start, len(self.rows)))

    def tree(self, seq: int, tree: Tree, pos: int) -> list[int]:
        start = len(self.rows)
        for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            self.rows.append((seq, token, pos + len(tree.path(i)) - 1, start + parent, True))
        return list(range(start, len(self.rows)))


class Context:
    """A context of one thread over one model file."""

    def __init__(self, path: str, params: Params) -> None:
        api = self.api = native()
        self.params = params
        self.model = load_model(path)
        self.n_vocab: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        p = api.llama_context_default_params()
        for name in ("n_batch", "n_ubatch", "n_seq_max", "kv_unified", "type_k", "type_v", "swa_full", "n_rs_seq", "embeddings"):
            setattr(p, name, getattr(params, name))
        p.n_ctx = params.n_ctx * (1 if params.kv_unified else params.n_seq_max)
        p.n_threads = p.n_threads_batch = params.n_threads
        p.flash_attn_type = int(params.flash)
        p.no_perf = True
        self.ctx = api.llama_init_from_model(self.model, p)
        if not self.ctx:
            raise RuntimeError(f"no context for {path}: {list(_LOG)[-5:]}")
        self.mem = api.llama_get_memory(self.ctx)
        # In a shared cache another sequence may take the cell that the next token does not see: state bytes then differ.
        self.shares_window: bool = params.kv_unified and params.n_seq_max > 1 and api.llama_model_n_swa(self.model) > 0
        self._abort: Any = None
        if params.tree and not self.tree_init(params.tree):
            raise RuntimeError(f"{path}: {self.log(5)}")

    def close(self) -> None:
        if self.ctx:
            self.api.llama_free(self.ctx)
            self.ctx = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # decoding

    def process(self, batch: Batch) -> int:
        """Decode the rows; the status of llama_process."""
        made = self.make(batch)
        try:
            return self.run(made)
        finally:
            self.api.llama_batch_ext_free(made)

    def make(self, batch: Batch) -> Any:
        """The rows as a llama_batch_ext, to be freed by the caller."""
        api = self.api
        b = api.llama_batch_ext_init(self.ctx)
        for i, (seq, token, pos, parent, output) in enumerate(batch.rows):
            added = api.llama_batch_ext_add_token(b, seq, token)
            assert added == i, f"row {i} was not added: {added}"
            assert api.llama_batch_ext_set_pos(b, i, (ctypes.c_int32 * 4)(pos, pos, pos, 0))
            api.llama_batch_ext_set_output_logits(b, i, output)
            if parent is not None:
                assert tree_function("set_parent")(b, i, parent), f"set_parent({i}, {parent}) was refused"
        return b

    def run(self, made: Any) -> int:
        """Decode what `make` made; the status of llama_process."""
        return int(self.api.llama_process(self.ctx, self.api.LLAMA_PROCESS_TYPE_DECODE, made))

    def plain(self, seq: int, tokens: Sequence[int], pos: int | None = None, *, n_batch: int | None = None) -> np.ndarray:
        """Decode tokens behind the sequence's last position, in batches of n_batch; the logits of each token."""
        pos = self.pos_max(seq) + 1 if pos is None else pos
        rows = []
        step = n_batch or self.params.n_batch
        for i in range(0, len(tokens), step):
            batch = Batch()
            idxs = batch.plain(seq, tokens[i : i + step], pos + i)
            status = self.process(batch)
            assert status == 0, f"plain decode: status {status}: {self.log(3)}"
            rows += [self.logits(j) for j in idxs]
        return np.stack(rows) if rows else np.empty((0, self.n_vocab), np.float32)

    def tree(self, seq: int, tree: Tree, pos: int | None = None) -> tuple[int, list[int]]:
        """Decode one tree; the status and the batch indices of its nodes."""
        batch = Batch()
        idxs = batch.tree(seq, tree, self.pos_max(seq) + 1 if pos is None else pos)
        return self.process(batch), idxs

    def logits(self, i: int) -> np.ndarray:
        p = self.api.llama_get_logits_ith(self.ctx, i)
        assert p, f"no logits of row {i}: {self.log(3)}"
        return np.array(np.ctypeslib.as_array(p, shape=(self.n_vocab,)))

    # trees

    def tree_init(self, n: int) -> bool:
        return bool(tree_function("init")(self.ctx, n))

    def tree_n_max(self) -> int:
        return int(tree_function("n_max")(self.ctx))

    def accept(self, seq: int, idxs: Sequence[int]) -> bool:
        return bool(tree_function("accept")(self.ctx, seq, (ctypes.c_int32 * max(1, len(idxs)))(*idxs), len(idxs)))

    # memory

    def pos_max(self, seq: int) -> int:
        return int(self.api.llama_memory_seq_pos_max(self.mem, seq))

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        return bool(self.api.llama_memory_seq_rm(self.mem, seq, p0, p1))

    def seq_cp(self, src: int, dst: int) -> None:
        self.api.llama_memory_seq_cp(self.mem, src, dst, -1, -1)

    def seq_keep(self, seq: int) -> None:
        self.api.llama_memory_seq_keep(self.mem, seq)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.mem, True)

    def state(self, seq: int, *, partial: bool = False) -> bytes:
        """The saved sequence; `partial` leaves out the attention cache, as checkpoints do."""
        flags = int(partial)  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self.api.llama_state_seq_get_size_ext(self.ctx, seq, flags)
        data = (ctypes.c_uint8 * size)()
        written = self.api.llama_state_seq_get_data_ext(self.ctx, data, size, seq, flags)
        assert written == size, f"state of sequence {seq}: {written} of {size} bytes: {self.log(3)}"
        return bytes(data)

    def set_state(self, seq: int, state: bytes, *, partial: bool = False) -> None:
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        done = self.api.llama_state_seq_set_data_ext(self.ctx, data, len(state), seq, int(partial))
        assert done == len(state), f"state of sequence {seq} was not taken: {self.log(3)}"

    # the rest

    @contextlib.contextmanager
    def abort_after(self, n: int) -> Iterator[list[int]]:
        """Abort a decode at its n-th question; yields a list that holds the number of questions asked."""
        asked = [0]

        def stop(_data: Any) -> bool:
            asked[0] += 1
            return asked[0] > n

        callback = self.api.ggml_abort_callback(stop)
        self.api.llama_set_abort_callback(self.ctx, callback, None)
        try:
            yield asked
        finally:
            self._abort = self.api.ggml_abort_callback(lambda _data: False)
            self.api.llama_set_abort_callback(self.ctx, self._abort, None)

    @staticmethod
    def log(n: int) -> list[str]:
        """The last log lines."""
        return list(_LOG)[-n:]

    @staticmethod
    def clear_log() -> None:
        _LOG.clear()


# --------------------------------------------------------------------------------------------------------------------
# the worker


class CheckFailed(AssertionError):
    """A check failed in the worker."""


class WorkerDied(CheckFailed):
    """The worker process ended, for example through GGML_ASSERT."""


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


class Worker:
    """A process with one build loaded; it is started when it is needed, and again after it died."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> Any:
        """Run a module-level function in the worker.

        Raises:
            CheckFailed: it raised there; the text holds the traceback and the last log lines.
            WorkerDied: the process ended, or took longer than `timeout` seconds.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, (function.__module__, function.__name__, args, kwargs))
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise TimeoutError
            ok, value, log = _receive(process.stdout)
        except (EOFError, BrokenPipeError, TimeoutError) as e:
            raise WorkerDied(f"{function.__name__}: {type(e).__name__}, {self._end()}") from None
        if not ok:
            raise CheckFailed(f"{value}\nlast log lines:\n" + "\n".join(log))
        return value

    def _start(self) -> None:
        env = {**os.environ, "LLAMA_DFLASH_NATIVE": str(self.package), "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        start = "import sys; sys.path.insert(0, sys.argv[1]); import tree_lib; tree_lib.serve()"
        command = [sys.executable, "-c", start, str(Path(__file__).parent)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env)

    def _end(self) -> str:
        """Stop the process; how it ended and the end of what it wrote."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is None or errors is None:
            return ""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
        errors.close()
        # A failed GGML_ASSERT is followed by a long back trace.
        told = [line for line in lines if "GGML_" in line] or lines[-10:]
        return f"exit status {process.returncode}: " + "\n".join(told)

    def close(self) -> None:
        self._end()


@functools.cache
def worker(package: Path) -> Worker:
    """The worker of a build, one per test run."""
    made = Worker(package)
    atexit.register(made.close)
    return made


def serve() -> None:
    """The worker's loop. Replies leave through the original stdout; what C code prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            module, name, args, kwargs = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            value = getattr(importlib.import_module(module), name)(*args, **kwargs)
        except Exception:
            _send(replies, (False, traceback.format_exc(), list(_LOG)[-12:]))
        else:
            _send(replies, (True, value, []))
