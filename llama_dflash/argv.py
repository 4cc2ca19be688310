"""Command lines of llama-server and llama-cli; pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from llama_dflash.spec import RunConfig

# What bitwise equality needs beside the exact build (docs/testing.md): F16 KV is the default of both programs.
EXACT_FLAGS = ("-fa", "on")


def model_flags(config: RunConfig) -> list[str]:
    """Target and draft flags; `config` must be checked, so that n_max is set."""
    flags = ["-m", str(config.target)]
    if config.draft is None:
        return flags
    flags += ["-md", str(config.draft), "--spec-type", config.spec_type, "--spec-draft-n-max", str(config.n_max)]
    chosen = {
        "--spec-draft-tree": config.budget,
        "--spec-draft-top-k": config.top_k,
        "--spec-draft-spine": config.spine,
        "--spec-rollback": config.rollback,
    }
    for name, value in chosen.items():
        flags += [name, str(value)] if value is not None else []
    return flags


def server_argv(config: RunConfig, host: str, port: int, *, exact: bool = False, extra: Sequence[str] = ()) -> list[str]:
    """Arguments of llama-server, the program's name left out; `extra` goes last and so wins."""
    flags = [*model_flags(config), "--host", host, "--port", str(port)]
    return [*flags, *(EXACT_FLAGS if exact else ()), *extra]


def cli_argv(
    config: RunConfig,
    *,
    prompt: str | None = None,
    n_predict: int | None = None,
    raw: bool = False,
    exact: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """Arguments of llama-cli.

    Args:
        config: checked configuration.
        prompt: one message to answer, then exit; None chats.
        n_predict: most tokens to generate; None leaves the program's default.
        raw: continue the text instead of answering it in the model's chat format.
        exact: add the flags of exact runs.
        extra: further flags, passed unchanged.
    """
    flags = model_flags(config)
    if prompt is not None:
        flags += ["-p", prompt, "--no-escape", "--single-turn", "--simple-io"]
    if n_predict is not None:
        flags += ["-n", str(n_predict)]
    if raw:
        flags += ["--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"]
    return [*flags, *(EXACT_FLAGS if exact else ()), *extra]
