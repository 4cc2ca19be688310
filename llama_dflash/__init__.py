"""Draft trees and chains for Qwen3.5-family GGUF models.

`from llama_dflash import Llama` gives llama-cpp-python's class over the patched library that this
package bundles. Import it before `llama_cpp`, if you use both. Everything here is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_dflash.errors import DFlashError
    from llama_dflash.llama import Llama
    from llama_dflash.speculative import SpecConfig, SpecStats

__version__ = "0.1.0"
__all__ = ["DFlashError", "Llama", "SpecConfig", "SpecStats", "__version__"]

_HOMES = {
    "DFlashError": "llama_dflash.errors",
    "Llama": "llama_dflash.llama",
    "SpecConfig": "llama_dflash.speculative",
    "SpecStats": "llama_dflash.speculative",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llama_dflash' has no attribute {name!r}")
