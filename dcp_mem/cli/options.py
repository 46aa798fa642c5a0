"""Arguments that all commands have in common, parsed once."""

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
from dcp_mem.config import Settings, settings
from dcp_mem.errors import ConfigError
from dcp_mem.events import log
from dcp_mem.storage.patient import Patience

PATIENCE = Patience(tries=4, longest_pause=4.0, deadline=30.0)
"""Somebody sits before it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every command is given. storage_options may hold secrets, so they stay out of repr."""

    screen: Screen
    root: str | None
    memory: str | None
    job: str | None
    storage_options: dict[str, Any] = field(repr=False)

    def settings(self) -> Settings:
        """The job that is meant. Raises ConfigError where nothing says which."""
        if self.root is None and self.job is None:
            raise ConfigError(
                "say which job: give its ROOT on storage, or --job and nothing else for one that is in memory only"
            )
        return settings(self.root, memory=self.memory, job=self.job, storage_options=self.storage_options)


def places_of(chosen: Settings) -> str:
    """Where a job's checkpoints are looked for, for error texts."""
    return f"memory (job {chosen.job})" + (f" and {chosen.url}" if chosen.url else "")


def subcommand(name: str, help_text: str, *, needs_root: bool = True) -> Callable[[Callable[..., Any]], click.Command]:
    """A command whose function is given what was `Asked`, and its own options. needs_root: ROOT can't be left out."""

    def decorate(act: Callable[..., Any]) -> click.Command:
        @functools.wraps(act)
        def run(
            root: str | None = None,
            memory: str | None = None,
            job: str | None = None,
            storage_option: tuple[str, ...] = (),
            as_json: bool = False,
            no_color: bool = False,
            debug: bool = False,
            **own: Any,
        ) -> Any:
            screen = Screen(is_json=as_json, no_color=no_color)
            with _logging(debug):
                return act(Asked(screen, None if root == "-" else root, memory, job, parsed(storage_option)), **own)

        for option in (
            click.option("--debug", is_flag=True, help="Log everything, and show tracebacks."),
            click.option("--no-color", is_flag=True, help="No colours (as does $NO_COLOR)."),
            click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object."),
            click.option(
                "--storage-option",
                metavar="KEY=VALUE",
                multiple=True,
                help="For fsspec, as in storage_options=; JSON is taken as such. Repeatable. Put secrets into the environment: "
                "others on this machine see command lines.",
            ),
            click.option("--job", metavar="NAME", help="Name of the job in memory, where it isn't made from ROOT."),
            click.option(
                "--memory", metavar="DIR", help="The memory root [default: $DCP_MEM_ROOT or /dev/shm/dcp_mem-UID]."
            ),
        ):
            run = option(run)
        run = click.argument("root", required=needs_root)(run)
        first, _, examples = help_text.strip().partition("\n\nExamples:\n")
        epilog = "\b\nExamples:\n" + examples if examples else None
        return click.command(name, help=first, epilog=epilog)(run)

    return decorate


@contextmanager
def _logging(is_all: bool) -> Iterator[None]:
    """What a command has to say it says itself: warnings of the layers below are for training loops."""
    before = log.level
    if is_all:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.DEBUG if is_all else logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def parsed(given: tuple[str, ...]) -> dict[str, Any]:
    """Options for fsspec. Raises ConfigError."""
    options: dict[str, Any] = {}
    for one in given:
        key, separator, text = one.partition("=")
        if not separator or not key:
            raise ConfigError(f"option {key!r}: give KEY=VALUE, such as key=minio or client_kwargs='{{…}}'")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options
