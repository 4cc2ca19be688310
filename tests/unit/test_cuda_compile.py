"""scripts/cuda_compile.py: which files it takes, what its cache goes by, and what it says without its tools."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import cuda_compile

import vendor

CUDA = cuda_compile.CUDA
FILES = {
    "common.cuh": "",
    "mma.cuh": '#include "common.cuh"\n',
    "add.cuh": '#include "common.cuh"\n',
    "add.cu": '#include "add.cuh"\n#include <cub/cub.cuh>\n',
    "mmq.cuh": '#include "ggml-cuda/mma.cuh"\n',
    "mmq-config-ampere.cuh": "",
    "mmq.cu": '#include "mmq.cuh"\n#if 0\n#  include "mmq-config-ampere.cuh"\n#endif\n',
    "gated_delta_net.cu": '#include "common.cuh"\n#include "gated-delta-net-step.cuh"\n' + "// long\n" * 50,
    "gated-delta-net-tree.cu": '#include "gated-delta-net-step.cuh"\n',
    "gated-delta-net-step.cuh": '#include "common.cuh"\n',
    "nobody.cuh": "",
    "template-instances/mmq-q4.cu": '#include "../mmq.cuh"\n' + "// long\n" * 20,
    "CMakeLists.txt": '    set(CUDA_FLAGS -use_fast_math -extended-lambda)\n    set(CUDA_CXX_FLAGS "")\n',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A made-up ggml-cuda, committed."""
    root = tmp_path / "tree"
    for name, text in FILES.items():
        path = root / CUDA / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "ggml/include").mkdir(parents=True)
    (root / "ggml/include/ggml.h").write_text("")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    vendor.git(root, "add", "-A")
    vendor.git(root, "commit", "-q", "-m", "base")
    return root


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ([], []),
        (["CMakeLists.txt"], []),
        (["add.cu", "mmq.cu"], ["add.cu", "mmq.cu"]),
        (["template-instances/mmq-q4.cu"], ["template-instances/mmq-q4.cu"]),
        (["deleted.cu", "deleted.cuh"], []),
        (["add.cuh"], ["add.cu"]),
        (["mmq.cuh"], ["mmq.cu"]),  # not all the instances
        (["mmq-config-ampere.cuh"], ["mmq.cu"]),  # a longer name, and under an #if
        (["gated-delta-net-tree.cu", "gated-delta-net-step.cuh"], ["gated-delta-net-tree.cu", "gated_delta_net.cu"]),
        (["common.cuh", "mmq.cu"], ["mmq.cu"]),  # reached through two headers
        (["mma.cuh"], ["mmq.cu"]),  # the smallest of its users, as none is named like it
        (["common.cuh"], ["gated-delta-net-tree.cu"]),
        (["nobody.cuh"], []),
    ],
)
def test_files_follow_from_what_changed(
    tree: Path, capfd: pytest.CaptureFixture[str], changed: list[str], wanted: list[str]
) -> None:
    assert cuda_compile.select(tree, [f"{CUDA}/{name}" for name in changed]) == [f"{CUDA}/{name}" for name in wanted]
    assert ("no .cu file includes it" in capfd.readouterr().err) is (changed == ["nobody.cuh"])


def test_patches_name_files_of_the_cuda_folder_alone() -> None:
    patch = (
        f"diff --git a/{CUDA}/new.cu b/{CUDA}/new.cu\nnew file mode 100644\n--- /dev/null\n+++ b/{CUDA}/new.cu\n@@ -0,0 +1 @@\n+x\n"
        f"--- a/{CUDA}/old.cu\n+++ b/{CUDA}/old.cu\n"
        f"--- a/{CUDA}/gone.cu\n+++ /dev/null\n"
        f"rename from {CUDA}/was.cu\nrename to {CUDA}/now.cu\n"
        f"--- a/ggml/src/ggml.c\n+++ b/ggml/src/ggml.c\n@@ -1 +1 @@\n+// +++ b/{CUDA}/not.cu\n"
    )
    assert cuda_compile.named_by_patches([patch, patch]) == [f"{CUDA}/{name}.cu" for name in ("new", "now", "old")]


def test_changes_since_a_revision_include_what_is_not_committed(tree: Path) -> None:
    def change(name: str) -> None:
        (tree / name).write_text("// changed\n")

    change(f"{CUDA}/add.cu")
    change("ggml/include/ggml.h")
    vendor.git(tree, "commit", "-q", "-a", "-m", "change")
    change(f"{CUDA}/mmq.cu")
    change(f"{CUDA}/new.cu")
    assert cuda_compile.changed_since(tree, "HEAD~1") == [f"{CUDA}/{name}.cu" for name in ("add", "mmq", "new")]
    assert cuda_compile.changed_since(tree, "HEAD") == [f"{CUDA}/{name}.cu" for name in ("mmq", "new")]


