"""Read patch files and say what is wrong with them (docs/patches.md has the rules). Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FIELDS = ("Test", "Perf", "Blast-radius", "Origin", "Upstream")
MAX_PATCHES = 30
MAX_TOTAL_LINES = 7000
MAX_PATCH_LINES = 400


@dataclass
class Patch:
    """One patch file, parsed."""

    name: str
    subject: str
    body: str
    fields: dict[str, str]
    files: list[str]
    added: list[str] = field(repr=False)
    n_removed: int = 0

    @property
    def n_lines(self) -> int:
        """Changed lines, added plus removed."""
        return len(self.added) + self.n_removed

    @property
    def why(self) -> str:
        """First sentence of the description."""
        return re.split(r"(?<=[.;])\s", " ".join(self.body.split()), maxsplit=1)[0]


def file_name(subject: str) -> str:
    """`server : count rounds` -> `server-count-rounds.patch`."""
    slug = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    return f"{slug}.patch"


def parse(path: Path) -> Patch:
    """Parse a file written by `git format-patch`."""
    text = path.read_text()
    head, _, diff = text.partition("\ndiff --git ")
    match = re.search(r"^Subject: (.*(?:\n .*)*)", head, re.M)
    subject = re.sub(r"\s*\n\s+", " ", match[1]) if match else ""
    message = head.split("\n\n", 1)[1] if "\n\n" in head else ""
    fields: dict[str, str] = {}
    last = ""
    body_lines: list[str] = []
    for line in message.splitlines():
        key = re.match(r"^([A-Z][A-Za-z-]+): (.*)$", line)
        if key and key[1] in (*FIELDS, "Size"):
            last = key[1]
            fields[last] = key[2].strip()
        elif last and line.startswith(" "):
            fields[last] += " " + line.strip()
        elif not last:
            body_lines.append(line)
    diff_lines = ("diff --git " + diff).splitlines() if diff else []
    files = [m[1] for line in diff_lines if (m := re.match(r"^diff --git a/(\S+) b/\S+$", line))]
    added = [line[1:] for line in diff_lines if line.startswith("+") and not line.startswith("+++ ")]
    n_removed = sum(line.startswith("-") and not line.startswith("--- ") for line in diff_lines)
    return Patch(path.name, subject, "\n".join(body_lines).strip(), fields, files, added, n_removed)


def test_paths(patch: Patch) -> list[str]:
    """The pytest files (without ::names) that the header names."""
    return sorted(set(re.findall(r"(tests/[\w/.-]+\.py)", patch.fields.get("Test", ""))))


def problems(patch: Patch, root: Path) -> list[str]:
    """Every rule that one patch breaks, as `file: what; expected ...`."""
    out = []
    if not re.match(r"^[a-z0-9][\w.,/-]* : \S", patch.subject):
        out.append(f"subject is {patch.subject!r}; expected '<module> : <title>'")
    if re.search(r"\band\b", patch.subject):
        out.append(f"subject {patch.subject!r} has 'and'; expected one concern a patch: split it")
    if patch.name != file_name(patch.subject):
        out.append(f"expected file name {file_name(patch.subject)}, from the subject")
    if not patch.body:
        out.append("no description; expected what the pin does today and what changes")
    for key in FIELDS:
        value = patch.fields.get(key, "")
        if not value or "TODO" in value:
            out.append(f"header field '{key}:' is {value or 'missing'}; expected a value (docs/patches.md)")
    for path in test_paths(patch):
        if not (root / path).is_file():
            out.append(f"Test: names {path}, which does not exist")
    if not patch.files:
        out.append("changes no file")
    for line in patch.added:
        if line != line.rstrip():
            out.append(f"added line ends in whitespace: {line!r}")
            break
    bad = next((line for line in patch.added if not line.isascii()), None)
    if bad:
        out.append(f"added line is not ASCII: {bad.strip()!r}")
    if patch.n_lines > MAX_PATCH_LINES and "Size" not in patch.fields:
        out.append(f"{patch.n_lines} changed lines; expected at most {MAX_PATCH_LINES}, or a 'Size:' field with the reason")
    return [f"{patch.name}: {line}" for line in out]


def series_problems(names: list[str], present: list[str]) -> list[str]:
    """Differences between the series and the folder, and the number of patches."""
    out = [f"patches/series names {name}, which is not in patches/" for name in names if name not in present]
    out += [f"patches/{name} is not in patches/series" for name in present if name not in names]
    out += [f"patches/series names {name} more than once" for name in sorted({n for n in names if names.count(n) > 1})]
    if len(names) > MAX_PATCHES:
        out.append(f"{len(names)} patches; expected at most {MAX_PATCHES}")
    return out
