"""Run prompts through llama-server, one mode at a time, and keep every token id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_dflash.bench.cases import Case
from llama_dflash.builds import Build
from llama_dflash.client import Completion, Sampling
from llama_dflash.errors import DFlashError
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig


@dataclass(frozen=True)
class Job:
    """What is run: the same prompts with the same sampling in every mode.

    Attributes:
        ignore_eos: generate exactly n_predict tokens, so that modes do equal work.
        server_flags: further llama-server flags, for all modes.
    """

    cases: Sequence[Case]
    n_predict: int
    sampling: Sampling
    ignore_eos: bool = True
    server_flags: tuple[str, ...] = ()


@dataclass
class Pass:
    """One mode, all prompts, once.

    Attributes:
        effective: Client.effective_mode of the server.
        completions: one a prompt.
        n_ctx: context of the server's slot in tokens.
    """

    effective: dict[str, Any]
    completions: list[Completion] = field(default_factory=list)
    n_ctx: int = 0


def run_pass(build: Build, config: RunConfig, job: Job, on_done: Callable[[], None] = lambda: None) -> Pass:
    """Start a server for `config`, run all prompts one after the other, stop it.

    Raises:
        DFlashError: the server does not draft as `config` asks, or a prompt yields no tokens.
    """
    # One slot: the figures are those of a single stream.
    flags = ("-np", "1", *job.server_flags)
    with Server(build, config, extra=flags) as server:
        effective = server.client.effective_mode()
        if problem := config.difference(effective):
            raise DFlashError(problem, "see its log with 'llama-dflash serve -v'")
        result = Pass(effective, n_ctx=server.client.n_ctx())
        for i, case in enumerate(job.cases):
            fields = {"ignore_eos": True} if job.ignore_eos else {}
            done = server.client.complete(case.text, job.n_predict, job.sampling, i, **fields)
            if not done.tokens:
                raise DFlashError(f"prompt {case.name!r} yielded no tokens, expected up to {job.n_predict}", "run it with serve")
            if job.ignore_eos and len(done.tokens) != job.n_predict:
                raise DFlashError(
                    f"prompt {case.name!r} yielded {len(done.tokens)} tokens, expected {job.n_predict}: the context is full",
                    "choose a smaller --n-predict",
                )
            result.completions.append(done)
            on_done()
    return result
