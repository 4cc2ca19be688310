"""Native builds: which llama-server, llama-cli and libllama a command uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_dflash import _paths
from llama_dflash.errors import BuildError, UsageError

INSTALLED = "installed"
PRESETS = ("native", "cpu", "exact", "cuda", "asan", "reference")
INFO_KEYS = ("pin", "bindings", "series_digest", "preset", "backend", "backend_reason", "page", "page_reason", "exact", "compiler")


@dataclass(frozen=True)
class Build:
    """One native build.

    Attributes:
        package: folder that holds `bin/`, `_vendor/` and `BUILD_INFO.json`.
        info: contents of BUILD_INFO.json.
    """

    package: Path
    info: dict[str, Any]

    def program(self, name: str) -> Path:
        """Path of an executable such as `llama-server`; raises BuildError when it is missing."""
        path = self.package / "bin" / name
        if not path.is_file():
            raise BuildError(f"{path} is missing; expected it in every build", "install the package again")
        return path

    @property
    def is_exact(self) -> bool:
        """Whether equality of outputs can be asserted bitwise."""
        return bool(self.info["exact"] == "ON")

    @property
    def summary(self) -> dict[str, str]:
        """The `build` object of every JSON result."""
        return {key: str(self.info[key]) for key in ("series_digest", "pin", "backend", "compiler", "preset")}


def read_build(package: Path) -> Build:
    """Read BUILD_INFO.json of a package folder."""
    path = package / "BUILD_INFO.json"
    try:
        info = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise BuildError(f"{path} cannot be read ({e}); expected the folder of a finished build", "build it again") from e
    missing = [key for key in INFO_KEYS if not isinstance(info, dict) or key not in info]
    if missing:
        raise BuildError(f"{path} lacks {', '.join(missing)}; expected the file of a finished build", "build it again")
    return Build(package, info)


def resolve(native: str) -> Build:
    """Find the build that `--native` names, compiling a preset on first use.

    Args:
        native: `installed`, a preset name (see PRESETS), or the folder of a finished build.

    Raises:
        UsageError: neither a preset nor a folder.
        BuildError: it cannot be found or made.
    """
    if native == INSTALLED:
        return read_build(_paths.find("BUILD_INFO.json").parent)
    if native in PRESETS:
        return read_build(_build_preset(native) / "llama_dflash")
    # The os.path forms take any text: an unknown ~user or a name too long is just no folder.
    folder = Path(os.path.expanduser(native))
    for package in (folder / "llama_dflash", folder):
        if os.path.isfile(package / "BUILD_INFO.json"):
            return read_build(package.resolve())
    raise UsageError(
        f"--native {native!r} is neither a preset nor the folder of a finished build",
        f"use one of: {INSTALLED}, {', '.join(PRESETS)}",
    )


def _build_preset(preset: str) -> Path:
    root = _paths.recipe_root()
    if root is None:
        raise BuildError(
            f"--native {preset} has to be compiled, and the build recipe is not beside the package",
            "run the command from the checkout's .venv",
        )
    cmd = [sys.executable, str(root / "scripts" / "native.py"), "build", preset]
    done = subprocess.run(cmd, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BuildError(f"preset {preset} could not be built (the lines above say why)", "fix that and run the command again")
    return Path(done.stdout.strip().splitlines()[-1])
