#!/usr/bin/env python3
"""Keep the patch queue: patches/ (files) and vendor/llama.cpp (the same patches as commits).

    patchq.py new SUBJECT [-F FILE]   commit the changes in vendor/llama.cpp with a header to fill in
    patchq.py refresh                 export the commits to patches/, rewrite series and README
    patchq.py check                   everything that must hold before a commit (make check-patches)
    patchq.py index                   write patches/README.md
    patchq.py stats                   changed lines a patch
    patchq.py rebase-onto PIN         try the series on another pin, in vendor/next
    patchq.py bisect-check [PRESET] [--since PATCH] [--out FILE]
                                      build every prefix of the series and run the tests its last patch names

Standard library only. The rules are in docs/patches.md.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import native
import patch_lint

import vendor

ROOT = vendor.ROOT
EXPORT_CONFIG = ("core.abbrev=40", "diff.renames=true", "diff.algorithm=histogram", "diff.context=3", "diff.noprefix=false")
EXPORT_FLAGS = ("--no-signature", "--zero-commit", "--full-index", "--no-numbered", "--no-stat", "--keep-subject", "-N")
HEADER = """{subject}

TODO what the pin does today and what goes wrong; what changes; default on or off

Test: TODO
Perf: none intended
Blast-radius: TODO
Origin: ours
Upstream: not-sent
"""


def export(tree: Path) -> dict[str, bytes]:
    """The commits base..HEAD of `tree` as {file name: bytes}, in order."""
    config = [arg for item in EXPORT_CONFIG for arg in ("-c", item)]
    with tempfile.TemporaryDirectory() as tmp:
        vendor.git(tree, *config, "format-patch", "-q", *EXPORT_FLAGS, "-o", tmp, "base..HEAD")
        out: dict[str, bytes] = {}
        for path in sorted(Path(tmp).glob("*.patch")):
            name = patch_lint.file_name(patch_lint.parse(path).subject)
            if name in out:
                raise vendor.VendorError(f"two commits have the file name {name}; reword one subject")
            out[name] = path.read_bytes()
    return out


def write_series(names: Sequence[str], root: Path) -> None:
    """Rewrite patches/series in the commits' order; group comments stay in front of their first patch."""
    path = root / "patches" / "series"
    comments: dict[str, list[str]] = {}
    suffix: dict[str, str] = {}
    head: list[str] = []
    pending: list[str] = []
    for line in path.read_text().splitlines():
        name = line.split("#")[0].strip()
        if name:
            comments[name], suffix[name] = pending, line.rstrip().removeprefix(name)
            pending = []
        elif not comments and not head and line == "":
            head, pending = [*pending, ""], []
        else:
            pending.append(line)
    follow_changes(comments, suffix, names)
    lines = head
    for name in names:
        lines += [*comments.get(name, []), name + suffix.get(name, "")]
    path.write_text("\n".join([*lines, *pending]) + "\n")


def follow_changes(comments: dict[str, list[str]], suffix: dict[str, str], names: Sequence[str]) -> None:
    """Hand what stands around a renamed or dropped patch to its new name, or to the next patch of its group."""
    old = list(comments)
    renamed: dict[str, str] = {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, names, autojunk=False).get_opcodes():
        if tag == "replace":
            gone = [name for name in old[i1:i2] if name not in names]
            renamed |= dict(zip(gone, [name for name in names[j1:j2] if name not in old], strict=False))
    for i, name in enumerate(old):
        if name in renamed:
            comments[renamed[name]], suffix[renamed[name]] = comments[name], suffix[name]
        elif name not in names and i + 1 < len(old) and not comments[old[i + 1]]:
            comments[old[i + 1]] = comments[name]


def refresh(root: Path = ROOT) -> list[str]:
    """Export the vendor tree's commits; returns the names."""
    tree = root / "vendor" / "llama.cpp"
    if vendor.git(tree, "status", "--porcelain").stdout.strip():
        raise vendor.VendorError(f"{tree} has uncommitted changes; commit them (patchq new, git commit --fixup) first")
    ignored = vendor.ignored_files(tree)
    if ignored:
        raise vendor.VendorError(f"{tree} has {ignored}")
    # A tree that holds a prefix of the series, or an older one, would delete or revert the other patches.
    names, stamp, patches = vendor.read_series(root), vendor.read_stamp(tree), export(tree)
    want = vendor.digest(names, root)
    mended = stamp is not None and stamp[0] == "partial" and set(names) <= set(patches)
    if stamp is not None and stamp[0] not in (want, "exported") and not mended:
        raise vendor.VendorError(
            f"{tree} was made from series {stamp[0]}, expected {want} of patches/; run 'make vendor', or, when the tree "
            f"has work of yours, restore patches/ or delete {vendor.stamp_path(tree)} to export what is there"
        )
    before = vendor.git(tree, "rev-parse", "HEAD", "HEAD^{tree}").stdout.split()
    for old in (root / "patches").glob("*.patch"):
        if old.name not in patches:
            old.unlink()
    for name, data in patches.items():
        (root / "patches" / name).write_bytes(data)
    write_series(list(patches), root)
    write_index(root)
    # The tree's HEAD depends on committer data; reapplying makes it what a fresh clone gets.
    vendor.write_stamp(tree, "exported")
    vendor.prepare(tree, list(patches), root)
    if vendor.git(tree, "rev-parse", "HEAD^{tree}").stdout.strip() != before[1]:
        raise vendor.VendorError(
            f"{tree}: the exported patches give another tree than commit {before[0][:12]}, expected the same; "
            f"put the difference (a merge?) into a plain commit and run 'make refresh'"
        )
    return list(patches)


