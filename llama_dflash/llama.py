"""`Llama`: llama-cpp-python's class over the bundled, patched library."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from typing_extensions import Self

from llama_dflash import gguf
from llama_dflash._bindings import llama_cpp


class Llama(llama_cpp.Llama):  # type: ignore[misc, name-defined]
    """A drop-in for `llama_cpp.Llama`: same arguments, same methods, same results.

    `isinstance(llm, llama_cpp.Llama)` holds, so code that takes llama-cpp-python's class takes this one.
    This version decodes without drafting; `llama-dflash serve` and `run` draft.

    Args:
        model_path: a GGUF file with a target model.
        **kwargs: everything that `llama_cpp.Llama` takes.

    Raises:
        ModelFileError: the file is missing, damaged, or a draft instead of a target.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the object with what `llama_cpp.Llama.__del__` closes, however `__init__` ends."""
        self: Self = super().__new__(cls)
        self._stack = contextlib.ExitStack()
        return self

    def __init__(self, model_path: str | Path, **kwargs: Any) -> None:
        gguf.read(Path(model_path)).require_target()
        super().__init__(model_path=str(model_path), **kwargs)
