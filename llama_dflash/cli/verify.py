"""`verify`: is the text with drafts the text without them?"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from llama_dflash import builds
from llama_dflash.bench import compare, nodes, report, stats
from llama_dflash.bench.run import Job, Pass, run_pass
from llama_dflash.cli import _options, _output
from llama_dflash.errors import DFlashError
from llama_dflash.spec import RunConfig


@click.command()
@_options.model_options
@click.option(
    "--mode",
    type=click.Choice(["chain", "tree"]),
    default="chain",
    show_default=True,
    help="What to compare with plain decoding; tree runs the chain too.",
)
@_options.job_options
@_options.native_option
@_options.json_option
def verify(
    choice: _options.Choice,
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

    With --mode tree (budget 15 by default) trees must also have as many nodes as budget, tokens and cells left allow, and need
    fewer rounds than chains of no more nodes (--n-max tokens, or the budget if that is less), unless they cannot branch.
    """
    _options.check_modes(choice, [mode], "--mode")
    configs = {mode: _options.run_config(choice, mode)}
    if mode == "tree":
        configs = {"chain": chain_beside(configs[mode]), **configs}
    job = _options.job(**job_fields)
    build = builds.resolve(native)
    reference_build = builds.resolve("reference") if build.is_exact else build
    folder = out or Path(".bench") / f"verify-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    report.require_writable(folder)
    plain = RunConfig(configs[mode].target)
    with _output.progress("verify", (1 + len(configs)) * len(job.cases)) as bar:

        def step() -> None:
            bar.advance(bar.task_ids[0])

        passes = {"ar": run_pass(reference_build, plain, job, step)}
        passes |= {name: run_pass(build, config, job, step) for name, config in configs.items()}
    result = report.header("verify", build, configs[mode], job)
    result["reference"] = {"kind": "unpatched pin" if build.is_exact else "same build", **reference_build.summary}
    result["modes"] = {name: stats.mode_figures([p], configs.get(name, plain)) for name, p in passes.items()}
    judge(result, build, configs, job, passes)
    result["files"] = report.write(folder, result, job, passes)
    if as_json:
        _output.data_json(result)
    else:
        show(result)
    if not result["passed"]:
        failed = ", ".join(name for name, ok in result["checks"].items() if not ok)
        raise DFlashError(f"verify failed: {failed}", f"see {folder / 'result.json'}")


def chain_beside(tree: RunConfig) -> RunConfig:
    """The chain that a checked tree is compared with: the same depth, but no more nodes."""
    assert tree.n_max is not None
    assert tree.budget is not None
    return replace(tree, n_max=min(tree.n_max, tree.budget), budget=None, top_k=None, spine=None)


def judge(result: dict[str, Any], build: builds.Build, configs: dict[str, RunConfig], job: Job, passes: dict[str, Pass]) -> None:
    """Compare drafted passes with the plain one and write `identical`, `diverged`, `checks` and `passed` into `result`.

    The last of `configs` is the mode that is verified; the texts of the others must be equal too.
    """
    mode, config = list(configs.items())[-1]
    drafted, figures = passes[mode], result["modes"][mode]
    result["checks"] = {
        "effective mode": not config.difference(drafted.effective) and figures.get("budget") == config.budget,
        "drafts were verified": figures.get("drafted", 0) > 0,
        "fewer rounds than AR": stats.n_rounds(drafted) < stats.n_rounds(passes["ar"]),
    }
    if mode == "tree":
        judge_trees(result, config, job, passes)
    for name in configs:
        found = compare.divergences(job.cases, passes["ar"], passes[name])
        result["modes"][name] |= {"identical": len(job.cases) - len(found), "diverged": found}
    judge_texts(result, build, config, job, passes["ar"], [result["modes"][name]["diverged"] for name in configs])
    result["passed"] = all(result["checks"].values())


def judge_trees(result: dict[str, Any], config: RunConfig, job: Job, passes: dict[str, Pass]) -> None:
    """Write the checks of trees: their nodes, and that branches gain rounds."""
    figures = result["modes"]["tree"]
    short = nodes.short_prompts(passes["tree"], config, job.n_predict)
    figures["short_prompts"] = [job.cases[i].name for i in short]
    result["checks"]["nodes per round"] = not short
    if figures["budget"] > max(1, figures["spine"]) and figures["top_k"] > 1:
        result["checks"]["fewer rounds than the chain"] = figures["rounds"] < result["modes"]["chain"]["rounds"]


def judge_texts(
    result: dict[str, Any], build: builds.Build, config: RunConfig, job: Job, reference: Pass, diverged: list[list[dict[str, Any]]]
) -> None:
    """Write the check of the ids, and what is known about those in `diverged`, one list a mode."""
    if build.is_exact:
        result["checks"]["all ids equal"] = not any(diverged)
        return
    left = []
    for found in filter(None, diverged):
        noise_floor = round(compare.explain(build, config, job, reference, found), 6)
        result["noise_floor"] = max(noise_floor, result.get("noise_floor", 0.0))
        left += compare.unexplained(found, noise_floor)
    if any(diverged) and job.sampling.temperature == 0:
        result["checks"]["differences within arithmetic noise"] = not left
    elif any(diverged):
        # The gap of the two best tokens says nothing about a draw that fell on a border between two others.
        result["not_judged"] = "sampled texts of an inexact build are listed, not judged; use --native exact for equality"


def show(result: dict[str, Any]) -> None:
    """The result for a person."""
    _output.show(report.table(result))
    for mode, figures in result["modes"].items():
        for d in figures.get("diverged", []):
            gap = f", top-2 gap {d['top2_gap']:.4g}, noise floor {d['noise_floor']:.4g}" if "top2_gap" in d else ""
            _output.data(f"{mode} differs: {d['prompt']} at token {d['position']}: {d['reference']} became {d['got']}{gap}")
    for name, ok in result["checks"].items():
        _output.data(f"{'ok    ' if ok else 'FAILED'} {name}")
    if "not_judged" in result:
        _output.note(result["not_judged"])
    _output.note(f"plain decoding: {result['reference']['kind']}; files: {', '.join(result['files'].values())}")
