"""`run`: one answer or a chat in the terminal, through llama-cli."""

from __future__ import annotations

import codecs
import re
import subprocess
import tempfile
from typing import IO

import click

from llama_dflash import builds, memory
from llama_dflash.argv import cli_argv
from llama_dflash.cli import _options, _output
from llama_dflash.cli.serve import check_memory
from llama_dflash.errors import DFlashError, ServerError, UsageError
from llama_dflash.server import first_error, stop_process

# llama-cli ends its answer with one line of timings; the answer itself is what stands between its echo and that line.
_TIMINGS = re.compile(r"\n?\n\[ (Prompt: [^\]\n]*) \]\n")
_HOLD_BACK_CHARS = 200
_ECHO_LIMIT_BYTES = 500
_CHAT_COMMANDS = ("/exit", "/regen", "/clear", "/image ", "/audio ", "/video ", "/read ", "/glob ")


@click.command(cls=_options.PassThrough)
@_options.model_options
@click.option("-p", "--prompt", help="Answer this and exit; without it, chat.")
@click.option("-n", "--n-predict", type=click.IntRange(min=1), help="Most tokens to generate.  [default: 128 with -p]")
@click.option(
    "--raw/--chat",
    default=None,
    help="Continue the text, or answer in the model's chat format.  [default: raw for the embedded pair]",
)
@_options.ctx_option
@_options.native_option
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- LLAMA_CLI_FLAGS...]")
@click.pass_context
def run(
    ctx: click.Context,
    choice: _options.Choice,
    prompt: str | None,
    n_predict: int | None,
    raw: bool | None,
    ctx_size: int | None,
    native: str,
    extra: tuple[str, ...],
) -> None:
    """Complete one prompt (-p) or chat.

    With -p the text goes to stdout, and the effective mode and the timings to stderr.
    Flags behind '--' go to llama-cli unchanged.
    """
    if prompt is not None:
        check_prompt(prompt, extra)
    flags = [*(("-c", str(ctx_size)) if ctx_size else ()), *_options.passed_through(ctx, extra)]
    config = _options.run_config(choice)
    build = builds.resolve(native)
    check_memory(config, build, flags)
    use_raw = (choice.model is None) if raw is None else raw
    limit = n_predict if n_predict is not None or prompt is None else 128
    argv = [str(build.program("llama-cli"))]
    argv += cli_argv(config, prompt=prompt, n_predict=limit, raw=use_raw, exact=build.is_exact, extra=flags)
    if prompt is None:
        code = subprocess.run(argv).returncode
        if code not in (0, 130):
            raise DFlashError(f"llama-cli exited with code {code}", "its last lines say why")
        return
    _one_shot(argv, prompt)


def check_prompt(prompt: str, extra: tuple[str, ...]) -> None:
    """Refuse what llama-cli would not answer, or would answer instead."""
    if not prompt.strip():
        raise UsageError("-p is empty, expected a prompt", "leave -p out to chat")
    if prompt.startswith(_CHAT_COMMANDS):
        raise UsageError(f"-p is {prompt[:20]!r}, a command of llama-cli's chat, expected a prompt", "put a space in front of it")
    try:
        prompt.encode()
    except UnicodeEncodeError as e:
        raise UsageError("-p is not UTF-8, expected text", "check the terminal's encoding") from e
    for name in ("-p", "--prompt", "-f", "--file"):
        if memory.flag_value(extra, name) is not None:
            raise UsageError(f"{name} stands behind '--', but -p has the prompt already", "give one prompt")


def _one_shot(argv: list[str], prompt: str) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            head, answer, timings = _stream(process.stdout, prompt)
        except BaseException:
            stop_process(process)
            raise
        code = process.wait()
        log.seek(0)
        lines = log.readlines()
    # llama-cli prints a refused request like an answer, with nothing generated.
    if answer.startswith("Error: ") and "Generation: 0.0 t/s" in timings and "rounds:" not in timings:
        raise ServerError(answer.removeprefix("Error: ").strip(), "shorten the prompt, or choose a larger -c")
    if code or not head:
        raise ServerError(f"llama-cli exited with code {code}: {first_error(lines)}", "run the model with serve -v for its log")
    click.echo(answer.removesuffix("\n"))
    mode = next((line for line in head.splitlines() if line.startswith("speculative:")), "speculative: mode = unknown")
    _output.note(f"[{mode.removeprefix('speculative: ')} | {timings or 'no timings'}]")


def _stream(stream: IO[bytes], prompt: str) -> tuple[str, str, str]:
    """Copy the answer to stdout as it comes.

    Returns:
        What stood before the answer, the end of the answer that is not yet written, and the timings line.
    """
    shown = prompt.encode()
    if len(shown) > _ECHO_LIMIT_BYTES:
        shown = shown[:_ECHO_LIMIT_BYTES] + b" ... (truncated)"
    echo = f"\n> {shown.decode(errors='replace')}\n"
    text, head = "", ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while piece := stream.read1(4096):  # type: ignore[attr-defined]
        text += decoder.decode(piece)
        if not head:
            at = text.find(echo)
            if at < 0:
                continue
            head, text = text[:at] or "\n", text[at + len(echo) :]
        if len(text) > 2 * _HOLD_BACK_CHARS:
            click.echo(text[:-_HOLD_BACK_CHARS], nl=False)
            text = text[-_HOLD_BACK_CHARS:]
    if match := _TIMINGS.search(text):
        return head, text[: match.start()], match[1]
    return head, text.removesuffix("\n\nExiting...\n"), ""
