"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from llama_dflash import _paths
from llama_dflash.bench import cases
from llama_dflash.bench.run import Job
from llama_dflash.builds import INSTALLED, PRESETS
from llama_dflash.client import Sampling
from llama_dflash.errors import UsageError
from llama_dflash.spec import RunConfig

F = TypeVar("F", bound=Callable[..., Any])

EMBEDDED_TARGET = "models/tiny-target.gguf"
EMBEDDED_DRAFT = "models/tiny-draft.gguf"


def _stacked(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(f: F) -> F:
        for decorator in reversed(decorators):
            f = decorator(f)
        return f

    return apply


class _FilePath(click.Path):
    """A path that is not empty: Path("") would be the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty value."""
        if value == "":
            self.fail("the path is empty, expected a file or folder", param, ctx)
        return super().convert(value, param, ctx)


model_options = _stacked(
    click.option("-m", "--model", type=_FilePath(path_type=Path), help="Target GGUF file.  [default: the embedded tiny target]"),
    click.option(
        "-md", "--draft", type=_FilePath(path_type=Path), help="Draft GGUF file.  [default: the embedded draft, without -m]"
    ),
    click.option("--n-max", type=int, metavar="N", help="Drafted tokens per round.  [default: block size - 1]"),
)
native_option = click.option(
    "--native",
    default=INSTALLED,
    envvar="LLAMA_DFLASH_NATIVE",
    show_default=True,
    show_envvar=True,
    metavar="BUILD",
    help=f"Native build: {INSTALLED}, {', '.join(PRESETS)} (built on first use), or a folder.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
ctx_option = click.option(
    "-c", "--ctx-size", type=click.IntRange(min=1), metavar="N", help="Context in tokens.  [default: the model's]"
)
job_options = _stacked(
    click.option("--prompt-set", default="accept", show_default=True, help="accept, tests, humaneval, or a JSON file."),
    click.option(
        "--prompts", "n_prompts", type=click.IntRange(min=1), metavar="N", help="Use the first N prompts.  [default: all]"
    ),
    click.option("--n-predict", type=click.IntRange(min=3), default=128, show_default=True, help="Tokens per prompt."),
    click.option(
        "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy; else temperature only."
    ),
    click.option(
        "--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Prompt i is sampled with seed + i."
    ),
    click.option(
        "--stop-at-eos", is_flag=True, help="End a text at its end token; by default every text has --n-predict tokens."
    ),
    click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads.  [default: llama.cpp's]"),
    click.option(
        "--out",
        type=_FilePath(path_type=Path, file_okay=False),
        help="Folder for result files.  [default: .bench/<command>-<time>]",
    ),
)


def embedded_pair() -> tuple[Path, Path]:
    """Target and draft that come with the package."""
    return _paths.find(EMBEDDED_TARGET), _paths.find(EMBEDDED_DRAFT)


def run_config(model: Path | None, draft: Path | None, n_max: int | None, mode: str | None = None) -> RunConfig:
    """Turn the model options into a checked configuration.

    Args:
        model: target file; None is the embedded pair.
        draft: draft file.
        n_max: drafted tokens per round.
        mode: `ar` drops the draft, `chain` requires one; None takes what the files allow.
    """
    if model is None:
        model, embedded_draft = embedded_pair()
        draft = draft or embedded_draft
    if mode == "ar":
        draft = None
    elif mode == "chain" and draft is None:
        raise UsageError("mode chain needs a draft, none was given", "pass one trained for the model with -md FILE")
    if draft is None and n_max is not None and mode is None:
        raise UsageError(f"--n-max is {n_max} but there is no draft", "pass one with -md FILE")
    return RunConfig(model, draft, n_max if draft else None).checked()


def job(
    prompt_set: str, n_prompts: int | None, n_predict: int, temperature: float, seed: int, stop_at_eos: bool, threads: int | None
) -> Job:
    """What job_options ask for, prompts loaded.

    Raises:
        UsageError: a value that cannot be meant.
    """
    if not math.isfinite(temperature):
        raise UsageError(f"--temperature is {temperature}, expected a finite number", "0 is greedy")
    flags = ("-t", str(threads)) if threads else ()
    return Job(cases.load(prompt_set, n_prompts), n_predict, Sampling(temperature, seed), not stop_at_eos, flags)


def passed_through(ctx: click.Context, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments after `--`; anything before it was meant for us and is refused.

    Raises:
        UsageError: an argument that is not behind `--`.
    """
    behind = tuple(ctx.meta.get("llama_dflash.behind", ()))
    if extra != behind:
        wrong = next((arg for i, arg in enumerate(extra) if extra[i:] != behind), "--")
        raise UsageError(
            f"unexpected argument {wrong!r}", "flags for llama.cpp's program go behind '--', such as: -- --threads 4"
        )
    return extra


class PassThrough(click.Command):
    """A command that hands everything behind `--` to llama.cpp's program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note what stands behind `--` before click forgets the mark."""
        if "--" in args:
            ctx.meta["llama_dflash.behind"] = args[args.index("--") + 1 :]
        return super().parse_args(ctx, args)
