"""The arguments and options that all commands have in common."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from dcp_mem.cli.screen import Screen
from dcp_mem.common.log import log
from dcp_mem.common.values import CheckpointStatus
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError
from dcp_mem.operations.inventory import find_one
from dcp_mem.options import settings
from dcp_mem.storage import Storage
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import storage_of

INTERACTIVE_RETRIES = RetryPolicy(tries=4, longest_pause_seconds=4.0, deadline_seconds=30.0)
"""The retries of commands: few and short, because a person is waiting for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    screen: Screen
    root: str | None  # the job's URL or directory; None where there is none
    memory_root: str | None
    job: str | None  # as given; None for the name that is made from the root
    # for the storage; not in repr, because they may hold secrets
    storage_options: dict[str, Any] = field(repr=False)

    def find(self, checkpoint_id: str) -> tuple[Settings, CheckpointStatus, Storage | None]:
        """Return the job, one of its checkpoints by name or save id, and the job's storage."""
        chosen = self.settings()
        found = find_one(chosen, checkpoint_id, retry_policy=INTERACTIVE_RETRIES)
        return chosen, found, storage_of(chosen, INTERACTIVE_RETRIES)

    def settings(self) -> Settings:
        if self.root is None and self.job is None:
            raise ConfigError(
                "say which job: give its ROOT on storage, or --job and nothing else for one that "
                "is in memory only"
            )
        return settings(
            self.root,
            memory_root=self.memory_root,
            job=self.job,
            storage_options=self.storage_options,
        )


def repeating(
    what: str, shortest_seconds: float
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command that looks again and again the options --every (`seconds`) and --times."""

    def decorate(act: Callable[..., Any]) -> Callable[..., Any]:
        every = click.option(
            "--every",
            "seconds",
            type=click.FloatRange(shortest_seconds),
            default=1.0,
            show_default=True,
            metavar="SECONDS",
            help="Pause between two looks.",
        )
        times = click.option(
            "--times", metavar="N", type=click.IntRange(1), help=f"End after N {what}."
        )
        return every(times(act))

    return decorate


def subcommand(
    name: str, help_text: str, *, needs_root: bool = True
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function that takes `CommonOptions` and its own options."""

    def decorate(act: Callable[..., Any]) -> click.Command:
        run = functools.wraps(act)(functools.partial(_run, act))
        for option in _OPTIONS:
            run = option(run)
        run = click.argument("root", required=needs_root)(run)
        first, _, examples = help_text.strip().partition("\n\nExamples:\n")
        epilog = "\b\nExamples:\n" + examples if examples else None
        return click.command(name, help=first, epilog=epilog)(run)

    return decorate


_OPTIONS = (
    click.option("--debug", is_flag=True, help="Log everything, and show tracebacks of errors."),
    click.option("--no-color", is_flag=True, help="No colours; the same as setting $NO_COLOR."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of text."),
    click.option(
        "--storage-option",
        metavar="KEY=VALUE",
        multiple=True,
        help="For the storage, as in storage_options=; may be JSON, and may be repeated. "
        "Secrets belong in the environment: others on this machine see command lines.",
    ),
    click.option(
        "--job",
        metavar="NAME",
        help="The job's name in memory [default: made from ROOT].",
    ),
    click.option(
        "--memory-root",
        metavar="DIR",
        help="The directory in tmpfs [default: $DCP_MEM_ROOT or /dev/shm/dcp_mem-UID].",
    ),
)
"""The options of every command; decorators apply from the last to the first."""


def _run(
    act: Callable[..., Any],
    /,
    *,
    root: str | None = None,
    memory_root: str | None = None,
    job: str | None = None,
    storage_option: tuple[str, ...] = (),
    as_json: bool = False,
    no_color: bool = False,
    debug: bool = False,
    **own: Any,
) -> Any:
    """Run a command with the common options in one value, and its own options as they are."""
    common = CommonOptions(
        screen=Screen(is_json=as_json, no_color=no_color),
        root=None if root == "-" else root,
        memory_root=memory_root,
        job=job,
        storage_options=parse_storage_options(storage_option),
    )
    with _logging(debug):
        return act(common, **own)


@contextmanager
def _logging(is_all: bool) -> Iterator[None]:
    """Log errors only, or everything: the warnings of the layers below are for training loops."""
    before = log.level
    if is_all:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.DEBUG if is_all else logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def parse_storage_options(given: tuple[str, ...]) -> dict[str, Any]:
    """Return options for the storage from texts KEY=VALUE, where VALUE may be JSON."""
    options: dict[str, Any] = {}
    for one in given:
        key, separator, text = one.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"option {key!r}: give KEY=VALUE, such as key=minio or client_kwargs='{{…}}'"
            )
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options
