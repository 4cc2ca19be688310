"""`demo`: the embedded trained pair completes real prompts, plainly, with chains and with trees."""

from __future__ import annotations

from typing import Any

import click

from llama_dflash import builds
from llama_dflash.bench import cases, compare, report
from llama_dflash.bench.run import Job, Pass
from llama_dflash.cli import _options, _output
from llama_dflash.cli.bench import measure, summarize
from llama_dflash.client import Sampling
from llama_dflash.errors import DFlashError
from llama_dflash.spec import MODES, RunConfig

SHOWN_LINES = 6


@click.command()
@click.option(
    "--prompts", "n_prompts", type=click.IntRange(min=1), default=20, show_default=True, help="Use the first N prompts."
)
@click.option("--n-predict", type=click.IntRange(min=3), default=128, show_default=True, help="Tokens per prompt.")
@_options.native_option
@_options.json_option
def demo(n_prompts: int, n_predict: int, native: str, as_json: bool) -> None:
    """Complete Python prompts with the embedded pair: plain decoding, chain drafts, draft trees. Same text, fewer rounds."""
    configs = {m: _options.run_config(_options.Choice(), m) for m in MODES}
    job = Job(cases.load("accept", n_prompts), n_predict, Sampling())
    build = builds.resolve(native)
    _output.note(f"build: {build.info['backend']} ({build.info['backend_reason']}), {build.info['compiler']}")
    with _output.progress("demo", len(configs) * len(job.cases)) as bar:
        passes = measure(build, configs, job, 1, lambda: bar.advance(bar.task_ids[0]))
    result = summarize("demo", build, configs, job, passes)
    unexplained = explain(build, configs["ar"], job, passes["ar"][0], result)
    if as_json:
        _output.data_json(result)
    else:
        show(job, passes["tree"][0], result)
    if unexplained:
        raise DFlashError(
            f"{len(unexplained)} texts differ by more than arithmetic noise explains, expected none", "please report this"
        )


def explain(build: builds.Build, config: RunConfig, job: Job, reference: Pass, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Judge the divergences of chain and tree against the noise floor; returns those it does not explain."""
    out = []
    for figures in result["modes"].values():
        if found := figures.get("diverged"):
            noise_floor = round(compare.explain(build, config, job, reference, found), 6)
            result["noise_floor"] = max(noise_floor, result.get("noise_floor", 0.0))
            out += compare.unexplained(found, noise_floor)
    return out


def show(job: Job, drafted: Pass, result: dict[str, Any]) -> None:
    """One completion, the table, the divergences of each mode, and what they mean."""
    case, done = job.cases[0], drafted.completions[0]
    _output.data(f"--- {case.name}: the prompt's last lines, then what the model wrote")
    _output.data("\n".join(case.text.rstrip("\n").splitlines()[-3:]))
    shown = done.text.splitlines()[:SHOWN_LINES]
    _output.data("\n".join(f"  | {line}" for line in shown) + "\n")
    _output.show(report.table(result))
    modes, n = result["modes"], result["prompts"]
    for name in ("chain", "tree"):
        fewer = modes["ar"]["rounds"] / modes[name]["rounds"]
        _output.data(f"Same text in {modes[name]['identical']} of {n} prompts, {fewer:.1f} times fewer rounds ({name}).")
        for d in modes[name]["diverged"]:
            _output.data(
                f"  differs: {d['prompt']} at token {d['position']}, where the two best tokens were {d['top2_gap']:.2g} apart "
                f"(arithmetic noise here: {d['noise_floor']:.2g})"
            )
    if any(modes[name]["diverged"] for name in ("chain", "tree")):
        _output.data(
            "  Batches of another width round differently; 'llama-dflash verify --native exact' removes that and compares every id."
        )
    if result["build"]["backend"] == "cpu":
        _output.data(
            "A small CPU gains rounds, not time: it is compute bound, so a round of 16 rows costs it far more than one row.\n"
            "Time is gained where reading the weights bounds a round, as on a GPU with a large model."
        )
