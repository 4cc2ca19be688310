"""`pip install .` with nothing prepared compiles llama.cpp once and works; minutes, unless ccache has seen it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from shell import ROOT, copy_tracked, make_venv, ok, run

pytestmark = pytest.mark.slow


def test_plain_pip_install_compiles_and_works(tmp_path: Path) -> None:
    source = copy_tracked(tmp_path / "source")
    python = make_venv(tmp_path / "env")
    sdist = ok(sys.executable, ROOT / "scripts" / "vendor.py", "fetch").strip()
    cache = Path(sdist).parents[1] / "ccache"
    env = {"LLAMA_DFLASH_SDIST": sdist, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    if shutil.which("ccache"):
        env |= {"CCACHE_DIR": str(cache), "CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1", "CCACHE_MAXSIZE": "4G"}
    done = run(python, "-m", "pip", "install", "-v", source, env=env)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    assert "llama-dflash: building for" in log
    facts = json.loads(ok(tmp_path / "env" / "bin" / "llama-dflash", "doctor", "--json"))
    assert facts["problems"] == []
    # The compile took its own tree; nothing came from the build cache.
    assert (source / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file()
    assert ok(tmp_path / "env" / "bin" / "llama-dflash", "run", "-p", "def fib(n):", "-n", "16").strip()


def test_the_source_distribution_has_all_that_a_build_needs(tmp_path: Path) -> None:
    source = copy_tracked(tmp_path / "source")
    ok(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path / "dist", source)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    names = {name.split("/", 1)[1] for name in ok("tar", "tzf", archive).split() if "/" in name}
    need = {"CMakeLists.txt", "CMakePresets.json", "LICENSE", "NOTICE", "README.md", "pyproject.toml", "vendor/pin.txt", "patches/series",
            "scripts/vendor.py", "scripts/native.py", "cmake/Vendor.cmake", "cmake/BUILD_INFO.json.in", "llama_dflash/models/tiny-target.gguf",
            "tests/native/probe/CMakeLists.txt", "tests/native/probe/probe.cpp"}
    assert need <= names
    assert not [n for n in names if n.startswith(("vendor/llama.cpp", "vendor/llama_cpp", "tests/golden"))]
