"""What commands print: tables and lines for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dcp_mem.bar import moving
from dcp_mem.errors import gib
from dcp_mem.operating.inventory import Checkpoint
from dcp_mem.values import State

_WITHOUT_TERMINAL = 1000
"""Columns: whoever reads a file or a pipe wants lines whole."""
_COLORS = {
    State.DURABLE: "green",
    State.REPLICATED: "cyan",
    State.COMPLETE: "yellow",
    State.FAILED: "bold red",
    State.SKIPPED: "dim",
}
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


class Screen:
    """Where a command's answer goes. is_json: as one object, which `answer` prints; then `table` and `line` say nothing."""

    def __init__(self, *, is_json: bool, no_color: bool) -> None:
        self.is_json = is_json
        self._console = _console(sys.stdout, no_color)
        self._errors = _console(sys.stderr, no_color)

    def answer(self, **facts: Any) -> None:
        if self.is_json:
            print(json.dumps(facts, default=_plain, allow_nan=False))

    def line(self, text: str | Text = "", style: str = "") -> None:
        if not self.is_json:
            self._console.print(text if isinstance(text, Text) else Text(shown(text), style), soft_wrap=True)

    def note(self, text: str) -> None:
        """Something beside the answer, on stderr."""
        if not self.is_json:
            self._errors.print(Text(shown(text), "dim"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
        """Rows below their headings; columns that are empty are left out. A heading that begins with ">" aligns to the right."""
        if not self.is_json and rows:
            self._console.print(table_of(columns, rows))

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[RenderableType]], None]]:
        """What shows parts below each other, in the place of those that it showed before; off a terminal, behind them."""
        if self.is_json or not self._console.is_terminal:
            yield lambda parts: None if self.is_json else self._console.print(*parts, "", sep="\n")
            return
        with Live(console=self._console, auto_refresh=False) as live:
            yield lambda parts: live.update(Group(*parts), refresh=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Bytes]:
        """A bar of bytes on stderr, if that is a terminal."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[moved]}"),
            TimeRemainingColumn(compact=True),
            console=self._errors,
            transient=True,
            disable=self.is_json or not self._errors.is_terminal,
        )
        with progress:
            yield Bytes(progress, what)


class Bytes:
    """A bar: how many of how many bytes."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._task = progress.add_task(shown(what), total=None, moved="")

    def expect(self, what: str, nbytes: int) -> None:
        """Begin anew, with so many bytes to come."""
        self._progress.reset(self._task, description=shown(what), total=nbytes, moved="")

    def add(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)
        task = self._progress.tasks[0]
        self._progress.update(self._task, moved=moving(task.completed, task.total, None))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Rows below their headings, as `Screen.table` has them."""
    used = [number for number in range(len(columns)) if any(len(row[number]) for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number in used:
        name = columns[number]
        is_last = number == used[-1]
        table.add_column(
            name.lstrip(">"), justify="right" if name[0] == ">" else "left", no_wrap=not is_last, overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(shown(cell)) for cell in map(row.__getitem__, used)))
    return table


def shown(text: str) -> str:
    """Text as a terminal may be given it: names come from storage, and could steer it."""
    return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)


def size(nbytes: int) -> str:
    return gib(nbytes)


def age(moment: float) -> str:
    """How long ago that was, as people say it; "" where nobody knows."""
    if not moment:
        return ""
    seconds = time.time() - moment
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{max(0, int(seconds))} s"


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "unknown"


def figures(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in metrics.items())


def state(checkpoint: Checkpoint) -> Text:
    if checkpoint.problem:
        return Text("damaged", "bold red")
    return colored(checkpoint.state, " (torch's)" if checkpoint.is_foreign else "")


def colored(state: State, more: str = "") -> Text:
    return Text(state.value + more, _COLORS.get(state, ""))


def trouble(checkpoint: Checkpoint) -> Text:
    """What is wrong with it."""
    return Text(shown(checkpoint.problem or checkpoint.error), "red")


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as JSON has it."""
    return {
        "name": checkpoint.name,
        "save_id": checkpoint.save_id,
        "step": checkpoint.step,
        "metrics": {name: value if abs(value) < float("inf") else None for name, value in checkpoint.metrics.items()},
        "created": checkpoint.created,
        "bytes": checkpoint.nbytes,
        "world_size": checkpoint.world_size,
        "state": checkpoint.state.value,
        "places": list(checkpoint.places),
        "scope": checkpoint.scope,
        "persist": checkpoint.persist,
        "error": checkpoint.error,
        "problem": checkpoint.problem,
        "is_foreign": checkpoint.is_foreign,
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _console(stream: Any, no_color: bool) -> Console:
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        color_system=None if no_color or os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else _WITHOUT_TERMINAL,
    )
