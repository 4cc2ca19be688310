"""The two builds of the pin, without and with the patches, and the pair with random weights."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vendor
from gpu.record import say

TARGETS = ("llama-server", "llama-bench")
OPTIONS = ("GGML_CUDA=ON", "CMAKE_CUDA_ARCHITECTURES=native", "GGML_NATIVE=ON", "LLAMA_OPENSSL=OFF", "LLAMA_USE_PREBUILT_UI=OFF",
           "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_NUMBER=0", "CMAKE_BUILD_TYPE=Release")  # fmt: skip
SHAPE = "qwen3.5-27b"


def patches_of(side: str) -> list[str]:
    """The patches of a side."""
    return vendor.read_series() if side == "ours" else []


def unpack(side: str, work: Path) -> Path:
    """Sources of a side below `work`; those of the same series stay, whoever put them there."""
    names = patches_of(side)
    tree, stamp = work / side / "src" / "llama.cpp", work / side / "series.txt"
    want = vendor.digest(names)
    if not (tree / "CMakeLists.txt").is_file() or not stamp.is_file() or stamp.read_text().strip() != want:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(work / side / "src", ignore_errors=True)
        (work / side / "src").mkdir(parents=True)
        vendor.prepare(tree, names)
        shutil.rmtree(tree / ".git")
        stamp.write_text(want + "\n")
    return tree


def build(side: str, work: Path, options: Sequence[str] = ()) -> Path:
    """Compile a side, or what is left of it to compile; returns the folder of its programs."""
    started_s = time.monotonic()
    tree, out = unpack(side, work), work / side / "build"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(tree), "-B", str(out), *generator, f"-DLLAMA_BUILD_COMMIT={vendor.read_pin().commit}"]
    configure += [f"-D{option}" for option in (*OPTIONS, *options)]
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(work)}
    with (work / side / "build.log").open("a") as log:
        for command in (configure, ["cmake", "--build", str(out), "-j", str(os.cpu_count() or 2), "--target", *TARGETS]):
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False)
            if done.returncode:
                raise vendor.VendorError(f"{' '.join(command[:3])} exited with {done.returncode}; the log is {log.name}")
    seconds = round(time.monotonic() - started_s)
    facts = {"series_digest": vendor.digest(patches_of(side)), "options": [*OPTIONS, *options], "seconds": seconds}
    (out / "bin" / "gpu_bench.json").write_text(json.dumps(facts, indent=1) + "\n")
    say(f"built {side} in {seconds} s")
    return out / "bin"


def facts(side: str, folder: Path) -> dict[str, Any]:
    """What build() left beside the programs; raises VendorError where it is of another series."""
    path = folder / "gpu_bench.json"
    if not path.is_file():
        return {"series_digest": "unknown: not built by gpu_bench.py"}
    found: dict[str, Any] = json.loads(path.read_text())
    want = vendor.digest(patches_of(side))
    if found["series_digest"] != want:
        raise vendor.VendorError(f"{folder}: series is {found['series_digest']}, expected {want}; build it again")
    return found


def find_gguf(tree: Path) -> None:
    """Make `gguf` importable: where it is not installed, it is that of llama.cpp's tree."""
    if importlib.util.find_spec("gguf") is None:
        sys.path.append(str(tree / "gguf-py"))
    if importlib.util.find_spec("yaml") is None:
        sys.modules["yaml"] = types.ModuleType("yaml")  # gguf reads model cards with it, which nobody does here


def synth(target: Path, draft: Path, work: Path | None, layers: int | None = None) -> None:
    """Write target and draft with random weights, where there are none."""
    if work is not None:
        find_gguf(work / "ours" / "src" / "llama.cpp")
    from llama_dflash import shapes
    from llama_dflash import synth as writer
    from llama_dflash.shapes import layout

    for path, name in ((target, SHAPE), (draft, f"{SHAPE}-dflash")):
        if not path.is_file():
            started_s = time.monotonic()
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = shapes.find(name)
            n_bytes = writer.write(layout.of(shape.shrunk(layers) if layers else shape, "q4_k_m"), path)
            say(f"{path.name}: {n_bytes / 1e9:.1f} GB of random weights in {time.monotonic() - started_s:.0f} s")
