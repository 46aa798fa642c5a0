"""Parse what people type, before anything of the command itself is imported: help takes no time."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import click

from dcp_mem.config import root_url
from dcp_mem.errors import ConfigError

STANDING = ("path", "name", "step")
"""What the words of `follow --exec` may have in braces."""
_IN_BRACES = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")


def option(names: str, text: str, **facts: Any) -> click.Option:
    """Make an option of its names, that of its argument, and METAVAR; without that it is a flag."""
    *known, last = names.split()
    is_name = last.startswith("-") or (last.isidentifier() and last.islower())
    return click.Option(
        [*known, last] if is_name else known,
        help=text,
        metavar=None if is_name else last,
        is_flag=is_name and "type" not in facts,
        show_default=bool(facts.get("default")),
        **facts,
    )


def argument(name: str, **facts: Any) -> click.Argument:
    return click.Argument([name], **facts)


def repeating(what: str, shortest_seconds: float) -> list[click.Parameter]:
    """Return the options of a command that looks again and again: `seconds`, `times`."""
    pause = click.FloatRange(shortest_seconds)
    return [
        option("--every seconds SECONDS", "Pause between two looks.", type=pause, default=1.0),
        option("--times N", f"End after N {what}.", type=click.IntRange(1)),
    ]


def key_values(
    context: click.Context, parameter: click.Parameter, given: Sequence[str]
) -> dict[str, Any]:
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


def at_home(context: click.Context, parameter: click.Parameter, path: str) -> str:
    """Return a path in which the shell hasn't put the user's directory in place of ~."""
    return os.path.expanduser(path)


def words_of(context: click.Context, parameter: click.Parameter, text: str | None) -> Sequence[str]:
    """Return the words of a program to run; refuse one that isn't there, and unknown {names}."""
    if text is None:
        return ()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--exec {text!r}: {error}", context) from None
    for _, name in _IN_BRACES.findall(text):
        if name and name not in STANDING:
            *first, last = (f"{{{one}}}" for one in STANDING)
            close = _did_you_mean(name, STANDING)
            raise click.UsageError(
                f"--exec {text!r}: {{{name}}} stands for nothing here{close}: {', '.join(first)} "
                f"and {last} can be given; {{{{{name}}}}} is passed on as {{{name}}}",
                context,
            )
    if not words or not (_IN_BRACES.search(words[0]) or shutil.which(words[0])):
        raise click.UsageError(f"--exec {text!r}: there is no such command", context)
    return words


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of `--exec` with what its names stand for."""
    return _IN_BRACES.sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", word)


_COMMON = (
    option(
        "--memory-root DIR",
        "The directory in tmpfs [default: $DCP_MEM_ROOT or /dev/shm/dcp_mem-UID].",
    ),
    option("--job NAME", "The job's name in memory [default: made from ROOT]."),
    option(
        "--storage-option storage_options KEY=VALUE",
        "For the storage, as in storage_options=; may be JSON, and may be repeated. Secrets belong "
        "in the environment: others on this machine see command lines.",
        multiple=True,
        callback=key_values,
    ),
    option("--json is_json", "Print one JSON object in place of text."),
    option("--no-color", "No colours; the same as setting $NO_COLOR."),
    option("--debug", "Log everything, and show tracebacks of errors."),
)
"""The options of every command."""


def command(
    name: str,
    short: str,
    text: str,
    *own: click.Parameter,
    needs: Literal["root", "job", "nothing"] = "root",
    check: Callable[[Mapping[str, Any]], str] = lambda _: "",
) -> click.Command:
    """Make a command of the tool; `dcp_mem.cli.<its name>` has the function `run` that does it.

    `text` is its help, and after "Examples:" how it is used; `own` is what it takes besides the
    options of all commands; `check` gets all by their names, and returns what is wrong with it.
    """

    def run(**given: Any) -> Any:
        given["root"] = None if given["root"] == "-" else root_url(given["root"])
        if needs != "nothing" and given["root"] is None and given["job"] is None:
            raise ConfigError(
                "say which job: give its ROOT on storage, or --job and nothing else for one that "
                "is in memory only"
            )
        if wrong := check(given):
            raise click.UsageError(wrong, click.get_current_context())
        # Only now: what commands do may take torch, which takes seconds.
        return importlib.import_module("dcp_mem.cli.options").run(name, **given)

    first, _, examples = text.strip().partition("\n\nExamples:\n")
    return click.Command(
        name,
        params=[argument("root", required=needs == "root"), *own, *_COMMON],
        callback=run,
        help=first,
        short_help=short,
        epilog="\b\nExamples:\n" + examples,
    )


def unknown_command(name: str, known: Sequence[str]) -> str:
    """Return what to say of a command that there isn't."""
    if "/" in name or "://" in name:
        return f"a command comes before ROOT: dcp-mem ls {name}"
    return f"No such command {name!r}{_did_you_mean(name, known)}; they are {', '.join(known)}"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
