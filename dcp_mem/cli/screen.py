"""Print what commands answer: tables and lines for people, or one JSON object for programs."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dcp_mem.common.progress_bar import transfer_text
from dcp_mem.common.values import CheckpointStatus, State, shown
from dcp_mem.errors import gib

_WIDTH_OF_FILES = 100
"""Columns where the output is no terminal."""
_SHORT = 40
"""Columns that the first cell of a row may have without being wrapped."""
_LONG_SECONDS = 3.0
"""From when on a line says how long something took."""
_COLORS = {
    State.DURABLE: "green",
    State.REPLICATED: "cyan",
    State.COMPLETE: "yellow",
    State.FAILED: "bold red",
    State.SKIPPED: "dim",
}
size = gib
"""A size for people."""
_FACTS = (
    *("name", "save_id", "step", "metrics", "created", "generation", "count", "bytes"),
    *("world_size", "state", "places", "scope", "persist", "error", "problem", "rejected"),
    *("is_foreign", "export", "exported_to", "export_error"),
)
"""The fields of a checkpoint in JSON."""
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str | Text]]
"""By heading, what a row's cell is; ">" in front of it has the column aligned to the right."""


class Screen:
    """The output of a command: text for people or, with `is_json`, what `answer` prints."""

    def __init__(self, *, is_json: bool, no_color: bool) -> None:
        self.is_json = is_json
        self._console = _console(sys.stdout, no_color)
        self._errors = _console(sys.stderr, no_color)

    def answer(self, **facts: Any) -> None:
        """Print the facts as one JSON object, at once: programs read along. NaN and infinity are
        null.
        """
        if self.is_json:
            print(json.dumps(_plain(facts), allow_nan=False), flush=True)

    def line(self, text: str | Text = "", style: str = "") -> None:
        if self.is_json:
            return
        found = text if isinstance(text, Text) else Text(shown(text), style)
        if self._console.is_terminal:
            self._console.print(found, soft_wrap=True)
        else:
            self._console.file.write("\n".join(map(_wrapped, found.plain.split("\n"))) + "\n")

    def note(self, text: str) -> None:
        """Print a remark that isn't part of the answer on stderr."""
        if not self.is_json:
            self._errors.print(Text(shown(text), "dim"), soft_wrap=True)

    def table(self, rows: Sequence[T], columns: Columns[T]) -> None:
        """Print a row of each below the headings, without the columns that are empty."""
        if not self.is_json and rows:
            self._print(table_of(rows, columns, is_wrapped=not self._console.is_terminal))

    def _print(self, *parts: RenderableType) -> None:
        """Print on standard output; lines of files and pipes don't end in spaces."""
        if self._console.is_terminal:
            self._console.print(*parts, sep="\n")
            return
        with self._console.capture() as captured:
            self._console.print(*parts, sep="\n")
        for line in captured.get().splitlines():
            self._console.file.write(line.rstrip() + "\n")

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[RenderableType]], None]]:
        """Yield a function that shows parts below each other, in place of what it showed before, or
        behind that where standard output is no terminal.
        """
        if self.is_json or not self._console.is_terminal:
            yield self._print_at_once
            return
        with Live(console=self._console, auto_refresh=False) as live:
            yield lambda parts: live.update(Group(*parts), refresh=True)

    def _print_at_once(self, parts: Sequence[RenderableType]) -> None:
        if not self.is_json:
            self._print(*parts, "")
            self._console.file.flush()

    @contextmanager
    def progress(self, what: str) -> Iterator[Bytes]:
        """Show on stderr what is under way: on a terminal with a bar of the bytes that move, if any
        do; elsewhere by a line once it has taken long.
        """
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[moved]}"),
            TimeRemainingColumn(compact=True),
            console=self._errors,
            transient=True,
            disable=self.is_json or not self._errors.is_terminal,
        )
        started = time.monotonic()
        with progress:
            yield Bytes(progress, what)
        if (seconds := time.monotonic() - started) >= _LONG_SECONDS:
            self.note(f"{what} took {seconds:.0f} s")


class Bytes:
    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(shown(what), total=None, moved="")

    def expect(self, what: str, nbytes: int) -> None:
        self._progress.reset(self._task, description=shown(what), total=nbytes, moved="")

    def add(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)
        task = self._progress.tasks[0]
        self._progress.update(self._task, moved=transfer_text(task.completed, task.total, None))


def table_of(rows: Sequence[T], columns: Columns[T], *, is_wrapped: bool = False) -> Table:
    """Return a table with a row of each, without the columns that are empty."""
    found = {name: list(map(cell, rows)) for name, cell in columns.items()}
    used = {name: cells for name, cells in found.items() if any(map(len, cells))}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, (name, cells) in enumerate(used.items(), 1):
        is_short = all(len(cell) <= _SHORT for cell in cells)
        table.add_column(
            name.lstrip(">"),
            justify="right" if name[0] == ">" else "left",
            no_wrap=is_short if number == 1 else number < len(used) and not is_wrapped,
            overflow="fold",
        )
    for row in zip(*used.values(), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in row))
    return table


def _wrapped(line: str) -> str:
    """Return a line in lines of bounded length; words of any length stay whole, such as paths."""
    lines = textwrap.wrap(
        line,
        _WIDTH_OF_FILES,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def age(moment: float) -> str:
    """Return how long ago a moment was, for people; "" where it isn't known."""
    if not moment:
        return ""
    seconds = time.time() - moment
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{max(0, int(seconds))} s"


def moment(seconds: float) -> str:
    """Return a moment in local time, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "unknown"


def state(checkpoint: CheckpointStatus) -> Text:
    if checkpoint.problem:
        return Text("damaged", "bold red")
    if checkpoint.rejected:
        return Text("rejected", "yellow")
    return colored(checkpoint.state, " (torch's)" if checkpoint.is_foreign else "")


def colored(state: State, more: str = "") -> Text:
    return Text(state.value + more, _COLORS.get(state, ""))


def problem(checkpoint: CheckpointStatus) -> Text:
    """Return what is wrong with a checkpoint; "" if nothing."""
    if checkpoint.rejected and not checkpoint.problem:
        return Text(shown(checkpoint.rejected), "yellow")
    return Text(shown(checkpoint.problem or checkpoint.error), "red")


def facts_of(checkpoint: CheckpointStatus) -> dict[str, Any]:
    return {name: getattr(checkpoint, name if name != "bytes" else "nbytes") for name in _FACTS}


def fields_of(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields, with sizes named as JSON has them: "bytes", not "nbytes"."""
    names = [field.name for field in fields(value)]
    return {name.replace("nbytes", "bytes"): getattr(value, name) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if is_dataclass(value):
        return _plain(fields_of(value))
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _console(stream: Any, no_color: bool) -> Console:
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        color_system=None if no_color or os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else _WIDTH_OF_FILES,
    )
