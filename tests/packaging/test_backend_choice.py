"""CUDA is built only when it is complete or asked for; the reason is told (cmake/Backend.cmake)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shell import ROOT, run

CUDA_PARTS = ("nvcc", "cublas", "driver")


def choose(tmp_path: Path, parts: tuple[str, ...], *defines: str) -> str:
    """Run Backend.cmake with a made-up toolkit; returns `<backend>: <reason>`."""
    root = tmp_path / "cuda"
    bin_dir = root / "bin"
    bin_dir.mkdir(parents=True)

    def tool(path: Path, code: int) -> None:
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)

    if "nvcc" in parts:
        tool(bin_dir / "nvcc", 0)
    if "cublas" in parts:
        (root / "include").mkdir()
        (root / "include" / "cublas_v2.h").touch()
        (root / "lib64").mkdir()
        (root / "lib64" / "libcublas.so").touch()
    tool(bin_dir / "nvidia-smi", 0 if "driver" in parts else 9)
    script = tmp_path / "run.cmake"
    # Script mode knows no platform; a project sets these two by itself.
    script.write_text(
        "set(CMAKE_FIND_LIBRARY_PREFIXES lib)\nset(CMAKE_FIND_LIBRARY_SUFFIXES .so)\n"
        f'set(CUDAToolkit_ROOT "{root}")\ninclude("{ROOT}/cmake/Backend.cmake")\n'
    )
    done = run("cmake", *defines, "-P", script, env={"PATH": f"{bin_dir}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stdout.splitlines() if "llama-dflash: building for" in x)
    return line.split("building for ", 1)[1]


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ((), "cpu: no nvcc found"),
        (("nvcc",), "cpu: nvcc is present but cuBLAS and a working NVIDIA driver not found"),
        (("nvcc", "driver"), "cpu: nvcc is present but cuBLAS not found"),
        (("nvcc", "cublas"), "cpu: nvcc is present but a working NVIDIA driver not found"),
        (("cublas", "driver"), "cpu: no nvcc found"),
        (CUDA_PARTS, "cuda: nvcc, cuBLAS and a working driver found"),
    ],
)
def test_all_three_parts_are_needed(tmp_path: Path, parts: tuple[str, ...], want: str) -> None:
    assert choose(tmp_path, parts) == want


@pytest.mark.parametrize(("value", "want"), [("ON", "cuda: GGML_CUDA=ON was asked for"), ("OFF", "cpu: GGML_CUDA=OFF was asked for")])
def test_the_user_decides(tmp_path: Path, value: str, want: str) -> None:
    assert choose(tmp_path, CUDA_PARTS if value == "OFF" else (), f"-DGGML_CUDA={value}") == want
