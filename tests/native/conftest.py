"""The exact build that every test of this folder runs against."""

from __future__ import annotations

from pathlib import Path

import pytest

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
