"""`verify`: is the text with drafts the text without them?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from llama_dflash import builds
from llama_dflash.bench import compare, report, stats
from llama_dflash.bench.run import Job, Pass, run_pass
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError
from llama_dflash.spec import RunConfig


@click.command()
@_options.model_options
@click.option(
    "--mode", type=click.Choice(["chain"]), default="chain", show_default=True, help="What to compare with plain decoding."
)
@_options.job_options
@_options.native_option
@_options.json_option
def verify(
    model: Path | None,
    draft: Path | None,
    n_max: int | None,
    mode: str,
    out: Path | None,
    native: str,
    as_json: bool,
    **job_fields: Any,
) -> None:
    """Compare token ids with and without drafts; exit 1 if they differ for another reason than arithmetic.

    With --native exact the plain ids come from the unpatched pin and every id must be equal. With any other build they come
    from the same build, and a greedy difference passes only where the two best tokens were closer than arithmetic noise;
    sampled differences are listed, not judged.
    """
    config = _options.run_config(model, draft, n_max, mode)
    job = _options.job(**job_fields)
    build = builds.resolve(native)
    reference_build = builds.resolve("reference") if build.is_exact else build
    folder = out or Path(".bench") / f"verify-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    report.require_writable(folder)
    with _output.progress("verify", 2 * len(job.cases)) as bar:

        def step() -> None:
            bar.advance(bar.task_ids[0])

        reference = run_pass(reference_build, RunConfig(config.target), job, step)
        drafted = run_pass(build, config, job, step)
    result = report.header("verify", build, config, job)
    result["reference"] = {"kind": "unpatched pin" if build.is_exact else "same build", **reference_build.summary}
    result["modes"] = {"ar": stats.mode_figures([reference]), mode: stats.mode_figures([drafted])}
    judge(result, mode, build, config, job, reference, drafted)
    result["files"] = report.write(folder, result, job, {"ar": reference, mode: drafted})
    if as_json:
        _output.data_json(result)
    else:
        show(result, mode)
    if not result["passed"]:
        failed = ", ".join(name for name, ok in result["checks"].items() if not ok)
        raise DFlashError(f"verify failed: {failed}", f"see {folder / 'result.json'}")


def judge(
    result: dict[str, Any], mode: str, build: builds.Build, config: RunConfig, job: Job, reference: Pass, drafted: Pass
) -> None:
    """Compare two passes and write `identical`, `diverged`, `checks` and `passed` into `result`."""
    found = compare.divergences(job.cases, reference, drafted)
    figures = result["modes"][mode]
    figures["identical"] = len(job.cases) - len(found)
    result["checks"] = {
        "effective mode": drafted.effective["mode"] == mode,
        "drafts were verified": figures.get("drafted", 0) > 0,
        "fewer rounds than AR": stats.n_rounds(drafted) < stats.n_rounds(reference),
    }
    if build.is_exact:
        result["checks"]["all ids equal"] = not found
    elif found:
        result["noise_floor"] = round(compare.explain(build, config, job, reference, found), 6)
        if job.sampling.temperature == 0:
            left = compare.unexplained(found, result["noise_floor"])
            result["checks"]["differences within arithmetic noise"] = not left
        else:
            # The gap of the two best tokens says nothing about a draw that fell on a border between two others.
            result["not_judged"] = "sampled texts of an inexact build are listed, not judged; use --native exact for equality"
    figures["diverged"] = found
    result["passed"] = all(result["checks"].values())


def show(result: dict[str, Any], mode: str) -> None:
    """The result for a person."""
    _output.show(report.table(result))
    for d in result["modes"][mode]["diverged"]:
        gap = f", top-2 gap {d['top2_gap']:.4g}, noise floor {d['noise_floor']:.4g}" if "top2_gap" in d else ""
        _output.data(f"differs: {d['prompt']} at token {d['position']}: {d['reference']} became {d['got']}{gap}")
    for name, ok in result["checks"].items():
        _output.data(f"{'ok    ' if ok else 'FAILED'} {name}")
    if "not_judged" in result:
        _output.note(result["not_judged"])
    _output.note(f"plain decoding: {result['reference']['kind']}; files: {', '.join(result['files'].values())}")
