"""The entry point: finds the command, and makes of every error one sentence and an exit code."""

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
    "verify": "Read every byte of checkpoints and hold it against its checksums.",
    "rm": "Remove checkpoints from memory and storage.",
    "gc": "Give back what nobody needs: memory of dead jobs, remains of broken-off saves.",
    "watch": "Follow what lies in this node's memory, and what is on its way to storage.",
    "report": "Write an HTML page of a job's saves, flushes and recoveries.",
    "flush": "Bring to storage what is complete in memory, and wait for it.",
    "doctor": "Check this machine and the storage for what training will need.",
    "export": "Write a checkpoint out for other programs.",
}
"""In the order of the help. Here, since a module that is imported for its help alone may take seconds of torch."""

_WRONG, _USAGE, _STORAGE = 1, 2, 3


class Commands(click.Group):
    """Imports a command when it is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = importlib.import_module(f"dcp_mem.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> NoReturn:
        """Run, and end the process: with 0, 1 (something is wrong), 2 (usage), or 3 (storage can't be used)."""
        told = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            code = super().main(told, *more, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except click.exceptions.Abort:
            _complain(told, "aborted")
            sys.exit(_WRONG)
        except click.ClickException as error:
            _complain(told, error.format_message(), error if isinstance(error, click.UsageError) else None)
            sys.exit(error.exit_code)
        except BrokenPipeError:  # whoever read this has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_WRONG)
        except Exception as error:
            if "--debug" in told:
                raise
            text = (
                str(error)
                if isinstance(error, DcpMemError)
                else f"{type(error).__name__}: {error} (--debug shows where)"
            )
            _complain(told, text)
            sys.exit(_code(error))
        sys.exit(code if isinstance(code, int) else 0)


def _code(error: Exception) -> int:
    if isinstance(error, (StorageUnavailable, StorageRefused)):
        return _STORAGE
    return _USAGE if isinstance(error, (ConfigError, MemoryRootRefused, MemoryUnavailable)) else _WRONG


def _complain(told: Sequence[str], message: str, usage: click.UsageError | None = None) -> None:
    if "--json" in told:
        click.echo(json.dumps({"error": message}))
        return
    if usage is not None and usage.ctx is not None:
        click.echo(f"Try '{usage.ctx.command_path} --help'.", err=True)
    click.echo(f"{click.style('error:', fg='red', bold=True)} {message}", err=True, color=_wants_color(told))


def _wants_color(told: Sequence[str]) -> bool | None:
    return False if "--no-color" in told or os.environ.get("NO_COLOR") else None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dcp-mem")
def main() -> None:
    """Look at the checkpoints of a job, and take care of them.

    ROOT is the job's URL or directory on storage, as its MemoryStorageWriter gets it. Memory is that of this node.

    Exit codes: 0 fine, 1 something is wrong (damage, nothing there), 2 usage, 3 storage can't be used.
    """


if __name__ == "__main__":
    main()
