"""Walk order and convolution windows of trees, by symbolic execution in C++."""

from __future__ import annotations

import subprocess
from pathlib import Path


def test_walk_and_windows(exact_build: Path) -> None:
    done = subprocess.run([exact_build / "tests" / "test-draft-tree"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]
