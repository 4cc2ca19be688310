"""`serve`: llama-server with checks before, the effective mode at the start, and the reason when it dies."""

from __future__ import annotations

import click

from llama_dflash import builds, gguf, memory
from llama_dflash.cli import _options, _output, _signals
from llama_dflash.errors import ServerError, UsageError
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

ONE_SLOT = (
    "llama-dflash: one slot (-np 1): with snapshots, slots of a hybrid that draft at once can get another text; "
    "'-- -np N' overrides"
)


def check_memory(config: RunConfig, build: builds.Build, flags: list[str]) -> None:
    """Refuse a context that cannot fit, or is too small to verify a draft in one pass."""
    models = [gguf.read(path) for path in (config.target, config.draft) if path is not None]
    if build.info["backend"] == "cpu":  # a GPU build has llama.cpp's own check
        memory.check_context(models, flags)
    if config.draft is None:
        return
    n_rows = config.rows_per_round
    for names in (("-c", "--ctx-size"), ("-b", "--batch-size"), ("-ub", "--ubatch-size")):
        text = memory.flag_value(flags, *names)
        if text and text.isdecimal() and 0 < int(text) <= n_rows:
            raise UsageError(
                f"{names[1]} is {text}, expected more than {n_rows}: a round verifies {n_rows} tokens at once",
                f"choose a larger one, or a smaller {'--n-max' if config.budget is None else '--budget and --n-max'}",
            )


@click.command(cls=_options.PassThrough)
@_options.model_options
@_options.ctx_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@_options.native_option
@_options.json_option
@click.option("-v", "--verbose", is_flag=True, help="Show llama-server's log on stderr.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED, metavar="[-- LLAMA_SERVER_FLAGS...]")
@click.pass_context
def serve(
    ctx: click.Context,
    choice: _options.Choice,
    ctx_size: int | None,
    host: str,
    port: int,
    native: str,
    as_json: bool,
    verbose: bool,
    extra: tuple[str, ...],
) -> None:
    """Serve a model over HTTP: OpenAI (/v1/chat/completions, /v1/completions), Anthropic (/v1/messages) and llama.cpp's own API.

    Flags behind '--' go to llama-server unchanged. Ctrl-C, SIGTERM or SIGHUP stops it.
    """
    flags = [*(("-c", str(ctx_size)) if ctx_size else ()), *_options.passed_through(ctx, extra)]
    config = _options.run_config(choice)
    build = builds.resolve(native)
    check_memory(config, build, flags)
    for name in ("--host", "--port", "--api-prefix"):
        if memory.flag_value(extra, name) is not None:
            raise UsageError(
                f"{name} stands behind '--', expected it before", "serve waits for the server where its own options say"
            )
    # Devices other than these cannot replay: llama-server falls back to snapshots there.
    snapshots = config.draft is not None and (config.rollback == "snapshot" or build.info["backend"] not in ("cpu", "cuda"))
    one_slot = snapshots and memory.flag_value(flags, "-np", "--parallel") is None
    flags += ["-np", "1"] if one_slot else []
    server = Server(build, config, host=host, port=port, extra=flags, on_line=_output.note if verbose else None)
    try:
        with server:
            if one_slot:  # before the address: who reads that line may stop the program at once
                _output.note(ONE_SLOT)
            _announce(server, config, as_json)
            _output.note("llama-dflash: ready; Ctrl-C stops it")
            code = server.wait()
    except (KeyboardInterrupt, _signals.Stopped):
        _output.note("llama-dflash: stopped")
        return
    except ServerError:
        _show_tail(server, verbose)
        raise
    _show_tail(server, verbose)
    if code != 0:
        raise ServerError(server.death_message(), "see the lines above")


def _announce(server: Server, config: RunConfig, as_json: bool) -> None:
    mode = server.client.effective_mode()
    if mode["mode"] != "unknown" and (problem := config.difference(mode)):
        raise ServerError(problem, "see why with -v, or drop the option")
    if as_json:
        _output.data_json({"schema": 1, "command": "serve", "url": server.client.url, "effective": mode})
    else:
        _output.data(f"{server.client.url}  {mode['str']}")


def _show_tail(server: Server, verbose: bool) -> None:
    if not verbose and server.returncode is not None:
        for line in server.log_tail():
            _output.note(f"  {line}")
