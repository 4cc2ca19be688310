"""Markers by folder, a clean environment, and a header that says what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_dflash import builds
from llama_dflash.builds import Build
from llama_dflash.server import hold_port

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("unit", "patches", "native", "server", "packaging", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in FOLDERS:
            item.add_marker(getattr(pytest.mark, folder))


def pytest_report_header() -> str:
    try:
        info = builds.resolve(builds.INSTALLED).info
    except Exception as e:
        return f"llama-dflash: {e}"
    return f"llama-dflash: pin {info['pin']}, series {info['series_digest']}, backend {info['backend']}, {info['compiler']}"


@pytest.fixture(autouse=True)
def clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may depend on what the shell has set."""
    for name in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB", "LLAVA_CPP_LIB", "LLAMA_DFLASH_NATIVE", "LLAMA_DFLASH_PREBUILT", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    # A machine may reach the package index through a proxy; servers on loopback must not.
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


@pytest.fixture(scope="session")
def exact() -> Build:
    """The exact build; LLAMA_DFLASH_NATIVE may name another folder (patchq bisect-check does)."""
    return builds.resolve(os.environ.get("LLAMA_DFLASH_NATIVE") or "exact")


@pytest.fixture(scope="session")
def reference() -> Build:
    """The unpatched pin with exact arithmetic."""
    return builds.resolve("reference")


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """The embedded target and draft."""
    models = ROOT / "llama_dflash" / "models"
    return models / "tiny-target.gguf", models / "tiny-draft.gguf"


@pytest.fixture
def port() -> Iterator[int]:
    """A TCP port that no other program gets while the test runs; a server of the test may."""
    with hold_port() as held:
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched llama.cpp; vendor/ may hold work of somebody's, or nothing yet."""
    path = tmp_path_factory.mktemp("source") / "llama.cpp"
    command = [sys.executable, str(Path(__file__).resolve().parents[1] / "scripts" / "vendor.py"), "prepare", "--dest", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return path
