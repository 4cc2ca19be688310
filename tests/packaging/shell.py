"""Run commands in packaging tests, with their output in the failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A cold compile on two cores takes a quarter of an hour.
TIMEOUT_S = 2400


def run(*cmd: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, by default outside the checkout: Python would find the package in its working folder."""
    merged = {**os.environ, **(env or {})}
    where = cwd or Path(tempfile.gettempdir())
    return subprocess.run([str(c) for c in cmd], capture_output=True, text=True, cwd=where, env=merged, timeout=TIMEOUT_S)


def ok(*cmd: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed; returns its stdout."""
    done = run(*cmd, cwd=cwd, env=env)
    assert done.returncode == 0, f"{' '.join(map(str, cmd))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def make_venv(folder: Path) -> Path:
    """A fresh environment; returns its python."""
    ok(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def copy_tracked(dest: Path) -> Path:
    """Copy the files that a clone would have to `dest`."""
    names = ok("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (dest / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, dest / name)
    return dest
