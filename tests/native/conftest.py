"""The exact build that every test of this folder runs against."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def exact_build() -> Path:
    """Folder of the exact build: LLAMA_DFLASH_NATIVE if that is a build's folder, else the cached one, made on first use."""
    given = Path(os.environ.get("LLAMA_DFLASH_NATIVE", ""))
    if given.is_absolute() and (given / "llama_dflash" / "BUILD_INFO.json").is_file():
        return given
    command = [sys.executable, str(ROOT / "scripts" / "native.py"), "build", "exact"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}; its messages are above"
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def probe(exact_build: Path) -> Path:
    """The C++ driver of tests/native/probe."""
    path = exact_build / "tests" / "llama-dflash-probe"
    assert path.is_file(), f"{path} is missing: the build was configured without LLAMA_DFLASH_PROBE"
    return path
