"""The CUDA files of the series compile for every architecture; nvcc is needed, a GPU is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "cuda_compile.py"
sys.path.insert(0, str(SCRIPT.parent))

import vendor  # noqa: E402

CUDA = "ggml/src/ggml-cuda"
ALL = "sm_75 sm_80 sm_86 sm_89 sm_90"
# .ci/run sets it where there is an nvcc: there what is missing is a failure.
MUST_RUN = bool(os.environ.get("LLAMA_DFLASH_TEST_CUDA"))


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=1800)


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    """Skip without nvcc or cuBLAS' headers; fail where the files must be compiled."""
    done = run("--tools")
    if done.returncode:
        (pytest.fail if MUST_RUN else pytest.skip)(done.stderr.strip())


def compiled(stdout: str) -> set[str]:
    """Files that the script says it compiled for all architectures."""
    return set(re.findall(rf"^(\S+\.cu): {ALL}: [0-9.]+ s", stdout, re.M))


def named() -> set[str]:
    """The .cu files that patches of the series change or add, and that are there behind the last of them."""
    found: set[str] = set()
    for name in vendor.read_series():
        for old, new in re.findall(r"^--- (\S+)\n\+\+\+ (\S+)$", vendor.patch_path(name).read_text(errors="replace"), re.M):
            found.discard(old.removeprefix("a/"))
            found.add(new.removeprefix("b/"))
    return {path for path in found if path.startswith(f"{CUDA}/") and path.endswith(".cu")}


def test_the_series_compiles() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert compiled(done.stdout) >= named()
    assert bool(compiled(done.stdout)) != ("no patch changes a CUDA file" in done.stdout)


@pytest.fixture(scope="module")
def copy(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ggml of the patched tree in a repository of its own."""
    tree = tmp_path_factory.mktemp("cuda") / "llama.cpp"
    shutil.copytree(source / "ggml", tree / "ggml")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    vendor.git(tree, "add", "-A", "-f")
    vendor.git(tree, "commit", "-q", "-m", "series")
    return tree


@pytest.mark.parametrize("error", ["0", "__CUDA_ARCH__ == 860", "__CUDA_ARCH__ == 900"])
def test_an_error_on_one_architecture_is_found(copy: Path, error: str) -> None:
    """Control: the smallest file of the series (of llama.cpp, as long as the series has none) compiles, and not with an error."""
    names = named() or {str(path.relative_to(copy)) for path in (copy / CUDA).glob("*.cu")}
    name = min(names, key=lambda name: ((copy / name).stat().st_size, name))
    vendor.git(copy, "checkout", "-q", "--", ".")
    with (copy / name).open("a") as f:
        f.write(f"\n#if {error}\n#error made for the test\n#endif\n")
    done = run("--source", str(copy), "--since", "HEAD")
    if error == "0":
        assert done.returncode == 0, done.stderr
        assert compiled(done.stdout) == {name}
    else:
        assert done.returncode == 1
        assert not compiled(done.stdout)
        assert re.search(rf"{Path(name).name}[:(]\d+.*made for the test", done.stderr)
        assert f"1 of 1 files failed: {name}" in done.stderr
