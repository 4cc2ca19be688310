"""The result file: written after every step, so that a run that ends early loses one step; later runs add to it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.figures import merge
from llama_dflash.errors import DFlashError, ServerError

SAME = ("schema", "device", "series_digest")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Record:
    """A result on disk.

    Args:
        path: the JSON file; one that exists has to be of the same device and series.
        head: what the file says about itself: device, digest, conditions.

    Raises:
        DFlashError: the file is of another device or series.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        old = json.loads(path.read_text()) if path.is_file() else {}
        for key in SAME if old else ():
            if old.get(key) != head[key]:
                raise DFlashError(
                    f"{path}: {key} is {old.get(key)!r}, expected {head[key]!r}", "write to another file with --out"
                )
        first = {key: old[key] for key in ("date",) if key in old}
        self.data: dict[str, Any] = merge({"base": {}, "ours": {}, "steps": [], **old}, {**head, **first})
        self.failures: list[str] = []

    @property
    def logs(self) -> Path:
        """Folder of the raw logs, beside the file."""
        return self.path.with_suffix("") / "logs"

    def put(self, found: dict[str, Any]) -> None:
        """Add figures and save."""
        self.data = merge(self.data, found)
        self.save()

    def save(self) -> None:
        """Write the file in one rename."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tmp = self.path.with_name(f".{self.path.name}.tmp")
        tmp.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(tmp, self.path)

    @contextlib.contextmanager
    def step(self, part: str, side: str, what: str, **conditions: Any) -> Iterator[None]:
        """One step: its place in the order, start and seconds are kept; one that fails is told and does not stop the others."""
        started_s = time.monotonic()
        at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entry = {"part": part, "side": side, "what": what, "start": at, **conditions}
        try:
            yield
        except (ServerError, OSError, subprocess.SubprocessError, KeyError, ValueError) as e:
            self.failures.append(f"{part} {side} {what}: {type(e).__name__}: {e}")
            entry["failed"] = f"{type(e).__name__}: {e}".replace(str(self.path.parent), "")
            say(f"failed: {self.failures[-1]}")
        entry["seconds"] = round(time.monotonic() - started_s, 1)
        self.data["steps"].append(entry)
        self.save()
