"""`bench`: speed and acceptance of the modes, repeats interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from llama_dflash import builds
from llama_dflash.bench import compare, report, stats
from llama_dflash.bench.run import Job, Pass, run_pass
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError, UsageError
from llama_dflash.spec import MODES, RunConfig


def parse_modes(text: str) -> list[str]:
    """Split and check a comma-separated list of modes."""
    modes = [m.strip() for m in text.split(",") if m.strip()]
    for m in modes:
        if m not in MODES:
            raise UsageError(f"--modes has {m!r}, expected some of {', '.join(MODES)}", "separate them by commas")
    if not modes or len(set(modes)) != len(modes):
        raise UsageError(f"--modes is {text!r}, expected each mode once", f"such as --modes {','.join(MODES)}")
    return modes


@click.command()
@_options.model_options
@click.option("--modes", default="ar,chain", show_default=True, help="Modes to run, comma separated.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Passes over the prompts in every mode."
)
@_options.job_options
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a PNG here.  [default: plot.png in --out]")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
@_options.native_option
@_options.json_option
def bench(
    choice: _options.Choice,
    modes: str,
    repeats: int,
    out: Path | None,
    plot: Path | None,
    markdown: bool,
    native: str,
    as_json: bool,
    **job_fields: Any,
) -> None:
    """Measure tokens a second and tokens a round in several modes: ar (no drafts), chain, tree (budget 15 by default).

    Every repeat runs all modes before the next begins, each on a freshly started server; figures are medians over repeats.
    Writes result.json, tokens.json, result.md and plot.png to --out.
    """
    names = parse_modes(modes)
    _options.check_modes(choice, names, "--modes")
    if markdown and as_json:
        raise UsageError("--json and --markdown were both given, expected one", "result.md is in --out either way")
    if plot and plot.suffix != ".png":
        raise UsageError(f"--plot is {str(plot)!r}, expected a name that ends in .png", "the plot is a PNG")
    configs = {m: _options.run_config(choice, m) for m in names}
    job = _options.job(**job_fields)
    build = builds.resolve(native)
    folder = out or Path(".bench") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    png = plot or folder / "plot.png"
    if plot and not report.can_plot():
        raise DFlashError("--plot needs the package matplotlib, which is not installed", "pip install 'llama-dflash[bench]'")
    for place in (folder, png.parent):
        report.require_writable(place)
    with _output.progress("bench", repeats * len(names) * len(job.cases)) as bar:
        passes = measure(build, configs, job, repeats, lambda: bar.advance(bar.task_ids[0]))
    result = summarize("bench", build, configs, job, passes)
    result["repeats"] = repeats
    result["files"] = report.write(folder, result, job, {m: p[0] for m, p in passes.items()})
    (folder / "result.md").write_text(report.markdown(result) + "\n")
    if report.can_plot():
        report.plot(png, result)
    else:
        _output.note("no plot: matplotlib is not installed (pip install 'llama-dflash[bench]')")
    if as_json:
        _output.data_json(result)
    elif markdown:
        _output.data(report.markdown(result))
    else:
        _output.show(report.table(result))
    _output.note(f"files: {folder}")


def measure(
    build: builds.Build, configs: dict[str, RunConfig], job: Job, repeats: int, step: Callable[[], None]
) -> dict[str, list[Pass]]:
    """Run every mode `repeats` times, interleaved; returns the passes of each mode."""
    passes: dict[str, list[Pass]] = {m: [] for m in configs}
    for _ in range(repeats):
        for m, config in configs.items():
            passes[m].append(run_pass(build, config, job, step))
    return passes


def summarize(
    command: str, build: builds.Build, configs: dict[str, RunConfig], job: Job, passes: dict[str, list[Pass]]
) -> dict[str, Any]:
    """The result of several modes; each is compared with AR where AR was run."""
    widest = next((c for c in configs.values() if c.draft), next(iter(configs.values())))
    result = report.header(command, build, widest, job)
    result["modes"] = {m: stats.mode_figures(p, configs[m]) for m, p in passes.items()}
    for m in _others(list(configs)):
        found = compare.divergences(job.cases, passes["ar"][0], passes[m][0])
        result["modes"][m] |= {"identical": len(job.cases) - len(found), "diverged": found}
    return result


def _others(modes: Sequence[str]) -> list[str]:
    return [m for m in modes if m != "ar"] if "ar" in modes else []