def new(subject: str, message: str | None, root: Path = ROOT) -> str:
    """Commit what is changed in the vendor tree under `subject`."""
    tree = root / "vendor" / "llama.cpp"
    text = message if message is not None else HEADER.format(subject=subject)
    if not text.startswith(subject + "\n"):
        text = f"{subject}\n\n{text}"
    vendor.git(tree, "add", "-A")
    if not vendor.git(tree, "diff", "--cached", "--name-only").stdout.strip():
        raise vendor.VendorError(f"{tree} has no changes; edit it first, then run patchq new")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    vendor.git(tree, "commit", "-q", "--no-verify", "-m", text, date=now)
    return patch_lint.file_name(subject)


def index_text(root: Path = ROOT) -> str:
    """Contents of patches/README.md."""
    lines = ["# Patch index", "", "Generated by `make refresh` (scripts/patchq.py index). Do not edit.", ""]
    lines += ["| # | patch | why | test | upstream | lines |", "|---|---|---|---|---|---|"]
    for i, name in enumerate(vendor.read_series(root), 1):
        p = patch_lint.parse(root / "patches" / name)
        cells = (p.subject, p.why, p.fields.get("Test", ""), p.fields.get("Upstream", ""), f"+{len(p.added)} -{p.n_removed}")
        lines.append(f"| {i} | " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def write_index(root: Path = ROOT) -> None:
    """Write patches/README.md."""
    (root / "patches" / "README.md").write_text(index_text(root))


def check(root: Path = ROOT) -> list[str]:
    """All problems of the queue; an empty list is a pass. Applies the series to a pristine scratch tree."""
    names = vendor.read_series(root)
    found = patch_lint.series_problems(names, sorted(p.name for p in (root / "patches").glob("*.patch")))
    if found:
        return found
    patches = [patch_lint.parse(root / "patches" / name) for name in names]
    for patch in patches:
        found += patch_lint.problems(patch, root)
    n_total = sum(p.n_lines for p in patches)
    if n_total > patch_lint.MAX_TOTAL_LINES:
        found.append(f"the series changes {n_total} lines; expected at most {patch_lint.MAX_TOTAL_LINES}: drop some")
    index = root / "patches" / "README.md"
    if not index.is_file() or index.read_text() != index_text(root):
        found.append("patches/README.md is stale, expected the index of patches/series; run 'python scripts/patchq.py index'")
    work = vendor.unexported_work(root / "vendor" / "llama.cpp")
    if work:
        found.append(f"vendor/llama.cpp has {work}")
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "llama.cpp"
        try:
            vendor.unpack(tree, Path(tmp) / "llama_cpp", root)
            vendor.apply_patches(tree, names, root)
        except vendor.VendorError as e:
            return [*found, str(e)]
        # A hunk that applied at an offset comes out with other line numbers: no fuzz, and nothing edited by hand.
        exported = export(tree)
        for name in names:
            if exported.get(name) != (root / "patches" / name).read_bytes():
                found.append(f"{name}: the file is not what its commit exports; expected equal bytes: run 'make vendor refresh'")
    return found


def stats(root: Path = ROOT) -> str:
    """One line a patch and a total."""
    patches = [patch_lint.parse(root / "patches" / name) for name in vendor.read_series(root)]
    lines = [f"{len(p.added):5d} + {p.n_removed:4d} -  {p.name}" for p in patches]
    n_added, n_removed = sum(len(p.added) for p in patches), sum(p.n_removed for p in patches)
    budget = f"{len(patches)} of {patch_lint.MAX_PATCHES} patches, {n_added + n_removed} of {patch_lint.MAX_TOTAL_LINES} lines"
    return "\n".join([*lines, f"{n_added:5d} + {n_removed:4d} -  total: {budget}"])


def rebase_onto(pin_file: Path, root: Path = ROOT) -> str:
    """Apply the series, three-way, to the tree of another pin file; returns what to do next."""
    tree = root / "vendor" / "next" / "llama.cpp"
    if tree.exists():
        raise vendor.VendorError(f"{tree} exists and may hold resolved conflicts; delete {tree.parent} to start again")
    with tempfile.TemporaryDirectory() as tmp:
        other = Path(tmp)
        (other / "vendor").mkdir()
        shutil.copyfile(pin_file, other / "vendor" / "pin.txt")
        try:
            vendor.unpack(tree, tree.parent / "llama_cpp", other)
        except vendor.VendorError:
            shutil.rmtree(tree.parent, ignore_errors=True)  # a new pin's tree id is learnt from this very failure
            raise
    old = root / "vendor" / "llama.cpp"
    if (old / ".git").exists():
        vendor.git(tree, "fetch", "-q", str(old), "HEAD")  # the blobs that a three-way merge needs
    am = ("am", "-q", "--3way", "--keep-non-patch", "--committer-date-is-author-date")
    finish = (f"copy {pin_file} to vendor/pin.txt, delete vendor/.llama.cpp.stamp, replace vendor/llama.cpp and vendor/llama_cpp "
              f"by those in vendor/next, run 'make refresh' and the checklist in docs/patches.md")  # fmt: skip
    names = vendor.read_series(root)
    for i, name in enumerate(names):
        done = vendor.git(tree, *am, str(vendor.patch_path(name, root)), date=None, check=False)
        if done.returncode:
            files = vendor.git(tree, "diff", "--name-only", "--diff-filter=U", check=False).stdout.split()
            rest = "".join(f" {root / 'patches' / later}" for later in names[i + 1 :])
            raise vendor.VendorError(
                f"{name} conflicts on the new pin in {', '.join(files) or 'files that are gone'}; next: cd {tree}; "
                f"resolve, git add -u; git am --continue (or --skip when upstream has merged it); "
                f"{f'git am --3way{rest}; ' if rest else ''}{finish}"
            )
    return f"all patches apply; next: {finish}"


def bisect_check(preset: str, root: Path = ROOT, since: str | None = None, out: Path | None = None) -> list[str]:
    """Build each prefix of the series and run the tests that its last patch names; returns the failures.

    Args:
        preset: what to build.
        root: the checkout.
        since: first patch whose prefix is checked; None for all.
        out: file for what was done, as JSON; None for none.
    """
    names = vendor.read_series(root)
    if since is not None:
        if since not in names:
            raise vendor.VendorError(f"--since {since} is not in patches/series, expected a patch file name of it")
        names = names[names.index(since) :]
    failures, steps = [], []
    for name in names:
        tests = patch_lint.test_paths(patch_lint.parse(root / "patches" / name))
        print(f"== up to {name}: {', '.join(tests) or 'no tests named'}", flush=True)
        started_s = time.monotonic()
        step = {"patch": name, "tests": tests, "builds": True, "result": "no tests named"}
        steps.append(step)
        try:
            prefix = native.build(preset, upto=name)
        except vendor.VendorError as e:
            step.update(builds=False, result=str(e))
            failures.append(f"{name}: does not build alone: {e}")
            continue
        step["build_s"] = round(time.monotonic() - started_s)
        if not tests:
            continue
        env = {**os.environ, "LLAMA_DFLASH_NATIVE": str(prefix)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
        done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="", flush=True)
        step["result"] = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else "no output"
        if done.returncode:
            failures.append(f"{name}: its tests fail on the prefix that ends with it")
    if out is not None:
        digest = vendor.digest(vendor.read_series(root), root=root)
        out.write_text(json.dumps({"preset": preset, "series_digest": digest, "failures": failures, "steps": steps}, indent=1) + "\n")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; problems on stderr, one a line, exit 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    for name in ("refresh", "check", "index", "stats"):
        sub.add_parser(name)
    p_new = sub.add_parser("new")
    p_new.add_argument("subject")
    p_new.add_argument("-F", "--file", type=Path, help="file with the rest of the message")
    sub.add_parser("rebase-onto").add_argument("pin", type=Path)
    p_bisect = sub.add_parser("bisect-check")
    p_bisect.add_argument("preset", nargs="?", default="exact", choices=native.PRESETS)
    p_bisect.add_argument("--since", help="first patch whose prefix is checked")
    p_bisect.add_argument("--out", type=Path, help="write what was done as JSON")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (vendor.VendorError, OSError) as e:
        print(f"patchq: error: {e}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> int:
    """Dispatch one parsed command."""
    found: list[str] = []
    if args.command == "new":
        print(new(args.subject, args.file.read_text() if args.file else None))
    elif args.command == "refresh":
        print("\n".join(refresh()))
    elif args.command == "index":
        write_index()
    elif args.command == "stats":
        print(stats())
    elif args.command == "rebase-onto":
        print(rebase_onto(args.pin))
    elif args.command == "bisect-check":
        found = bisect_check(args.preset, since=args.since, out=args.out)
    else:
        found = check()
        if not found:
            print(f"patches: ok, {stats().splitlines()[-1].split('total: ')[1]}")
    for line in found:
        print(f"patchq: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
