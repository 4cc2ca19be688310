"""What stands in for the models that llama-cpp-python's tests download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import tree_models

TINY = Path(__file__).parents[3] / "llama_dflash" / "models"
TARGET, DRAFT = TINY / "tiny-target.gguf", TINY / "tiny-draft.gguf"


def _random(name: str) -> Path:
    """A model with random weights, written once into the working directory."""
    path = Path(f"{name}.gguf").resolve()
    return path if path.is_file() else tree_models.write(Path.cwd(), name)


def _pooled() -> Path:
    """A model that gives one vector for a text."""
    source, out = gguf.GGUFReader(_random("qwen3")), Path("pooled.gguf").resolve()
    writer = gguf.GGUFWriter(out, "qwen3")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# by repository; the tests want one each that is a hybrid, has attention only, is recurrent, gives embeddings
INSTEAD: dict[str, Callable[[], Path]] = {
    "lmstudio-community/Qwen3.5-0.8B-GGUF": lambda: TARGET,
    "tiiuae/Falcon-H1-Tiny-90M-Instruct-GGUF": lambda: TARGET,
    "ggml-org/models": lambda: _random("qwen3"),
    "QuantFactory/mamba-130m-hf-GGUF": lambda: _random("mamba"),
    "CompendiumLabs/bge-small-en-v1.5-gguf": _pooled,
}


def hf_hub_download(repo_id: str, _filename: str) -> str:
    """The stand-in's path."""
    return str(INSTEAD[repo_id]())


def drafts(model_path: str, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a `Llama` of a test draft: trees on the tiny target, else the last tokens again, as a chain."""
    from llama_dflash.speculative import SpecConfig

    if options.get("vocab_only") or options.get("embedding") or Path(model_path).stem == "mamba":
        return {}  # these cannot
    if model_path == str(TARGET):
        return {"draft_model_path": DRAFT, "spec": SpecConfig(tree=15)}
    return {"draft_model": lambda ids: ids[-3:]}
