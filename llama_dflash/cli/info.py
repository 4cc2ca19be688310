"""`info`: what a model file is, and whether a draft fits a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from llama_dflash import gguf
from llama_dflash.cli import _options, _output
from llama_dflash.errors import PairingError


def facts(m: gguf.ModelFacts) -> dict[str, Any]:
    """The JSON object of one file."""
    out: dict[str, Any] = {
        "path": str(m.path),
        "kind": "draft" if m.is_draft else "target",
        "name": m.name,
        "arch": m.arch,
        "quant": m.quant,
        "size_bytes": m.size_bytes,
        "n_tensors": len(m.tensors),
        "n_layer": m.n_layer,
        "n_embd": m.n_embd,
        "n_head": m.key("attention.head_count"),
        "n_head_kv": m.key("attention.head_count_kv"),
        "n_vocab": m.n_vocab,
        "n_ctx_train": int(m.key("context_length") or 0),
    }
    if m.key("ssm.state_size"):
        out["full_attention_interval"] = m.key("full_attention_interval")
        out["ssm_state_size"] = m.key("ssm.state_size")
    if m.is_draft:
        out |= {"format": m.draft_format, "block_size": m.block_size, "n_max": m.block_size - 1, "target_layers": m.target_layers}
        out["mask_token_id"] = m.fields.get("tokenizer.ggml.mask_token_id")
    return out


def pairs(files: list[gguf.ModelFacts]) -> list[dict[str, Any]]:
    """Every target with every draft, and why they do not fit."""
    out = []
    for target in (f for f in files if not f.is_draft):
        for draft in (f for f in files if f.is_draft):
            problems: list[str] = []
            if draft.arch in gguf.OLD_DRAFT_ARCHS:
                problems.append(f"the draft has an older key scheme ({draft.arch!r}) that pinned llama.cpp does not load")
            problems += gguf.pairing_problems(target, draft)
            out.append({"target": str(target.path), "draft": str(draft.path), "fits": not problems, "problems": problems})
    return out


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@_options.json_option
def info(files: tuple[Path, ...], as_json: bool) -> None:
    """Show what GGUF files are and whether targets and drafts among them fit together.

    Without FILES: the embedded models. Exit 1 when a pair does not fit.
    """
    chosen = files or _options.embedded_models()
    read = [gguf.read(path) for path in chosen]
    result: dict[str, Any] = {"schema": 1, "command": "info", "files": [facts(m) for m in read], "pairs": pairs(read)}
    if as_json:
        _output.data_json(result)
    else:
        show(result)
    bad = [p for p in result["pairs"] if not p["fits"]]
    if bad:
        raise PairingError(
            f"{Path(bad[0]['draft']).name} does not fit {Path(bad[0]['target']).name}: {bad[0]['problems'][0]}",
            "use the draft that was trained for this target",
        )


def show(result: dict[str, Any]) -> None:
    """Tables for a person."""
    for f in result["files"]:
        table = Table(title=Path(f["path"]).name, show_header=False)
        for key, value in f.items():
            table.add_row(key, str(value))
        _output.show(table)
    for p in result["pairs"]:
        verdict = "fits" if p["fits"] else "does not fit"
        _output.data(f"{Path(p['draft']).name} {verdict} {Path(p['target']).name}")
        for problem in p["problems"]:
            _output.data(f"  {problem}")
