"""CUDA is built only when it is complete or asked for; the reason is told (cmake/Backend.cmake)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from shell import ROOT, run

CUDA_PARTS = ("nvcc", "cublas", "driver")


def configure(tmp_path: Path, parts: tuple[str, ...], *defines: str, nvcc_on_path: bool = True, tail: str = "") -> list[str]:
    """Run Backend.cmake with a made-up toolkit; returns its lines."""
    root = tmp_path / "cuda"
    bin_dir, smi_dir = root / "bin", tmp_path / "driver"
    bin_dir.mkdir(parents=True)
    smi_dir.mkdir()

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
    tool(smi_dir / "nvidia-smi", 0 if "driver" in parts else 9)
    script = tmp_path / "run.cmake"
    # Script mode knows no platform; a project sets these two by itself.
    script.write_text(
        "set(CMAKE_FIND_LIBRARY_PREFIXES lib)\nset(CMAKE_FIND_LIBRARY_SUFFIXES .so)\n"
        f'set(CUDAToolkit_ROOT "{root}")\ninclude("{ROOT}/cmake/Backend.cmake")\n{tail}\n'
    )
    cmake = shutil.which("cmake")
    assert cmake
    path = f"{bin_dir}:{smi_dir}:{os.environ['PATH']}" if nvcc_on_path else str(smi_dir)
    done = run(cmake, *defines, "-P", script, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("-- ") for line in done.stdout.splitlines()]


def choose(tmp_path: Path, parts: tuple[str, ...], *defines: str, tail: str = "") -> str:
    """The last `<backend>: <reason>`."""
    lines = [x for x in configure(tmp_path, parts, *defines, tail=tail) if "llama-dflash: building for" in x]
    return lines[-1].split("building for ", 1)[1]


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


@pytest.mark.parametrize(("parts", "want"), [(CUDA_PARTS, "cuda: nvcc, cuBLAS and a working driver found"), ((), "cpu: no nvcc found")])
def test_a_second_configure_tells_the_same_reason(tmp_path: Path, parts: tuple[str, ...], want: str) -> None:
    # Between two configures plain variables go and the cache stays.
    tail = f'unset(GGML_CUDA)\nunset(backend)\nunset(backend_reason)\ninclude("{ROOT}/cmake/Backend.cmake")'
    assert choose(tmp_path, parts, tail=tail) == want


def test_a_second_configure_detects_again(tmp_path: Path) -> None:
    root = tmp_path / "cuda"
    tail = f'unset(GGML_CUDA)\nfile(REMOVE "{root}/include/cublas_v2.h")\ninclude("{ROOT}/cmake/Backend.cmake")'
    assert choose(tmp_path, CUDA_PARTS, tail=tail) == "cpu: nvcc is present but cuBLAS not found"


def test_exact_arithmetic_is_for_the_cpu_whatever_was_asked_for(tmp_path: Path) -> None:
    defines = ("-DLLAMA_DFLASH_EXACT=ON", "-DGGML_CUDA=ON", "-DGGML_NATIVE=ON")
    lines = configure(tmp_path, CUDA_PARTS, *defines, tail='message(STATUS "${GGML_CUDA} ${GGML_NATIVE} ${backend}")')
    assert lines == ["llama-dflash: building for cpu: exact arithmetic is for the CPU only", "OFF OFF cpu"]


@pytest.mark.parametrize("on_path", [True, False])
def test_an_nvcc_off_path_is_named_to_cmake(tmp_path: Path, on_path: bool) -> None:
    lines = configure(tmp_path, CUDA_PARTS, nvcc_on_path=on_path, tail='message(STATUS "compiler=${CMAKE_CUDA_COMPILER}")')
    assert lines[-1] == ("compiler=" if on_path else f"compiler={tmp_path}/cuda/bin/nvcc")


def test_a_compiler_of_the_users_own_stays(tmp_path: Path) -> None:
    tail = 'message(STATUS "compiler=${CMAKE_CUDA_COMPILER}")'
    lines = configure(tmp_path, CUDA_PARTS, "-DCMAKE_CUDA_COMPILER=/mine/nvcc", nvcc_on_path=False, tail=tail)
    assert lines[-1] == "compiler=/mine/nvcc"


def test_the_reference_is_not_built_from_the_patched_tree() -> None:
    done = run("cmake", "-DLLAMA_DFLASH_PRESET=reference", "-P", ROOT / "cmake" / "Vendor.cmake")
    assert done.returncode != 0
    assert "run 'python scripts/native.py build reference'" in " ".join(done.stderr.split())
