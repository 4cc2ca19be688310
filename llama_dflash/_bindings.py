"""Make `llama_cpp` in this process the bundled bindings over the patched library.

Two libllama in one process would share one libggml by its name, silently; hence the import guard.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from llama_dflash import _paths
from llama_dflash.builds import INSTALLED, resolve

# Read by the bindings at import; they would replace the bundled library.
_OVERRIDES = ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAVA_CPP_LIB")


def _bindings_init() -> Path:
    native = os.environ.get("LLAMA_DFLASH_NATIVE") or INSTALLED
    if native == INSTALLED:
        return _paths.find("_vendor/llama_cpp/__init__.py")
    return resolve(native).package / "_vendor" / "llama_cpp" / "__init__.py"


def _load() -> ModuleType:
    loaded = sys.modules.get("llama_cpp")
    init = _bindings_init()
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(init):
            return loaded
        raise ImportError(f"llama_cpp was imported first, from {loaded.__file__}; import llama_dflash before llama_cpp")
    spec = importlib.util.spec_from_file_location("llama_cpp", init, submodule_search_locations=[str(init.parent)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{init} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules["llama_cpp"] = module
    saved = {key: os.environ.pop(key) for key in _OVERRIDES if key in os.environ}
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in [n for n in sys.modules if n == "llama_cpp" or n.startswith("llama_cpp.")]:
            del sys.modules[name]
        raise
    finally:
        # mtmd is loaded lazily, so its overrides stay cleared for the life of the process.
        if "LLAMA_CPP_LIB_PATH" in saved:
            os.environ["LLAMA_CPP_LIB_PATH"] = saved["LLAMA_CPP_LIB_PATH"]
    return module


llama_cpp = _load()
