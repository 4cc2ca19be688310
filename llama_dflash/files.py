"""A result appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_dflash.errors import DFlashError, UsageError


def check_out(out: Path, sources: tuple[Path, ...], force: bool) -> None:
    """Refuse an output that cannot be meant.

    Raises:
        UsageError: `out` is one of `sources`, a folder, lies in no folder, or exists and `force` is not set.
    """
    if out.is_dir():
        raise UsageError(f"{out} is a folder, expected a file to write", f"name the file, such as {out / 'draft.gguf'}")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: {out.parent} is no folder, expected one to write to", "make it first")
    for source in sources:
        if out.exists() and source.exists() and out.samefile(source):
            raise UsageError(f"{out} would overwrite the source {source}, expected another file", "choose another name")
    if out.exists() and not force:
        raise UsageError(f"{out} exists, expected a new file", "choose another name, or overwrite it with --force")


def require_space(folder: Path, n_bytes: int, what: str) -> None:
    """Raise DFlashError unless `n_bytes` fit beside what is in `folder`, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if n_bytes > free:
        raise DFlashError(
            f"{folder} has {free / 1e9:.1f} GB free, expected {n_bytes / 1e9:.1f} GB for {what}",
            "make room, or choose another folder",
        )


@contextmanager
def temporary_beside(out: Path) -> Iterator[Path]:
    """Path of a file beside `out` that does not exist yet; whatever is there at the end is removed.

    The caller renames it when it is whole. Signals that unwind the stack (Ctrl-C, SIGTERM, SIGHUP) remove it as well.
    """
    # Not made from the name of `out`: the pinned converter fills in templates in file names.
    path = out.parent / f".llama-dflash-{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(part: Path, out: Path, force: bool) -> None:
    """Give a whole file its name; raises UsageError when another has it by now."""
    with part.open("rb") as f:
        os.fsync(f.fileno())
    if out.exists() and not force:
        raise UsageError(f"{out} appeared meanwhile, expected a new file", "choose another name, or overwrite it with --force")
    os.replace(part, out)
