"""Small GGUF files and stand-ins for a native build."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from llama_dflash.builds import Build, read_build

INFO = {
    "pin": "0c1e57098bba",
    "bindings": "0.3.36",
    "series_digest": "0123456789abcdef",
    "preset": "cpu",
    "backend": "cpu",
    "backend_reason": "asked for",
    "page": "none",
    "page_reason": "no npm found",
    "exact": "OFF",
    "compiler": "GNU 12.2.0",
}


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file. Keys without a dot get the architecture in front; a value of None leaves a key out.

    Tensor shapes are in GGUF order (`{ne0, ne1}`), all of type F16.
    """

    def make(
        name: str,
        arch: str | None,
        keys: dict[str, Any],
        tensors: dict[str, tuple[int, ...]],
        tokens: list[str] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, arch or "none")
        if arch is None:
            del writer.kv_data[0]["general.architecture"]
        for key, value in keys.items():
            full = key if "." in key else f"{arch}.{key}"
            if isinstance(value, list):
                writer.add_array(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif value is not None:
                writer.add_string(full, value)
        if tokens is not None:
            writer.add_token_list(tokens)
        for tensor, shape in tensors.items():
            writer.add_tensor(tensor, np.zeros(shape[::-1], dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def make_target(make_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A target of 6 layers, hidden size 32 and 8 tokens, with changes."""

    def make(name: str = "target.gguf", arch: str = "qwen35", tokens: list[str] | None = None, **keys: Any) -> Path:
        facts = {"general.name": "t", "block_count": 6, "embedding_length": 32, **keys}
        shapes = {"token_embd.weight": (32, 8), "blk.3.attn_k.weight": (32, 16), "blk.3.attn_v.weight": (32, 8)}
        return make_gguf(name, arch, facts, shapes, list("abcdefgh") if tokens is None else tokens)

    return make


@pytest.fixture
def make_draft(make_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A draft for make_target's model: block size 8, layers 1, 3 and 5; with changes, and with further tensors."""

    def make(
        name: str = "draft.gguf",
        arch: str = "dflash",
        tokens: list[str] | None = None,
        shapes: dict[str, tuple[int, ...] | None] | None = None,
        **keys: Any,
    ) -> Path:
        facts = {"block_count": 2, "embedding_length": 32, "block_size": 8, "target_layers": [1, 3, 5]}
        facts |= {"tokenizer.ggml.mask_token_id": 7, **keys}
        all_shapes = {"fc.weight": (96, 32), "blk.0.attn_k.weight": (32, 16), **(shapes or {})}
        kept = {tensor: shape for tensor, shape in all_shapes.items() if shape is not None}
        return make_gguf(name, arch, facts, kept, list("abcdefgh") if tokens is None else tokens)

    return make


@pytest.fixture
def make_build(tmp_path: Path) -> Callable[..., Build]:
    """A build folder whose `llama-server` is the given Python text."""

    def make(server: str | None = None, name: str = "build", **info: str) -> Build:
        package = tmp_path / name / "llama_dflash"
        (package / "bin").mkdir(parents=True)
        (package / "BUILD_INFO.json").write_text(json.dumps(INFO | info))
        if server is not None:
            program = package / "bin" / "llama-server"
            program.write_text(f"#!{sys.executable} -u\n{server}")
            program.chmod(0o755)
        return read_build(package)

    return make
