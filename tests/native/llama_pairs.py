"""Pairs of a `Llama` without drafts and one with them, and what must be equal; for the worker."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_dflash.bench import cases

Pair = tuple[Path, Path]
Run = Callable[..., Any]

PROMPTS = [case.text for case in cases.load("tests", 4)]
SPECS: dict[str, dict[str, Any]] = {
    "chain": {},
    "chain of 4": {"n_max": 4},
    "tree": {"tree": 15},
    "wide tree": {"tree": 31, "top_k": 4, "spine": 4, "type_k": "q8_0"},
}


def new(pair: Pair, spec: dict[str, Any] | None, **kwargs: Any) -> Any:
    from llama_dflash import Llama
    from llama_dflash.speculative import SpecConfig

    options = {"n_ctx": 1024, "n_batch": 256, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
    drafts = {} if spec is None else {"draft_model_path": pair[1], "spec": SpecConfig(**spec)}
    return Llama(pair[0], **{**options, **drafts, **kwargs})


@functools.cache
def plain(pair: Pair) -> Any:
    return new(pair, None)


@functools.cache
def drafting(pair: Pair, name: str) -> Any:
    return new(pair, SPECS[name])


def essence(response: Any) -> Any:
    """What must be equal, of a response or of a list of chunks."""
    if isinstance(response, list):
        return _without_ids([chunk["choices"] for chunk in response])
    return _without_ids(response["choices"]), response["usage"]


def _without_ids(value: Any) -> Any:
    """Tool calls are numbered at random."""
    if isinstance(value, dict):
        return {k: _without_ids(v) for k, v in value.items() if k != "id"}
    return [_without_ids(v) for v in value] if isinstance(value, list) else value


def state_bytes(llm: Any) -> bytes:
    from llama_dflash._bindings import llama_cpp

    api, ctx = llama_cpp.llama_cpp, llm._ctx.ctx
    size = api.llama_state_seq_get_size_ext(ctx, 0, 0)
    data = (ctypes.c_uint8 * size)()
    assert api.llama_state_seq_get_data_ext(ctx, data, size, 0, 0) == size
    return bytes(data)


def assert_same_state(a: Any, b: Any) -> None:
    """Two instances know the same tokens, to the byte."""
    assert a.n_tokens == b.n_tokens
    assert a._input_ids.tolist() == b._input_ids.tolist()
    assert state_bytes(a) == state_bytes(b)
