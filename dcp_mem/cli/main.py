"""The entry point: find the command, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from dcp_mem import __version__
from dcp_mem.errors import (
    ConfigError,
    DcpMemError,
    MemoryRootRefused,
    MemoryUnavailable,
    StorageRefused,
    StorageUnavailable,
)

_COMMANDS = {
    "ls": "List checkpoints, or the jobs in this node's memory.",
    "show": "Show what a checkpoint consists of.",
    "verify": "Read every byte of checkpoints and compare it with its checksums.",
    "reject": "Mark a checkpoint as not to be resumed from, or take that back.",
    "rm": "Remove checkpoints from memory and storage.",
    "gc": "Free memory of dead jobs, and what interrupted saves have left on storage.",
    "watch": "Follow a job's checkpoints in memory and on their way to storage.",
    "report": "Write an HTML page about a job's saves, flushes and recoveries.",
    "flush": "Bring complete checkpoints in memory to storage, and wait for that.",
    "doctor": "Check this machine and the storage for what training needs.",
    "export": "Write a checkpoint out for other programs.",
    "follow": "Run a command for each new checkpoint of a training run.",
}
"""Commands and their short help, in the order of the help.

The texts stand here because to import all commands would import torch, which takes seconds.
"""

_WRONG, _USAGE, _STORAGE = 1, 2, 3
"""Exit codes."""


class Commands(click.Group):
    """The group of all commands; a command's module is imported when the command is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a command; return None for a name that is none."""
        if name not in _COMMANDS:
            return None
        command = importlib.import_module(f"dcp_mem.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

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
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
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
