"""Where the package's own files are; works for wheels and for editable installs."""

from __future__ import annotations

from pathlib import Path

import llama_dflash
from llama_dflash.errors import BuildError


def find(relative: str) -> Path:
    """Return the first existing `relative` under the package's search path.

    Raises:
        BuildError: it is nowhere; the install is incomplete.
    """
    # An editable install has two roots: the checkout (Python) and site-packages (native files).
    for root in llama_dflash.__path__:
        path = Path(root) / relative
        if path.exists():
            return path
    raise BuildError(
        f"{relative} is not in {', '.join(llama_dflash.__path__)}; expected an installed package",
        "run 'make setup' in the checkout, or 'pip install .'",
    )


def recipe_root() -> Path | None:
    """The folder that a native build can be made from: the checkout, or the copy in the wheel; None if neither is there."""
    roots = [Path(root) for root in llama_dflash.__path__]
    # The checkout first: in an editable install the wheel's copy is as old as the install.
    for candidate in (*(root.parent for root in roots), *(root / "_recipe" for root in roots)):
        if (candidate / "vendor" / "pin.txt").is_file() and (candidate / "scripts" / "native.py").is_file():
            return candidate
    return None
