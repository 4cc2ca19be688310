"""The command line. `main` is the only place that turns errors into exit codes."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from llama_dflash import __version__
from llama_dflash.cli import _signals
from llama_dflash.errors import DFlashError

COMMANDS = ("demo", "run", "serve", "bench", "verify", "info", "convert", "pull", "synth", "plan", "doctor", "env")


class LazyGroup(click.Group):
    """Imports a command's module only when it is named, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Command names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command `name`, or None."""
        if name not in COMMANDS:
            return None
        command = getattr(import_module(f"llama_dflash.cli.{name}"), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="llama-dflash")
def cli() -> None:
    """Run Qwen3.5-family GGUF models with DFlash drafts, several tokens a round, output unchanged.

    Without -m every command uses the tiny trained pair inside the package.
    """


def main(args: list[str] | None = None) -> None:
    """Entry point of `llama-dflash`; exits 0 for ok, 1 for a failed check or run, 2 for bad use."""
    _signals.install()
    try:
        cli.main(args=args, prog_name="llama-dflash", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as e:
        where = f" ('{e.ctx.command_path} --help' lists what there is)" if e.ctx else ""
        _fail(e.format_message().rstrip(".") + where, 2)
    except click.ClickException as e:
        _fail(e.format_message(), 1)
    except DFlashError as e:
        _fail(str(e), e.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except _signals.Stopped as e:
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as e:
        _fail(f"{e.filename or 'output'}: {e.strerror or e}, expected it to work; check disk space and permissions", 1)


def _fail(message: str, exit_code: int) -> None:
    click.echo(f"llama-dflash: error: {' '.join(message.split())}", err=True)
    sys.exit(exit_code)
