"""Names of upstream's server tests in text files, grouped under the reason why they are there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def read_names(path: Path) -> dict[str, str]:
    """Names in `path`, each with its reason; a line `# ...` is the reason of the names below it."""
    names, reason = {}, ""
    for line in path.read_text().splitlines():
        if line.startswith("# "):
            reason = line.removeprefix("# ")
        elif line:
            names[line] = reason
    return names


def is_named(test: str, names: Iterable[str]) -> bool:
    """Whether `names` has the test, its function (for all parameters) or its file."""
    return bool({test, test.split("[")[0], test.split("::")[0]} & set(names))
