"""`env`: shell lines that make your own llama-cpp-python use the patched library."""

from __future__ import annotations

import shlex
from importlib import metadata

import click

from llama_dflash import builds
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError


@click.command()
@_options.native_option
def env(native: str) -> None:
    """Print exports for an own llama-cpp-python: eval "$(llama-dflash env)".

    Refuses unless the llama-cpp-python of this environment, if there is one, is the pinned version: its structs are
    laid out by version, and the library cannot tell a wrong one.
    """
    build = builds.resolve(native)
    pinned = str(build.info["bindings"])
    try:
        installed = metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        installed = None
        _output.note(f"no llama-cpp-python in this environment; use these lines with version {pinned} only")
    if installed not in (None, pinned):
        raise DFlashError(f"llama-cpp-python is {installed}, expected {pinned}", f"pip install llama-cpp-python=={pinned}")
    lib = shlex.quote(str(build.package / "_vendor" / "llama_cpp" / "lib"))
    _output.data(f"export LLAMA_CPP_LIB_PATH={lib}")
    _output.data(f"export MTMD_CPP_LIB={lib}")
