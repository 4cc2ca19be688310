"""examples/draft_tree.cpp verifies and accepts a tree of the trained model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def test_example(exact_build: Path, pair: tuple[Path, Path]) -> None:
    command = [exact_build / "tests" / "draft-tree", pair[0], "def main():\n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"accepted [1-4] of 4 nodes, length \d+, next token \d+\n", done.stdout)


def test_a_wrong_use_says_what_is_expected(exact_build: Path) -> None:
    done = subprocess.run([exact_build / "tests" / "draft-tree"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
