"""`synth`: random-weight files of real shapes."""

from __future__ import annotations

from pathlib import Path

import click

from llama_dflash import shapes
from llama_dflash import synth as writer
from llama_dflash.cli import _options, _output
from llama_dflash.shapes import layout, mixes

MIB = 2**20


@click.command()
@click.argument("shape", metavar="SHAPE", type=click.Choice(tuple(shapes.SHAPES), case_sensitive=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--quant", type=click.Choice(tuple(mixes.MIXES), case_sensitive=False), default="q4_k_m", show_default=True, help="Mix."
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True, help="The same seed writes the same file.")
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Layers of the target; for a draft, those of its target.  [default: all]",
)
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@_options.json_option
def synth(shape: str, out: Path, quant: str, seed: int, layers: int | None, force: bool, as_json: bool) -> None:
    """Write a GGUF file with random weights in the shape of a real model, for timing and memory at real size.

    SHAPE is qwen3.5-0.8b, -4b, -9b, -27b or -35b-a3b, or one of these followed by -dflash or -dflash2 for its draft.
    Such files say nothing about acceptance or quality.
    """
    chosen = shapes.find(shape)
    if layers is not None:
        if isinstance(chosen, shapes.DraftShape):
            shapes.find_target(chosen.target).shrunk(layers)
        chosen = chosen.shrunk(layers)
    plan = layout.of(chosen, quant)
    with _output.progress("MiB written", total=-(-plan.n_bytes // MIB)) as bar:
        task = bar.task_ids[0]
        n_written = 0

        def count(n_bytes: int) -> None:
            nonlocal n_written
            n_written += n_bytes
            bar.update(task, completed=n_written // MIB)

        size_bytes = writer.write(plan, out, seed=seed, force=force, on_bytes=count)
    result = {
        "schema": 1,
        "command": "synth",
        "path": str(out),
        "shape": chosen.name,
        "arch": plan.arch,
        "quant": quant,
        "seed": seed,
        "size_bytes": size_bytes,
        "tensor_bytes": plan.n_bytes,
        "n_params": plan.n_params,
        "n_tensors": len(plan.tensors),
        "source": chosen.source,
    }
    if as_json:
        _output.data_json(result)
    else:
        _output.data(f"{out}: {plan.name}, {quant}, {plan.n_params / 1e9:.3f} B weights, {size_bytes / 1e9:.3f} GB")
