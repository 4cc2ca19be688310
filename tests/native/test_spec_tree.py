"""Builder and walk of draft trees in C++: brute force, promises on random input, and the samplers on the embedded target."""

from __future__ import annotations

import subprocess
from pathlib import Path


def test_builder_and_walk(exact_build: Path, pair: tuple[Path, Path]) -> None:
    done = subprocess.run([exact_build / "tests" / "test-spec-tree", pair[0]], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]
