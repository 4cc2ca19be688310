"""The exact build that every test of this folder runs against."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tree_lib import worker

from llama_dflash.builds import Build


@pytest.fixture(scope="session")
def exact_build(exact: Build) -> Path:
    """Folder of the exact build, which holds llama_dflash/ and tests/."""
    return exact.package.parent


@pytest.fixture(scope="session")
def probe(exact_build: Path) -> Path:
    """The C++ driver of tests/native/probe."""
    path = exact_build / "tests" / "llama-dflash-probe"
    assert path.is_file(), f"{path} is missing: the build was configured without LLAMA_DFLASH_PROBE"
    return path


@pytest.fixture(scope="session")
def broken() -> Callable[[str], Path]:
    """The exact build with tests/native/broken/NAME.patch behind the series: its package folder, from the build cache."""
    root = Path(__file__).resolve().parents[2]

    def build(name: str) -> Path:
        command = [sys.executable, "scripts/native.py", "build", "exact", "--broken", f"tests/native/broken/{name}.patch"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return Path(done.stdout.strip()) / "llama_dflash"

    return build


@pytest.fixture(scope="session")
def run(exact: Build) -> Callable[..., Any]:
    """Run a function in the worker that has the exact build loaded."""
    return worker(exact.package).run
