"""Results as JSON, as a table and as a plot."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from llama_dflash import gguf
from llama_dflash.bench.cases import Case
from llama_dflash.bench.run import Job, Pass
from llama_dflash.builds import Build
from llama_dflash.errors import DFlashError
from llama_dflash.spec import RunConfig

SCHEMA = 1


def header(command: str, build: Build, config: RunConfig, job: Job) -> dict[str, Any]:
    """The keys that every result has."""
    models = {"target": gguf.read(config.target).summary}
    if config.draft:
        models["draft"] = gguf.read(config.draft).summary
    return {
        "schema": SCHEMA,
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpu": cpu_name(), "system": f"{platform.system()} {platform.machine()}"},
        "build": build.summary,
        "models": models,
        "prompts": len(job.cases),
        "n_predict": job.n_predict,
        "ignore_eos": job.ignore_eos,
        "sampling": job.sampling.summary,
        "modes": {},
    }


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_tokens(path: Path, cases: Sequence[Case], passes: dict[str, Pass]) -> None:
    """Write every token id and the server's timings, one JSON object a prompt and mode."""
    rows = []
    for mode, result in passes.items():
        for case, done in zip(cases, result.completions, strict=True):
            rows.append({"mode": mode, "prompt": case.name, "tokens": done.tokens, "text": done.text, "timings": done.timings})
    _replace(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(text)
    os.replace(tmp, path)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, readable and with a newline at the end."""
    _replace(path, json.dumps(result, indent=1) + "\n")


def require_writable(folder: Path) -> None:
    """Make `folder` and raise DFlashError unless files can be written there, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise DFlashError(
            f"{folder} cannot be written ({e.strerror}), expected a folder for results", "choose one with --out"
        ) from e


def write(folder: Path, result: dict[str, Any], job: Job, passes: dict[str, Pass]) -> dict[str, str]:
    """Write result.json and tokens.json; returns their paths."""
    files = {"result": str(folder / "result.json"), "tokens": str(folder / "tokens.json")}
    write_tokens(folder / "tokens.json", job.cases, passes)
    write_json(folder / "result.json", {**result, "files": files})
    return files


def label(mode: str, figures: dict[str, Any]) -> str:
    """A mode with its size: the nodes of a tree, the length of a chain."""
    size = figures.get("budget", figures.get("n_max"))
    return mode if size is None else f"{mode} {size}"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Table cells, the heading first."""
    out = [["mode", "tokens/round", "rounds", "tok/s", "± MAD", "ms/round", "equal to AR"]]
    for mode, m in result["modes"].items():
        name = label(mode, m)
        equal = f"{m['identical']} of {result['prompts']}" if "identical" in m else "-"
        speed = (f"{m['tok_s']:.1f}", f"{m['tok_s_mad']:.1f}" if len(m["tok_s_repeats"]) > 1 else "-")
        out.append([name, f"{m['mean_accepted']:.2f}", str(m["rounds"]), *speed, f"{m['ms_per_round']:.2f}", equal])
    return out


def table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    head, *body = rows(result)
    out = Table(title=f"{result['prompts']} prompts x {result['n_predict']} tokens, {result['models']['target']['name']}")
    for i, name in enumerate(head):
        out.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in body:
        out.add_row(*row)
    return out


def markdown(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    head, *body = rows(result)
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw speed of every mode, and acceptance by position where there is one, to a PNG.

    Raises:
        DFlashError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise DFlashError("the plot needs the package matplotlib", "pip install 'llama-dflash[bench]'") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    modes = result["modes"]
    names = [label(mode, m) for mode, m in modes.items()]
    left.bar(names, [m["tok_s"] for m in modes.values()], yerr=[m["tok_s_mad"] for m in modes.values()], capsize=4)
    left.set_ylabel("tokens / s (median, MAD)")
    for mode, m in modes.items():
        if m.get("accept_per_position"):
            positions = range(1, len(m["accept_per_position"]) + 1)
            right.plot(positions, m["accept_per_position"], marker="o", label=f"{label(mode, m)}, {m['mean_accepted']:.2f} tokens / round")
            right.legend()
    right.set_xlabel("draft position (in a tree: depth)")
    right.set_ylabel("accepted share of rounds")
    right.set_ylim(0, 1)
    figure.suptitle(f"{result['models']['target']['name']}, {result['build']['backend']}, {result['prompts']} prompts")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
