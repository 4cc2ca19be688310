"""Checks of what `Llama` gets beyond llama-cpp-python's arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llama_dflash import gguf
from llama_dflash._bindings import llama_cpp
from llama_dflash.errors import ModelFileError
from llama_dflash.speculative import SpecConfig


class DraftAsModelFileError(ModelFileError, TypeError):
    """A ModelFileError: a draft was opened as a model."""


def target_path(model_path: Any) -> Path:
    """The target's file, if it is one.

    Raises:
        ModelFileError: it is missing, damaged, or a draft (then a TypeError too).
        TypeError: it is no path.
    """
    if not isinstance(model_path, str | os.PathLike):
        raise TypeError(f"model_path is a {type(model_path).__name__}, expected the path of a GGUF file")
    facts = gguf.read(Path(model_path))
    if facts.is_draft:
        raise DraftAsModelFileError(
            f"{model_path} is a draft (architecture {facts.arch!r}), expected a target model",
            "a draft cannot run alone: pass its target as model_path, and this as draft_model_path",
        )
    return facts.path


def draft_path(path: Any, function: Any, spec: Any) -> Path | None:
    """The draft's file, if one is given; raises TypeError for what does not go together or is something else than asked for."""
    for name, value in (("draft_model_path", path), ("draft_model", function)):
        if isinstance(value, llama_cpp.Llama):
            raise TypeError(
                f"{name} is a Llama, expected the path of the draft's GGUF file as draft_model_path: a draft cannot run alone"
            )
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"draft_model_path is a {type(path).__name__}, expected the path of a GGUF file")
    if function is not None and not callable(function):
        raise TypeError(
            f"draft_model is a {type(function).__name__}, expected a callable; a draft's file goes into draft_model_path"
        )
    if path is not None and function is not None:
        raise TypeError("draft_model_path and draft_model are both given, expected one of them")
    if spec is not None and not isinstance(spec, SpecConfig):
        raise TypeError(f"spec is a {type(spec).__name__}, expected a SpecConfig")
    if spec is not None and path is None and function is None:
        raise TypeError("spec is given without a draft, expected draft_model_path or draft_model")
    return None if path is None else Path(path)
