"""`plan`: will it fit?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from llama_dflash import gguf, memory, shapes
from llama_dflash import plan as planner
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError, UsageError
from llama_dflash.memory import GIB
from llama_dflash.shapes import mixes
from llama_dflash.spec import BUDGET_LIMIT, MODES, ROLLBACKS

GPU_SIZES_GIB = (8, 12, 16, 24, 32)
FAMILY = "qwen3.5-27b"
# From the best to the smallest.
FAMILY_QUANTS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m")
DRAFT_FORMATS = ("dflash", "dflash2")


def _choice(values: Any) -> click.Choice[str]:
    return click.Choice(tuple(values), case_sensitive=False)


@click.command()
@click.option(
    "--gpu", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="The GPU's memory; without it, what fits where."
)
@click.option(
    "--ctx", type=click.IntRange(min=1), default=32768, show_default=True, metavar="N", help="Tokens of all slots together."
)
@click.option("--kv", type=_choice(memory.KV_BYTES), default="f16", show_default=True, help="Type of the target's KV cache.")
@click.option("--draft-kv", type=_choice(memory.KV_BYTES), default="f16", show_default=True, help="Type of the draft's KV cache.")
@click.option("--slots", type=click.IntRange(1, 256), default=1, show_default=True, help="Requests at once.")
@click.option("--mode", type=_choice(MODES), help="[default: tree, or ar for a file without a draft]")
@click.option("--rollback", type=_choice(ROLLBACKS), default="replay", show_default=True, help="Of chains; trees need replay.")
@click.option("--n-max", type=click.IntRange(min=1), metavar="N", help="Drafted tokens in a row.  [default: block size - 1]")
@click.option(
    "--budget", type=click.IntRange(1, BUDGET_LIMIT), default=15, show_default=True, metavar="N", help="Nodes of a tree."
)
@click.option("--preset", type=_choice(s.name for s in shapes.TARGETS), help=f"A known shape.  [default: {FAMILY}, without -m]")
@click.option("--quant", type=_choice(mixes.MIXES), default="q4_k_m", show_default=True, help="Mix of the preset.")
@click.option("--draft-quant", type=_choice(mixes.MIXES), default="q8_0", show_default=True, help="Mix of its draft.")
@click.option("--draft-format", type=_choice(DRAFT_FORMATS), default="dflash", show_default=True, help="Its draft.")
@click.option("-m", "--model", type=click.Path(path_type=Path), help="A GGUF file instead of a preset.")
@click.option("-md", "--draft", type=click.Path(path_type=Path), help="Its draft.")
@_options.json_option
def plan(
    gpu: float | None,
    ctx: int,
    kv: str,
    draft_kv: str,
    slots: int,
    mode: str | None,
    rollback: str,
    n_max: int | None,
    budget: int,
    preset: str | None,
    quant: str,
    draft_quant: str,
    draft_format: str,
    model: Path | None,
    draft: Path | None,
    as_json: bool,
) -> None:
    """Show how much memory a model needs with a context, its draft and its slots, before anything is loaded.

    Only headers or known shapes are read. Exit code 0: it fits; 1: it does not.
    """
    if preset and model:
        raise UsageError(f"--preset is {preset} and -m is {model}, expected one of them", "leave one out")
    if draft and not model:
        raise UsageError(
            f"-md is {draft} without -m, expected the target's file too", "add -m FILE, or leave -md out for the preset's"
        )
    name = None if model else preset or FAMILY
    target, drafter = planner.preset(name, quant, draft_quant, draft_format) if name else _files(model, draft)
    chosen = mode or ("tree" if drafter is not None else "ar")
    settings = planner.Settings(ctx, kv, draft_kv, slots, chosen, rollback, n_max, budget)
    made = planner.make(target, drafter, settings)
    result = _result(target, drafter, settings, made)
    if gpu is not None:
        result |= _verdict(target, drafter, settings, made, int(gpu * GIB))
    elif name == FAMILY:
        result["sizes"] = _family(settings, draft_quant, draft_format)
    if as_json:
        _output.data_json(result)
    else:
        _show(result)
    if gpu is not None and not result["fits"]:
        raise DFlashError(
            f"it needs {(made.total_bytes + planner.RESERVE_BYTES) / GIB:.1f} GiB, expected at most {gpu:g} GiB", result["advice"]
        )


def _files(model: Path | None, draft: Path | None) -> tuple[planner.Model, planner.Model | None]:
    assert model is not None
    target = planner.from_file(model)
    if draft is None:
        return target, None
    drafter = planner.from_file(draft)
    gguf.check_pair(target.facts, drafter.facts)
    return target, drafter


def _result(target: planner.Model, draft: planner.Model | None, settings: planner.Settings, made: planner.Plan) -> dict[str, Any]:
    s = settings.checked(draft)
    return {
        "schema": 1,
        "command": "plan",
        "target": target.facts.name,
        "draft": draft.facts.name if draft is not None and s.mode != "ar" else None,
        "mode": s.mode,
        "rollback": None if s.mode == "ar" else s.rollback,
        "n_ctx": s.n_ctx,
        "n_slots": s.n_slots,
        "kv_type": s.kv,
        "draft_kv_type": s.draft_kv,
        "device_bytes": made.device,
        "host_bytes": made.host,
        "total_bytes": made.total_bytes,
        "reserve_bytes": planner.RESERVE_BYTES,
    }


def _verdict(
    target: planner.Model, draft: planner.Model | None, settings: planner.Settings, made: planner.Plan, gpu_bytes: int
) -> dict[str, Any]:
    fits = made.fits(gpu_bytes)
    free = gpu_bytes - made.total_bytes - planner.RESERVE_BYTES
    return {
        "gpu_bytes": gpu_bytes,
        "free_bytes": free,
        "fits": fits,
        "advice": None if fits else planner.advice(target, draft, settings, gpu_bytes),
    }


def _family(settings: planner.Settings, draft_quant: str, draft_format: str) -> list[dict[str, Any]]:
    """What fits on GPUs of common sizes: the best mix that holds the context, else the smallest mix with less."""
    out = []
    models = {quant: planner.preset(FAMILY, quant, draft_quant, draft_format) for quant in FAMILY_QUANTS}
    for size_gib in GPU_SIZES_GIB:
        gpu_bytes = size_gib * GIB
        line: dict[str, Any] = {"gpu_bytes": gpu_bytes, "quant": None, "mode": None, "n_ctx_max": 0}
        best = next((q for q in FAMILY_QUANTS if planner.make(*models[q], settings).fits(gpu_bytes)), FAMILY_QUANTS[-1])
        for tried in (settings, replace(settings, mode="ar")):
            if n_ctx := planner.largest_context(*models[best], tried, gpu_bytes):
                line |= {"quant": best, "mode": tried.mode, "n_ctx_max": n_ctx}
                break
        out.append(line)
    return out


def _show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['target']}, {result['mode']}, {result['n_ctx']} tokens, KV {result['kv_type']}")
    table.add_column("buffer")
    table.add_column("GiB", justify="right")
    for name, n_bytes in result["device_bytes"].items():
        table.add_row(name.replace("_", " "), f"{n_bytes / GIB:.3f}")
    table.add_section()
    table.add_row("sum", f"{result['total_bytes'] / GIB:.3f}")
    table.add_row("kept free for the driver", f"{result['reserve_bytes'] / GIB:.3f}")
    if "gpu_bytes" in result:
        table.add_row("GPU", f"{result['gpu_bytes'] / GIB:.3f}")
        table.add_row("left", f"{result['free_bytes'] / GIB:.3f}")
    _output.show(table)
    for line in result.get("sizes", []):
        size = f"{line['gpu_bytes'] / GIB:g} GB"
        if line["quant"]:
            _output.data(
                f"{size}: {line['quant']}, mode {line['mode']}, up to {line['n_ctx_max']} tokens with KV {result['kv_type']}"
            )
        else:
            _output.data(f"{size}: no mix down to {FAMILY_QUANTS[-1]} fits")
    if result.get("fits"):
        _output.data("It fits.")
