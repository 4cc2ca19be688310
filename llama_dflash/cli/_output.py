"""Data on stdout, everything else on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

stderr = Console(stderr=True, highlight=False)


def data(value: str) -> None:
    """A line of result."""
    click.echo(value)


def data_json(value: dict[str, Any]) -> None:
    """The one JSON object of a command."""
    click.echo(json.dumps(value, indent=1))


def show(renderable: RenderableType) -> None:
    """A table of results, for a person."""
    Console(highlight=False).print(renderable)


def note(message: str) -> None:
    """A line about what happens; never parsed."""
    click.echo(message, err=True)


@contextmanager
def progress(label: str, total: int) -> Iterator[Progress]:
    """A progress bar on stderr with one task; nothing when stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        bar.add_task(label, total=total)
        yield bar
