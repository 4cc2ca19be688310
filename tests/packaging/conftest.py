"""One wheel, built once from the cached native build, and a fresh environment with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shell import ROOT, copy_tracked, make_venv, ok


@pytest.fixture(scope="session")
def prebuilt() -> Path:
    """The cached native build that the environment was installed from."""
    return Path(ok(sys.executable, ROOT / "scripts" / "native.py", "build", "native").strip())


@pytest.fixture(scope="session")
def wheel(prebuilt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a copy of the tracked files, in a folder with spaces."""
    source = copy_tracked(tmp_path_factory.mktemp("a folder with spaces") / "llama dflash")
    out = tmp_path_factory.mktemp("dist")
    cmd = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source)
    ok(*cmd, env={"LLAMA_DFLASH_PREBUILT": str(prebuilt)})
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel and its dependencies, the wheel moved away afterwards."""
    python = make_venv(tmp_path_factory.mktemp("fresh") / "my env")
    moved = tmp_path_factory.mktemp("moved") / wheel.name
    moved.write_bytes(wheel.read_bytes())
    ok(python, "-m", "pip", "install", "-q", moved)
    moved.unlink()
    return python
