"""A stock llama-cpp-python in the same environment stays as it was, and usable."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest
from shell import ROOT, make_venv, ok, run

TARGET = ROOT / "llama_dflash" / "models" / "tiny-target.gguf"
GENERATE = (
    "import llama_cpp, sys\n"
    "llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)\n"
    "llm.create_completion('def add(a, b):', max_tokens=4, temperature=0)\n"
    "print(llama_cpp.__file__)\n"
)


def tree_hash(folder: Path) -> str:
    h = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        h.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return h.hexdigest()


@pytest.fixture(scope="module")
def both(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Python of an environment with stock llama-cpp-python (the pinned sdist, unpatched libraries) and ours; and stock's folder."""
    python = make_venv(tmp_path_factory.mktemp("stock") / "env")
    sdist = ok(sys.executable, ROOT / "scripts" / "vendor.py", "fetch").strip()
    named = tmp_path_factory.mktemp("sdist") / "llama_cpp_python-0.3.36.tar.gz"
    shutil.copyfile(sdist, named)
    # Its own compile would take as long as ours; the unpatched pin's libraries are in the cache already.
    ok(python, "-m", "pip", "install", "-q", named, env={"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})
    folder = Path(ok(python, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").strip()) / "llama_cpp"
    reference = Path(ok(sys.executable, ROOT / "scripts" / "native.py", "build", "reference").strip())
    shutil.copytree(reference / "llama_dflash" / "_vendor" / "llama_cpp" / "lib", folder / "lib", dirs_exist_ok=True)
    before = tree_hash(folder)
    ok(python, "-m", "pip", "install", "-q", wheel)
    assert tree_hash(folder) == before
    return python, folder


def test_stock_alone_is_stock(both: tuple[Path, Path]) -> None:
    python, folder = both
    assert Path(ok(python, "-c", GENERATE, TARGET).strip()).parent == folder


def test_ours_first_makes_llama_cpp_ours(both: tuple[Path, Path]) -> None:
    python, folder = both
    path = Path(ok(python, "-c", "import llama_dflash; llama_dflash.Llama\n" + GENERATE, TARGET).strip())
    assert path.parent != folder
    assert path.parts[-4:] == ("llama_dflash", "_vendor", "llama_cpp", "__init__.py")


def test_stock_first_is_refused_with_the_remedy(both: tuple[Path, Path]) -> None:
    done = run(both[0], "-c", "import llama_cpp\nfrom llama_dflash import Llama")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: llama_cpp was imported first, from ")
    assert done.stderr.splitlines()[-1].endswith("import llama_dflash before llama_cpp")


def test_dependencies_do_not_clash_and_removal_leaves_stock(both: tuple[Path, Path]) -> None:
    python, folder = both
    ok(python, "-m", "pip", "check")
    before = tree_hash(folder)
    ok(python, "-m", "pip", "uninstall", "-q", "-y", "llama-dflash")
    assert tree_hash(folder) == before
    assert Path(ok(python, "-c", GENERATE, TARGET).strip()).parent == folder
