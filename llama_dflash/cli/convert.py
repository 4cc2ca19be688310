"""`convert`: a draft that pinned llama.cpp loads, from a checkpoint or from an older fork's GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llama_dflash.cli import _options, _output

OUTTYPES = ("f16", "bf16", "q8_0")


@click.command()
@click.argument("source", metavar="SRC", type=_options._FilePath(path_type=Path))
@click.argument("out", type=_options._FilePath(path_type=Path))
@click.option(
    "--target",
    type=_options._FilePath(path_type=Path),
    help="The target's GGUF file, or for a checkpoint also its folder: tokenizer and pairing.",
)
@click.option("--outtype", type=click.Choice(OUTTYPES), help="Type of the matrices.  [default: the checkpoint's 16-bit type]")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@_options.json_option
@click.option("-v", "--verbose", is_flag=True, help="Show the pinned converter's log on stderr.")
def convert(source: Path, out: Path, target: Path | None, outtype: str | None, force: bool, as_json: bool, verbose: bool) -> None:
    """Write the draft SRC as a GGUF file that this llama.cpp loads.

    SRC is the Hugging Face folder of a DFlash or DFlash2 draft (needs torch and transformers, and --target), or a GGUF file of
    an older fork (architecture dflash-draft or qwen35-dflash-draft), whose tensors are copied as they are. What is not known is
    refused by name, and OUT appears only when it is whole and checked.
    """
    from llama_dflash import convert as package
    from llama_dflash.cli.info import facts

    done = package.convert(source, out, target, outtype, force, verbose, _output.note)
    for message in done.notes:
        _output.note(f"note: {message}")
    result: dict[str, Any] = {"schema": 1, "command": "convert", "source": str(source), **facts(done.facts)}
    result["notes"] = list(done.notes)
    if as_json:
        _output.data_json(result)
    else:
        _output.data(
            f"{out}: {result['format']} draft, {result['quant']}, {result['n_tensors']} tensors, {result['size_bytes']} bytes"
        )
