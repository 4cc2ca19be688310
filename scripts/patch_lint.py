"""Read patch files and say what is wrong with them (docs/patches.md has the rules). Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

FIELDS = ("Test", "Perf", "Blast-radius", "Origin", "Upstream")
MAX_PATCHES = 45
MAX_TOTAL_LINES = 10000
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
    # Bytes, not text mode: a carriage return or a byte that is not UTF-8 must reach the rules below.
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    head, _, diff = text.partition("\ndiff --git ")
    match = re.search(r"^Subject: (.*(?:\n .*)*)", head, re.M)
    subject = re.sub(r"\s*\n\s+", " ", match[1]) if match else ""
    message = head.split("\n\n", 1)[1] if "\n\n" in head else ""
    fields: dict[str, str] = {}
    last = ""
    body_lines: list[str] = []
    for line in message.split("\n"):
        key = re.match(r"^([A-Z][A-Za-z-]+): (.*)$", line)
        if key and key[1] in (*FIELDS, "Size"):
            last = key[1]
            fields[last] = key[2].strip()
        elif last and line.startswith(" "):
            fields[last] += " " + line.strip()
        elif not last:
            body_lines.append(line)
    files, added, n_removed = parse_diff(("diff --git " + diff).split("\n") if diff else [])
    return Patch(path.name, subject, "\n".join(body_lines).strip(), fields, files, added, n_removed)


def parse_diff(lines: list[str]) -> tuple[list[str], list[str], int]:
    """Changed files, added lines (without the '+') and the number of removed lines."""
    files: list[str] = []
    added: list[str] = []
    n_removed = n_old = n_new = 0
    for line in lines:
        # Lines left in the hunk tell a removed '-- x' from the header '--- x'.
        if n_old > 0 or n_new > 0:
            n_old -= not line.startswith(("+", "\\"))
            n_new -= not line.startswith(("-", "\\"))
            n_removed += line.startswith("-")
            if line.startswith("+"):
                added.append(line[1:])
        elif hunk := re.match(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            n_old, n_new = int(hunk[1] or 1), int(hunk[2] or 1)
        elif header := re.match(r"^diff --git a/(.+) b/.+$", line):
            files.append(header[1])
    return files, added, n_removed


def test_paths(patch: Patch) -> list[str]:
    """The pytest files (without ::names) that the header names."""
    return sorted(set(re.findall(r"(tests/[\w/.-]+\.py)", patch.fields.get("Test", ""))))


def problems(patch: Patch, root: Path) -> list[str]:
    """Every rule that one patch breaks, as `file: what; expected ...`."""
    out = []
    if not re.match(r"^[a-z0-9][\w.,/-]* : \S", patch.subject):
        out.append(f"subject is {patch.subject!r}; expected '<module> : <title>': reword the commit")
    if re.search(r"\band\b", patch.subject):
        out.append(f"subject {patch.subject!r} has 'and'; expected one concern a patch: split it")
    if patch.name != file_name(patch.subject):
        out.append(f"file name differs from the subject's; expected {file_name(patch.subject)}: run 'make refresh'")
    if not patch.body or "TODO" in patch.body:
        out.append("no description; expected what the pin does today and what changes: reword the commit")
    for key in FIELDS:
        value = patch.fields.get(key, "")
        if not value or "TODO" in value:
            out.append(f"header field '{key}:' is {value or 'missing'}; expected a value (docs/patches.md)")
    for path in test_paths(patch):
        if not (root / path).is_file():
            out.append(f"Test: names {path}, which does not exist; expected a file of this repository: add it")
    if not patch.files:
        out.append("changes no file; expected a diff: drop the commit and run 'make refresh'")
    for line in patch.added:
        if line != line.rstrip():
            out.append(f"added line ends in whitespace: {line!r}; expected none: strip it in the commit")
            break
    bad = next((line for line in patch.added if not line.isascii()), None)
    if bad:
        out.append(f"added line is not ASCII: {bad.strip()!a}; expected ASCII only: reword it in the commit")
    if patch.n_lines > MAX_PATCH_LINES and "Size" not in patch.fields:
        out.append(f"{patch.n_lines} changed lines; expected at most {MAX_PATCH_LINES}, or a 'Size:' field with the reason")
    return [f"{patch.name}: {line}" for line in out]


def series_problems(names: list[str], present: list[str]) -> list[str]:
    """Differences between the series and the folder, and the number of patches."""
    absent = [name for name in names if name not in present]
    extra = [name for name in present if name not in names]
    twice = sorted({name for name in names if names.count(name) > 1})
    out = [f"patches/series names {name}, which is not in patches/; remove the line or restore the file" for name in absent]
    out += [f"patches/{name} is not in patches/series; add it there or delete the file" for name in extra]
    out += [f"patches/series names {name} more than once; expected once: remove a line" for name in twice]
    if len(names) > MAX_PATCHES:
        out.append(f"{len(names)} patches; expected at most {MAX_PATCHES}: join or drop some")
    return out
