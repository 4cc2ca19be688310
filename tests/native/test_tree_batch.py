"""Draft trees in the batch allocator: upstream's C++ test with our cases."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def test_batch_allocator(exact_build: Path) -> None:
    done = subprocess.run([exact_build / "tests" / "test-batch-alloc"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    tree_tests = done.stdout.split("\ntrees\n")[1].split("\ntrees ")[0]
    assert len(re.findall(r"assertion\(s\)\) +\[PASS\]", tree_tests)) >= 6, "the tests of trees ran"
