"""The bundled ctypes bindings against the library that was built.

The bindings copy struct layouts by hand and check nothing at run time, so a struct that a patch (or a new pin)
changes would corrupt memory silently. The C++ probe prints what the compiler laid out; the bindings must agree.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Layout: TypeAlias = dict[str, int]  # "struct" -> size, "struct.field" -> offset, in bytes

# The pinned bindings lack the last field, optimizer_type. Only llama_opt_init takes the struct, and nothing here trains.
KNOWN = ["llama_opt_params: bindings 40, C++ 48"]

# Runs in its own process: the bindings load libllama, which must not stay behind in the test process.
IMPORT_BINDINGS = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[1])
import llama_cpp
from llama_cpp import _ggml, llama_cpp as api, llama_cpp_ext, mtmd_cpp
layout = {}
for struct in vars(api).values():
    if isinstance(struct, type) and issubclass(struct, ctypes.Structure) and struct.__module__ == api.__name__:
        layout[struct.__name__] = ctypes.sizeof(struct)
        for field in getattr(struct, "_fields_", ()):
            layout[f"{struct.__name__}.{field[0]}"] = getattr(struct, field[0]).offset
functions = {}
for module in (api, llama_cpp_ext, mtmd_cpp, _ggml):
    functions[module.__name__] = sum(isinstance(f, ctypes._CFuncPtr) for f in vars(module).values())
print(json.dumps({"files": [llama_cpp.__file__, api._lib._name], "layout": layout, "functions": functions}))
"""


@pytest.fixture(scope="module")
def native_layout(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    out = tmp_path_factory.mktemp("abi")
    subprocess.run([probe, "abi", out], check=True, timeout=60)
    lines = (out / "abi.txt").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def bindings(exact_build: Path) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k not in {"LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAVA_CPP_LIB"}}
    command = [sys.executable, "-I", "-c", IMPORT_BINDINGS, str(exact_build / "llama_dflash" / "_vendor")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"the bindings do not import:\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def differences(python: Layout, native: Layout) -> list[str]:
    """What the two sides disagree on, among the names that the probe printed."""
    return [f"{name}: bindings {python.get(name)}, C++ {value}" for name, value in native.items() if python.get(name) != value]


def test_bindings_and_library_come_from_the_build(bindings: dict[str, Any], exact_build: Path) -> None:
    for path in bindings["files"]:
        assert Path(path).resolve().is_relative_to(exact_build.resolve())


def test_struct_sizes_and_field_offsets(bindings: dict[str, Any], native_layout: Layout) -> None:
    assert differences(bindings["layout"], native_layout) == KNOWN


def test_every_struct_is_compared(bindings: dict[str, Any], native_layout: Layout) -> None:
    """A struct that a new pin adds, or a field of a struct compared by field, has to be added to the probe."""
    by_field = {name.split(".")[0] for name in native_layout if "." in name}
    assert by_field == {"llama_model_params", "llama_context_params", "llama_batch"}
    expected = {name for name in bindings["layout"] if "." not in name or name.split(".")[0] in by_field}
    assert expected == set(native_layout)


@pytest.mark.parametrize("name", ["llama_context_params", "llama_context_params.ctx_other", "llama_batch.logits"])
def test_a_grown_struct_or_moved_field_is_seen(bindings: dict[str, Any], native_layout: Layout, name: str) -> None:
    """Negative control."""
    found = differences(bindings["layout"], {**native_layout, name: native_layout[name] + 8})
    assert [line for line in found if line not in KNOWN] == [
        f"{name}: bindings {bindings['layout'][name]}, C++ {native_layout[name] + 8}"
    ]


def test_every_function_of_the_bindings_resolves(bindings: dict[str, Any]) -> None:
    """The bindings look every symbol up while they are imported; counts guard against a silently skipped module."""
    functions = bindings["functions"]
    assert functions["llama_cpp.llama_cpp"] >= 230
    assert functions["llama_cpp.mtmd_cpp"] >= 80
    assert functions["llama_cpp.llama_cpp_ext"] == 5


def test_mangled_symbols_resolve(exact_build: Path) -> None:
    """llama_cpp_ext.py names C++ symbols; a changed signature changes the mangled name."""
    package = exact_build / "llama_dflash" / "_vendor" / "llama_cpp"
    names = re.findall(r'"(_Z\w+)"', (package / "llama_cpp_ext.py").read_text())
    assert len(names) == 5
    lookup = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); [getattr(lib, name) for name in sys.argv[2:]]"
    command = [sys.executable, "-I", "-c", lookup, str(package / "lib" / "libllama.so")]
    done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    changed = subprocess.run([*command, names[0] + "b"], capture_output=True, text=True, timeout=60, check=False)
    assert "undefined symbol" in changed.stderr  # negative control: one more argument is another symbol
