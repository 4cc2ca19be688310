"""Fixtures of the patch queue's tests: an empty and a filled queue, each test its own copy."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "scripts")]

import fakes  # noqa: E402


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both queues, made once; copying one is faster than committing it again."""
    folder = tmp_path_factory.mktemp("templates")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            patch.delenv(name)
        patch.setenv("LLAMA_DFLASH_SDIST", str(folder / "filled" / "dist" / "llama_cpp_python-9.9.9.tar.gz"))
        fakes.Queue.create(folder / "empty")
        fakes.create_filled(folder / "filled")
    return folder


def copy_of(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fakes.Queue:
    root = tmp_path / "checkout"
    shutil.copytree(template, root)
    q = fakes.Queue(root)
    monkeypatch.setenv("LLAMA_DFLASH_SDIST", str(q.sdist))
    monkeypatch.setenv("LLAMA_DFLASH_CACHE", str(tmp_path / "cache"))
    return q


@pytest.fixture
def empty(templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fakes.Queue:
    """No patches, nothing unpacked."""
    return copy_of(templates / "empty", tmp_path, monkeypatch)


@pytest.fixture
def filled(templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fakes.Queue:
    """Two patches, applied and exported."""
    return copy_of(templates / "filled", tmp_path, monkeypatch)
