"""Drafting in this process: `SpecConfig`, `SpecStats`, and the C interface of common/llama-speculative-dflash.h.

Importing this loads no native library; the first `Speculative` does.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

from llama_dflash import gguf
from llama_dflash.errors import BuildError, DFlashError, UsageError
from llama_dflash.spec import BUDGET_LIMIT, ROLLBACKS, RunConfig

VERSION = 1
PARTIAL_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

# enum ggml_type of what a draft's cache may hold
CACHE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


class SpeculativeError(DFlashError, RuntimeError):
    """Drafting could not be set up, or a round failed; what `llama_cpp` raises RuntimeError for."""


@dataclass(frozen=True)
class SpecConfig:
    """How a `Llama` drafts.

    Attributes:
        tree: nodes of a draft tree per round, its root not counted; None drafts chains.
        n_max: drafted tokens in a row per round: a chain's length, a tree's depth; None means what the draft was trained for.
        top_k: children per node at most; None is llama.cpp's default.
        spine: nodes of the greedy chain that a tree starts with; None is llama.cpp's default.
        rollback: how the target forgets what was not accepted, `replay` or `snapshot`; None takes what it can.
        type_k: type of the draft's keys, such as `q8_0`.
        type_v: type of the draft's values.
        n_threads: threads of the draft; None means the target's.
        n_gpu_layers: layers of the draft on a device; None means the target's number.
    """

    tree: int | None = None
    n_max: int | None = None
    top_k: int | None = None
    spine: int | None = None
    rollback: str | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int | None = None
    n_gpu_layers: int | None = None

    def checked(self, target: Path, draft: Path | None) -> SpecConfig:
        """Return self after checking it against the files; without a draft file only `n_max` and `rollback` may be set.

        Raises:
            ModelFileError, PairingError: a file is unusable, or the pair does not fit.
            UsageError: a number is out of range, or an option cannot be had with the others or with this draft.
            TypeError: something is given instead of a number.
        """
        for name in ("tree", "n_max", "top_k", "spine", "n_threads", "n_gpu_layers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise TypeError(f"{name} is {value!r}, expected a whole number")
        if self.n_threads is not None and self.n_threads < 1:
            raise UsageError(f"n_threads is {self.n_threads}, expected 1 or more", "leave it out for the target's")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                raise UsageError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(CACHE_TYPES)}")
        if draft is not None:
            n_max, budget = self.n_max, self.tree
            RunConfig(target, draft, n_max, budget=budget, top_k=self.top_k, spine=self.spine, rollback=self.rollback).checked()
            return self
        for name in ("tree", "top_k", "spine"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"{name} is {getattr(self, name)} but there is no draft file", "give draft_model_path, or leave it out"
                )
        if self.n_max is not None and not 1 <= self.n_max <= BUDGET_LIMIT:
            raise UsageError(f"n_max is {self.n_max}, expected 1..{BUDGET_LIMIT}")
        if self.rollback not in (None, *ROLLBACKS):
            raise UsageError(f"rollback is {self.rollback!r}, expected {' or '.join(ROLLBACKS)}", "leave it out for the default")
        return self


@dataclass(frozen=True)
class SpecStats:
    """Counts of drafting since a `Llama` was made or its `reset_spec_stats`.

    Attributes:
        n_generations: generations that emitted a token.
        n_tokens: tokens emitted; the first of a generation comes from the prompt's pass.
        n_rounds: passes of the target besides those of prompts.
        n_draft_rounds: those that verified a draft.
        n_nodes: drafted tokens that were verified.
        n_accepted: those that became part of the text.
        accepted_per_depth: of them, how many at depth 1, 2, and so on.
    """

    n_generations: int = 0
    n_tokens: int = 0
    n_rounds: int = 0
    n_draft_rounds: int = 0
    n_nodes: int = 0
    n_accepted: int = 0
    accepted_per_depth: tuple[int, ...] = ()

    @property
    def mean_accepted(self) -> float:
        """Tokens per pass of the target: (n_tokens - n_generations) / n_rounds; 0 without a round."""
        return (self.n_tokens - self.n_generations) / self.n_rounds if self.n_rounds else 0.0


# --------------------------------------------------------------------------------------------------------------------
# the C interface; tests/native/test_c_api.py compares it with the header


class Params(ctypes.Structure):
    """`llama_speculative_dflash_params`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("path_draft", ctypes.c_char_p),
        ("model_draft", ctypes.c_void_p),
        ("type", ctypes.c_char_p),
        ("n_seq", ctypes.c_int32),
        ("n_max", ctypes.c_int32),
        ("budget", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("spine", ctypes.c_int32),
        ("rollback", ctypes.c_int32),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("flash_attn", ctypes.c_int32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("n_gpu_layers", ctypes.c_int32),
        ("verbosity", ctypes.c_int32),
        ("p_min", ctypes.c_float),
    ]


class Stats(ctypes.Structure):
    """`llama_speculative_dflash_stats`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("n_rounds", ctypes.c_int64),
        ("n_draft_rounds", ctypes.c_int64),
        ("n_nodes", ctypes.c_int64),
        ("n_accepted", ctypes.c_int64),
    ]


ROLLBACK_VALUES = {None: 0, "replay": 1, "snapshot": 2}

SampleCallback = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_float),
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.c_void_p,
)
ConsumeCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int32, ctypes.c_void_p)

_HANDLE, _SEQ, _FLAGS, _N = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int32
_TOKENS, _BYTES = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_uint8)

PREFIX = "llama_speculative_dflash_"
# name behind the prefix: result, arguments
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (ctypes.c_char_p, []),
    "version": (ctypes.c_int32, []),
    "default_params": (None, [ctypes.POINTER(Params), ctypes.c_size_t]),
    "open": (_HANDLE, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Params)]),
    "free": (None, [_HANDLE]),
    "mode": (ctypes.c_char_p, [_HANDLE]),
    "mode_text": (ctypes.c_char_p, [_HANDLE]),
    "n_max": (ctypes.c_int32, [_HANDLE]),
    "n_rows": (ctypes.c_int32, [_HANDLE]),
    "begin": (ctypes.c_bool, [_HANDLE, _SEQ, _TOKENS, ctypes.c_size_t]),
    "process": (ctypes.c_bool, [_HANDLE, _SEQ, _TOKENS, ctypes.c_size_t, ctypes.c_int32]),
    "seq_rm": (ctypes.c_bool, [_HANDLE, _SEQ, ctypes.c_int32]),
    "state_size": (ctypes.c_size_t, [_HANDLE, _SEQ, _FLAGS]),
    "state_get": (ctypes.c_size_t, [_HANDLE, _SEQ, _BYTES, ctypes.c_size_t, _FLAGS]),
    "state_set": (ctypes.c_bool, [_HANDLE, _SEQ, _BYTES, ctypes.c_size_t, _FLAGS]),
    "round": (
        ctypes.c_int32,
        [_HANDLE, _SEQ, _N, _N, ctypes.c_void_p, SampleCallback, ConsumeCallback, ctypes.c_void_p, _TOKENS, _N],
    ),
    "round_begin": (ctypes.c_int32, [_HANDLE, _SEQ, _N, _N, _TOKENS, _N]),
    "round_row": (ctypes.c_int32, [_HANDLE]),
    "round_tokens": (_TOKENS, [_HANDLE]),
    "round_parents": (_TOKENS, [_HANDLE]),
    "round_take": (ctypes.c_int32, [_HANDLE, ctypes.c_int32]),
    "round_end": (ctypes.c_int32, [_HANDLE]),
    "get_stats": (ctypes.c_bool, [_HANDLE, _SEQ, ctypes.POINTER(Stats)]),
    "get_accepted": (ctypes.c_int32, [_HANDLE, _SEQ, ctypes.POINTER(ctypes.c_int64), _N]),
    "reset_stats": (None, [_HANDLE]),
}


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """The C functions by their names behind the prefix, from the library that `llama_cpp` uses.

    Raises:
        BuildError: the build has no such library, or an older one.
    """
    from llama_dflash._bindings import llama_cpp

    # The one beside libllama, whose libllama and libggml are those that are loaded.
    path = Path(llama_cpp.llama_cpp._lib._name).with_name("libllama-common.so")
    try:
        library = ctypes.CDLL(str(path))
        found = {name: getattr(library, PREFIX + name) for name in FUNCTIONS}
    except (OSError, AttributeError) as e:
        raise BuildError(
            f"{path} cannot draft ({e}); expected a build with {PREFIX}open", "build or install the package again"
        ) from e
    for name, (result, arguments) in FUNCTIONS.items():
        found[name].restype, found[name].argtypes = result, arguments
    if found["version"]() < VERSION:
        raise BuildError(
            f"{path} has version {found['version']()} of the interface, expected {VERSION}", "build the package again"
        )
    return found


def last_error() -> str:
    """Why the last call of this thread failed."""
    return str(functions()["last_error"]().decode(errors="replace"))


def _tokens(tokens: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(tokens))(*tokens)


class Speculative:
    """A target context that drafts, sequence 0 of it; the calls are those of the header.

    Args:
        model: `llama_model *` of the target.
        context: `llama_context *` of the target; it must outlive this.
        draft: file of the draft; None verifies chains of the caller's, of `config.n_max` tokens at most.
        config: checked against the files.
        n_gpu_layers: of the draft, unless the config says so.
        verbose: whether llama.cpp's common library logs more than errors, in the whole process.

    Raises:
        SpeculativeError: it cannot be had, with the reason.
    """

    def __init__(
        self, model: Any, context: Any, draft: Path | None, config: SpecConfig, *, n_gpu_layers: int = -1, verbose: bool = False
    ) -> None:
        self._handle: Any = None
        self._f = f = functions()
        params = Params()
        f["default_params"](ctypes.byref(params), ctypes.sizeof(params))
        params.path_draft = str(draft).encode() if draft is not None else None
        params.n_max = config.n_max or 0
        params.budget = config.tree or 0
        if config.top_k is not None:
            params.top_k = config.top_k
        if config.spine is not None:
            params.spine = config.spine
        params.rollback = ROLLBACK_VALUES[config.rollback]
        params.type_k, params.type_v = CACHE_TYPES[config.type_k], CACHE_TYPES[config.type_v]
        params.n_threads = params.n_threads_batch = config.n_threads or 0
        params.n_gpu_layers = n_gpu_layers if config.n_gpu_layers is None else config.n_gpu_layers
        params.verbosity = 3 if verbose else 1
        if draft is not None and gguf.read(draft).draft_format == "DSpark":
            params.type = b"draft-dspark"
        handle = f["open"](ctypes.cast(model, ctypes.c_void_p), ctypes.cast(context, ctypes.c_void_p), ctypes.byref(params))
        if not handle:
            raise SpeculativeError(f"no drafts: {last_error()}", "leave the draft out to decode plainly")
        self._handle = ctypes.c_void_p(handle)
        # The two calls per token.
        self._round_row, self._round_take = f["round_row"], f["round_take"]

    def close(self) -> None:
        """Free it; before the target context."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._f["free"](handle)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._handle is None

    @property
    def _open(self) -> Any:
        if self._handle is None:
            raise SpeculativeError("it is closed, expected an open context")
        return self._handle

    @property
    def mode(self) -> str:
        """`tree` or `chain`."""
        return str(self._f["mode"](self._open).decode())

    @property
    def mode_text(self) -> str:
        """One line with everything that is in effect."""
        return str(self._f["mode_text"](self._open).decode(errors="replace"))

    @property
    def n_max(self) -> int:
        """The most drafted tokens in a row."""
        return int(self._f["n_max"](self._open))

    def begin(self, tokens: Sequence[int]) -> None:
        """A generation starts behind these tokens of the context."""
        self._check(self._f["begin"](self._open, 0, _tokens(tokens), len(tokens)))

    def process(self, tokens: Sequence[int], pos: int) -> None:
        """The target just decoded these tokens from `pos` on."""
        self._check(self._f["process"](self._open, 0, _tokens(tokens), len(tokens), pos))

    def seq_rm(self, pos: int) -> None:
        """The target forgot what it knew from `pos` on."""
        self._check(self._f["seq_rm"](self._open, 0, pos))

    def state_get(self, flags: int = 0) -> bytes:
        """The draft's part of a saved sequence."""
        size = self._f["state_size"](self._open, 0, flags)
        data = (ctypes.c_uint8 * size)()
        self._check(size > 0 and self._f["state_get"](self._open, 0, data, size, flags) == size)
        return bytes(data)

    def state_set(self, state: bytes, flags: int = 0) -> bool:
        """Take a saved state back; False: the draft knows nothing of the sequence now."""
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        return bool(self._f["state_set"](self._open, 0, data, len(state), flags))

    def round_begin(self, id_last: int, n_remaining: int, draft: Sequence[int] = ()) -> int:
        """Draft behind `id_last`, or take a given chain, and decode; the row of the root."""
        n = self._f["round_begin"](self._open, 0, id_last, n_remaining, _tokens(draft) if draft else None, len(draft))
        self._check(n > 0)
        return int(self._round_row(self._open))

    def round_take(self, token: int) -> int | None:
        """Go on with a token sampled at the row; the next row, or None if it was not drafted."""
        taken = self._round_take(self._open, token)
        self._check(taken >= 0)
        return int(self._round_row(self._open)) if taken else None

    def round_end(self) -> int:
        """Make what was taken part of the sequence; its length, `id_last` included."""
        n = int(self._f["round_end"](self._open))
        self._check(n > 0)
        return n

    def round_drop(self) -> None:
        """End a round if one is open; what it leaves in the context is not to be used."""
        self._f["round_end"](self._open)

    def stats(self) -> tuple[Stats, tuple[int, ...]]:
        """The counts, and the drafts accepted per depth."""
        stats = Stats(size=ctypes.sizeof(Stats))
        self._check(self._f["get_stats"](self._open, 0, ctypes.byref(stats)))
        accepted = (ctypes.c_int64 * self.n_max)()
        self._check(self._f["get_accepted"](self._open, 0, accepted, len(accepted)) == len(accepted))
        return stats, tuple(accepted)

    def reset_stats(self) -> None:
        """Count anew."""
        self._f["reset_stats"](self._open)

    @staticmethod
    def _check(ok: bool) -> None:
        if not ok:
            raise SpeculativeError(last_error())

    def __enter__(self) -> Speculative:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close()
