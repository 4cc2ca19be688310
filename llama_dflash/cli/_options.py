"""Options that several commands share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from llama_dflash import _paths
from llama_dflash.bench import cases
from llama_dflash.bench.run import Job
from llama_dflash.builds import INSTALLED, PRESETS
from llama_dflash.client import Sampling
from llama_dflash.errors import UsageError
from llama_dflash.spec import ROLLBACKS, RunConfig

F = TypeVar("F", bound=Callable[..., Any])

EMBEDDED_TARGET = "models/tiny-target.gguf"
EMBEDDED_DRAFT = "models/tiny-draft.gguf"
EMBEDDED_DRAFT2 = "models/tiny-draft2.gguf"
DEFAULT_BUDGET = 15


@dataclass(frozen=True)
class Choice:
    """What the model options say, unchecked; the names are RunConfig's."""

    model: Path | None = None
    draft: Path | None = None
    n_max: int | None = None
    budget: int | None = None
    top_k: int | None = None
    spine: int | None = None
    rollback: str | None = None

    def given(self, *names: str) -> str:
        """The first of the options `names` that was given, as `--name is value`; empty if none was."""
        values = ((name, getattr(self, name)) for name in names)
        return next((f"--{name.replace('_', '-')} is {value}" for name, value in values if value is not None), "")


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


def _gathered(f: F) -> F:
    """Hand the model options to the command as one argument, `choice`."""

    @functools.wraps(f)
    def command(*args: Any, **kwargs: Any) -> Any:
        choice = Choice(**{field.name: kwargs.pop(field.name) for field in fields(Choice)})
        return f(*args, choice=choice, **kwargs)

    return command  # type: ignore[return-value]


model_options = _stacked(
    click.option("-m", "--model", type=_FilePath(path_type=Path), help="Target GGUF file.  [default: the embedded tiny target]"),
    click.option(
        "-md", "--draft", type=_FilePath(path_type=Path), help="Draft GGUF file.  [default: the embedded draft, without -m]"
    ),
    click.option("--n-max", type=int, metavar="N", help="Drafted tokens per round, a tree's depth.  [default: block size - 1]"),
    click.option("--budget", type=int, metavar="N", help="Draft a tree of N nodes per round instead of a chain."),
    click.option("--top-k", type=int, metavar="K", help="Children per node of a tree, at most.  [default: llama.cpp's]"),
    click.option("--spine", type=int, metavar="N", help="Nodes of the greedy chain that a tree starts with.  [default: 0]"),
    click.option(
        "--rollback",
        type=click.Choice(ROLLBACKS),
        help="How the target forgets what was not accepted; trees need replay.  [default: llama.cpp's]",
    ),
    _gathered,
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
    click.option("--prompt-set", default="accept", show_default=True, help="accept, tests, heldout, humaneval, or a JSON file."),
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


def embedded_models() -> tuple[Path, ...]:
    """All that comes with the package: the target, its DFlash draft and its DFlash2 draft."""
    return (*embedded_pair(), _paths.find(EMBEDDED_DRAFT2))


def embedded_pair() -> tuple[Path, Path]:
    """Target and draft that come with the package."""
    return _paths.find(EMBEDDED_TARGET), _paths.find(EMBEDDED_DRAFT)


def run_config(choice: Choice, mode: str | None = None) -> RunConfig:
    """Turn the model options into a checked configuration.

    Args:
        choice: the options; without a model, the embedded pair.
        mode: `ar` drops the draft and its options, `chain` the tree's; `tree` takes DEFAULT_BUDGET where none is given.
            None takes what the options ask for.
    """
    model, draft = choice.model, choice.draft
    if model is None:
        model, embedded_draft = embedded_pair()
        draft = draft or embedded_draft
    if mode == "ar":
        return RunConfig(model).checked()
    if draft is None and mode is not None:
        raise UsageError(f"mode {mode} needs a draft, none was given", "pass one trained for the model with -md FILE")
    if draft is None:
        if given := choice.given("n_max", "budget", "top_k", "spine", "rollback"):
            raise UsageError(f"{given} but there is no draft", "pass one with -md FILE")
        return RunConfig(model).checked()
    config = RunConfig(model, draft, choice.n_max, rollback=choice.rollback)
    if mode == "chain":
        return config.checked()
    budget = DEFAULT_BUDGET if mode == "tree" and choice.budget is None else choice.budget
    return replace(config, budget=budget, top_k=choice.top_k, spine=choice.spine).checked()


def check_modes(choice: Choice, modes: Sequence[str], option: str) -> None:
    """Refuse model options that none of `modes`, the value of `option`, would use.

    Raises:
        UsageError: options of drafts without a mode that drafts, or of trees without mode tree.
    """
    listed = ",".join(modes)
    if modes == ["ar"] and (given := choice.given("draft", "n_max", "budget", "top_k", "spine", "rollback")):
        raise UsageError(f"{option} is {listed}, but {given}, expected a mode that drafts", "add chain or tree, or leave it out")
    if "tree" not in modes and (given := choice.given("budget", "top_k", "spine")):
        raise UsageError(f"{option} is {listed}, but {given}, expected mode tree", f"use {option} tree, or leave it out")


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
