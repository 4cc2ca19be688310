"""What differs from upstream's own run of its server tests, by the names of the tests; names.txt says why."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

NOT_RUN = "not run"
BOTH_FAIL = "fails on both"  # an assertion about upstream's model; the answers are compared all the same
OURS_FAILS = "fails on ours"  # strict: a test that passes again has to leave the list
DRAFTS_ONLY = "drafts only"  # asserts that drafts ran, so the reference cannot pass
INSTALLED = "installed build"  # run there instead of on the exact build, whose freed cells stay empty
NOT_COMPARED = "not compared"  # must pass on both; the answers may differ
KINDS = (NOT_RUN, BOTH_FAIL, OURS_FAILS, DRAFTS_ONLY, INSTALLED, NOT_COMPARED)


def read_names(path: Path) -> dict[str, list[str]]:
    """Names of each kind in `path`: a line `# <kind>: <reason>` stands above the names that it holds for."""
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    kind = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("# "):
            kind, _, reason = line.removeprefix("# ").partition(": ")
            if kind not in KINDS or not reason:
                raise ValueError(f"{path}:{number}: {line!r}, expected '# <kind>: <reason>' with one of: {', '.join(KINDS)}")
        elif line:
            names[kind].append(line)
    return names


def is_named(test: str, names: Collection[str]) -> bool:
    """Whether `names` has the test, its function (whatever the parameters) or its file."""
    return any(name in names for name in (test, test.split("[")[0], test.split("::")[0]))
