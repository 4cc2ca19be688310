"""`pull`: a target and its draft from the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from llama_dflash.cli import _options, _output
from llama_dflash.presets import PRESETS


@click.command(epilog=f"Presets: {', '.join(PRESETS)}.")
@click.argument("name", metavar="PRESET|REPO_ID")
@click.option("--file", "pattern", metavar="PATTERN", help="Files of the repository, such as '*Q4_K_M*'.")
@click.option(
    "--dir",
    "folder",
    type=_options._FilePath(path_type=Path, file_okay=False),
    default=Path("models"),
    show_default=True,
    help="Folder for the files; each repository gets its own in it.",
)
@_options.json_option
def pull(name: str, pattern: str | None, folder: Path, as_json: bool) -> None:
    """Fetch a target and its draft (PRESET), or files of a repository (REPO_ID), and say how to serve them.

    A repository with one GGUF model needs no --file; one with a checkpoint is fetched whole, for `convert`. What is there
    already is not fetched again. HF_TOKEN, HF_ENDPOINT and the other variables of huggingface_hub apply.
    """
    from llama_dflash import pull as library

    files = library.choose(name, pattern)
    for f in files:
        state = "there" if f.is_there(folder) else "to fetch"
        _output.note(f"{f.repo}/{f.name}: {f.size_bytes / 1e9:.2f} GB, {state}")
    paths = library.fetch(files, folder)
    command = library.next_command(paths)
    if as_json:
        listed = [
            {"repo": f.repo, "file": f.name, "revision": f.revision, "size_bytes": f.size_bytes, "path": str(path)}
            for f, path in zip(files, paths, strict=True)
        ]
        result: dict[str, Any] = {"schema": 1, "command": "pull", "name": name, "files": listed, "next": command}
        _output.data_json(result)
        return
    for path in paths:
        _output.data(str(path))
    if command:
        _output.data(shlex.join(command))
