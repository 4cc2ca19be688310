"""`doctor`: what is installed, what was built and why, and what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import llama_dflash
from llama_dflash import __version__, _paths, builds, memory
from llama_dflash.bench.report import cpu_name
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError

TOOLS = ("git", "cmake", "ninja", "c++", "ccache", "npm", "node", "nvcc", "nvidia-smi")
_IMPORT = "import json, llama_dflash._bindings as b; print(json.dumps([b.llama_cpp.__file__, b.llama_cpp.__version__]))"


def _first_line(cmd: list[str]) -> str:
    try:
        done = subprocess.run(cmd, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"failed: {e}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return (
        lines[0]
        if lines and not done.returncode
        else f"failed with code {done.returncode}: {lines[-1] if lines else 'no output'}"
    )


def _tools() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {tool: shutil.which(tool, path=path) or "not found" for tool in TOOLS}


def _bindings() -> dict[str, str]:
    # In a process of its own: the import must not depend on what this one has loaded.
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    path, version = json.loads(done.stdout)
    return {"path": path, "version": version}


def _web_page(info: dict[str, Any]) -> str:
    if info["page"] == "built":
        return f"built ({info['page_reason']}); llama-server shows it at /"
    return f"not built: {info['page_reason']}; the HTTP API is complete without it; for the page, build again with npm"


def _stock() -> str:
    try:
        return f"llama-cpp-python {metadata.version('llama-cpp-python')} (untouched; import llama_dflash first to use ours)"
    except metadata.PackageNotFoundError:
        return "none"


def collect(native: str) -> tuple[dict[str, Any], list[str]]:
    """Everything doctor knows, and the problems among it."""
    problems: list[str] = []
    facts: dict[str, Any] = {"version": __version__, "python": sys.version.split()[0], "package": list(llama_dflash.__path__)}
    try:
        build = builds.resolve(native)
        facts["build"] = build.info
        facts["llama_server"] = _first_line([str(build.program("llama-server")), "--version"])
        if facts["llama_server"].startswith("failed"):
            problems.append(f"llama-server does not run: {facts['llama_server']}")
        facts["web_page"] = _web_page(build.info)
    except DFlashError as e:
        problems.append(str(e))
    facts["bindings"] = _bindings()
    if "error" in facts["bindings"]:
        problems.append(f"the bundled bindings do not import: {facts['bindings']['error']}")
    facts["stock_llama_cpp"] = _stock()
    recipe = _paths.recipe_root()
    facts["recipe"] = str(recipe) if recipe else "none: presets such as exact cannot be built from here"
    available = memory.available_bytes()
    facts["machine"] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "available_gib": round(available / memory.GIB, 1) if available else None,
    }
    facts["tools"] = _tools()
    return facts, problems


@click.command()
@_options.native_option
@_options.json_option
def doctor(native: str, as_json: bool) -> None:
    """Show what is installed, which backend was built and why, and what is missing. Exit 1 if something does not work."""
    facts, problems = collect(native)
    if as_json:
        _output.data_json({"schema": 1, "command": "doctor", **facts, "problems": problems})
    else:
        for key, value in facts.items():
            if isinstance(value, dict):
                _output.data(f"{key}:")
                for name, item in value.items():
                    _output.data(f"  {name:16} {item}")
            else:
                _output.data(f"{key + ':':18} {value}")
        for line in problems or ["everything works"]:
            _output.data(line)
    if problems:
        raise DFlashError(f"{len(problems)} of the checks failed, first: {problems[0]}")