def test_flags_are_those_of_ggml_for_all_architectures(tree: Path) -> None:
    flags = " ".join(cuda_compile.flags_of(tree))
    assert all(flag in flags for flag in ("-O3", "-std=c++17", "-use_fast_math -extended-lambda"))
    assert all(f"-gencode arch=compute_{arch},code=sm_{arch}" in flags for arch in (75, 80, 86, 89, 90))
    (tree / CUDA / "CMakeLists.txt").write_text("set(OTHER)\n")
    with pytest.raises(vendor.VendorError, match=r"no 'set\(CUDA_FLAGS"):
        cuda_compile.flags_of(tree)


NVCC = """#!/bin/sh
case "$*" in
  --version) echo "release {version}"; exit 0 ;;
  -E*) exit {finds_cublas} ;;
esac
echo call >>{calls}
echo "ptxas info    : Compiling entry function '_Z3addv' for 'sm_86'"
echo "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"
echo "ptxas info    : Used 40 registers, used 0 barriers"
for last; do :; done
if grep -q wrong "$last"; then echo "$last(1): error: wrong"; exit 2; fi
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a made-up nvcc on PATH; what it returns is the file with its calls."""
    monkeypatch.setenv("LLAMA_DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def make(version: str = "13.0", finds_cublas: int = 0) -> Path:
        calls = tmp_path / "calls.txt"
        calls.write_text("")
        path = tmp_path / "bin" / "nvcc"
        path.parent.mkdir(exist_ok=True)
        path.write_text(NVCC.format(version=version, finds_cublas=finds_cublas, calls=calls))
        path.chmod(0o755)
        return calls

    return make


def run(tree: Path, *args: str) -> int:
    return cuda_compile.main(["--source", str(tree), "--since", "HEAD", *args])


def test_what_compiled_is_not_compiled_again(tree: Path, nvcc: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    calls = nvcc()
    source = tree / CUDA / "add.cu"
    steps = [
        lambda: source.write_text("// one\n"),
        lambda: source.write_text("// two\n"),
        lambda: (tree / "ggml/include/ggml.h").write_text("// changed\n"),
        lambda: (tree / CUDA / "CMakeLists.txt").write_text("set(CUDA_FLAGS -other)\n"),
    ]
    for n_calls, step in enumerate(steps, start=1):
        step()
        assert (run(tree), run(tree)) == (0, 0)
        assert len(calls.read_text().splitlines()) == n_calls
    calls = nvcc(version="13.1")
    assert (run(tree), run(tree)) == (0, 0)
    assert len(calls.read_text().splitlines()) == 1
    lines = capfd.readouterr().out.splitlines()
    assert all(line.startswith(f"{CUDA}/add.cu: sm_75 sm_80 sm_86 sm_89 sm_90: ") for line in lines)
    assert ["compiled before" in line for line in lines] == [False, True] * 5
    assert run(tree, "--resources") == 0
    assert re.search(r"^  \w*add\w*: registers sm_86 40; spilled sm_86 4 bytes$", capfd.readouterr().out, re.M)


def test_a_failure_is_told_and_not_kept(tree: Path, nvcc: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    calls = nvcc()
    (tree / CUDA / "add.cu").write_text("wrong\n")
    (tree / CUDA / "mmq.cu").write_text("right\n")
    assert (run(tree), run(tree)) == (1, 1)
    assert len(calls.read_text().splitlines()) == 3  # the right one once
    out, err = capfd.readouterr()
    assert f"{CUDA}/add.cu: sm_75 sm_80 sm_86 sm_89 sm_90: failed" in out
    assert "add.cu(1): error: wrong" in err
    assert f"error: 1 of 2 files failed: {CUDA}/add.cu" in err
    assert "ptxas" not in err


def test_nothing_to_compile_needs_no_tool(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(cuda_compile, "find_compiler", lambda *_: pytest.fail("looked for nvcc"))
    assert run(tree) == 0
    assert "no CUDA file to compile" in capfd.readouterr().out


def test_what_is_missing_is_said_in_a_line(
    tree: Path, nvcc: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refusal(*args: str) -> str:
        assert cuda_compile.main(args) == 1
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    nvcc(finds_cublas=1)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "pip install nvidia-cublas, or name its folder with --cublas FOLDER" in refusal("--tools")
    assert "no cublas_v2.h there" in refusal("--tools", "--cublas", str(tmp_path))
    headers = tmp_path / "nvidia" / "cu13" / "include"
    headers.mkdir(parents=True)
    (headers / "cublas_v2.h").write_text("")
    assert cuda_compile.find_compiler().cublas == headers
    assert cuda_compile.find_compiler(headers.parent).cublas == headers
    nvcc(finds_cublas=0)
    assert cuda_compile.find_compiler().cublas is None
    assert "expected the root of a git tree" in refusal("--source", str(tmp_path), "--since", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvcc is not on PATH" in refusal("--tools")
