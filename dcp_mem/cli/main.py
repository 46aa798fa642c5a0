"""The entry point: find the command, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from dcp_mem import __version__
from dcp_mem.cli.commands import COMMANDS
from dcp_mem.cli.parsing import unknown_command
from dcp_mem.errors import (
    ConfigError,
    DcpMemError,
    MemoryRootRefused,
    MemoryUnavailable,
    StorageRefused,
    StorageUnavailable,
)

_WRONG, _USAGE, _STORAGE = 1, 2, 3
"""Exit codes."""


class Commands(click.Group):
    """The group of all commands, in the order of their table, and how they end."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            context.fail(unknown_command(args[0], list(self.commands)))
        return super().resolve_command(context, args)

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> NoReturn:
        """Run a command, and end the process with its exit code."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(arguments, *more, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except click.exceptions.Abort:
            _print_error(arguments, "aborted")
            sys.exit(_WRONG)
        except click.ClickException as error:
            _print_error(
                arguments,
                error.format_message(),
                error if isinstance(error, click.UsageError) else None,
            )
            sys.exit(error.exit_code)
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_WRONG)
        except Exception as error:
            if "--debug" in arguments:
                raise
            text = (
                str(error)
                if isinstance(error, DcpMemError)
                else f"{type(error).__name__}: {error} (--debug shows where)"
            )
            _print_error(arguments, text)
            sys.exit(_code(error))
        sys.exit(code if isinstance(code, int) else 0)


def _code(error: Exception) -> int:
    if isinstance(error, (StorageUnavailable, StorageRefused)):
        return _STORAGE
    return (
        _USAGE if isinstance(error, (ConfigError, MemoryRootRefused, MemoryUnavailable)) else _WRONG
    )


def _print_error(
    arguments: Sequence[str], message: str, usage: click.UsageError | None = None
) -> None:
    if "--json" in arguments:
        click.echo(json.dumps({"error": message}))
        return
    if usage is not None and usage.ctx is not None:
        click.echo(f"Try '{usage.ctx.command_path} --help'.", err=True)
    click.echo(
        f"{click.style('error:', fg='red', bold=True)} {message}",
        err=True,
        color=False if "--no-color" in arguments or os.environ.get("NO_COLOR") else None,
    )


@click.group(
    cls=Commands,
    commands=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="dcp-mem")
def main() -> None:
    """Inspect a job's checkpoints, and take care of them.

    ROOT is the job's URL or directory on storage, as its MemoryStorageWriter gets it; "-"
    stands for none. Memory is the memory of this node.

    Exit codes: 0 all is well, 1 something is wrong (damage, or nothing found), 2 wrong usage,
    3 storage can't be used.
    """


if __name__ == "__main__":
    main()
