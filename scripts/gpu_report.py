#!/usr/bin/env python3
"""README's GPU table and the plots, from a result of gpu_bench.py.

    gpu_report.py bench/results/DEVICE-DATE.json      write the table into README.md, and all tables and plots into bench/results/DEVICE-DATE/
    gpu_report.py --check                             fail when README's table is not what its JSON gives

The table stands between `<!-- gpu-table:begin -->` and `<!-- gpu-table:end -->` and names the file that it comes from.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

from gpu import figures, table  # noqa: E402

BLOCK = re.compile(r"(<!-- gpu-table:begin -->\n)(.*?)(\n<!-- gpu-table:end -->)", re.S)
SOURCE = re.compile(r"\(\[data\]\((bench/results/[^)]+\.json)\), ")
NONE = "There is no GPU result of this version yet; [benchmarks](docs/benchmarks.md) tells how to make one."


def text_of(path: Path, root: Path = ROOT) -> str:
    """What stands between the markers for a result.

    Raises:
        ValueError: a figure is not that of its values.
    """
    data = json.loads(path.read_text())
    wrong = figures.wrong(data)
    if wrong:
        raise ValueError(f"{path.name}: {wrong[0]}")
    return table.markdown(data, path.resolve().relative_to(root).as_posix(), brief=True)


def problem(readme: str, root: Path = ROOT) -> str | None:
    """Why the table is not what its JSON gives, or None."""
    block = BLOCK.search(readme)
    if block is None:
        return "README.md has no <!-- gpu-table:begin --> and <!-- gpu-table:end -->"
    source = SOURCE.search(block[2])
    if source is None:
        return None if block[2] == NONE else "README.md: the GPU table names no JSON that it comes from"
    path = root / source[1]
    if not path.is_file():
        return f"README.md: the GPU table comes from {source[1]}, which does not exist"
    try:
        want = text_of(path, root)
    except (ValueError, KeyError) as e:
        return f"README.md: the GPU table comes from a wrong result: {e}"
    return None if block[2] == want else f"README.md: the GPU table is stale; run 'scripts/gpu_report.py {source[1]}'"


def filled(readme: str, text: str) -> str:
    """README with another table."""
    return BLOCK.sub(lambda m: f"{m[1]}{text}{m[3]}", readme)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("result", type=Path, nargs="?")
    p.add_argument("--check", action="store_true", help="change nothing, fail when the table is stale")
    p.add_argument("--print", action="store_true", help="print the table, write nothing")
    args = p.parse_args(argv)
    readme = ROOT / "README.md"
    if args.check:
        found = problem(readme.read_text())
        print(found or "README.md: the GPU table is current", file=sys.stderr if found else sys.stdout)
        return 1 if found else 0
    if args.result is None:
        p.error("a result is missing, expected bench/results/DEVICE-DATE.json")
    if args.print:
        print(text_of(args.result, args.result.resolve().parent))
        return 0
    readme.write_text(filled(readme.read_text(), text_of(args.result)))
    folder = args.result.with_suffix("")
    folder.mkdir(exist_ok=True)
    full = table.markdown(json.loads(args.result.read_text()), f"../{args.result.name}")
    (folder / "README.md").write_text(
        f"# {folder.name}\nMade by `scripts/gpu_report.py`; what the figures are: [benchmarks](../../../docs/benchmarks.md).\n\n{full}\n"
    )
    try:
        from gpu import plots

        for path in plots.write(json.loads(args.result.read_text()), args.result.with_suffix("")):
            print(path)
    except ImportError:
        print("no matplotlib here, so no plots; pip install 'llama-dflash[bench]'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
