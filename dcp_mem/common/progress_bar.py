"""A progress bar for people who wait at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from dcp_mem.common.values import CheckpointStatus, State

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Show = Callable[[Sequence[CheckpointStatus]], None]
"""Updates the bars."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_NAME_WIDTH = 24
_SPEED_WINDOW = 10.0


@contextmanager
def progress_bar(wanted: bool) -> Iterator[Show | None]:
    """Yield a function that shows how far checkpoints are, with a bar for each, on stderr.

    The bars stay when the wait is over.
    """
    if not wanted or not _is_terminal(sys.stderr):
        yield None
        return
    with _columns() as progress:
        yield _Bar(progress).show


def state_text(entry: CheckpointStatus, now: float) -> str:
    """Return what to show in place of the bytes; "" while bytes move."""
    if entry.state is State.DURABLE:
        return "durable"
    if entry.state is State.SKIPPED:
        return f"skipped: {entry.error}"
    if entry.flush_stage == "waiting":
        return "waiting for other nodes"
    if entry.flush_stage == "segments":
        return ""
    if entry.state is State.FAILED and entry.flush_again > now:
        return f"failed, trying again in {entry.flush_again - now:.0f} s: {entry.error}"
    if entry.state is State.FAILED:
        return f"failed, trying again: {entry.error}"
    return "" if entry.transfer.nbytes else "starting"


def transfer_text(done: float, total: float | None, speed: float | None) -> str:
    """Return bytes, speed and time left, as far as they are known."""
    if not total:
        return ""
    unit = min(len(_UNITS) - 1, max(0, int(total).bit_length() - 1) // 10)
    digits = 1 if unit else 0
    text = (
        f"{done / (1 << 10 * unit):.{digits}f}/{total / (1 << 10 * unit):.{digits}f} {_UNITS[unit]}"
    )
    if not speed:
        return text
    left = round(max(0.0, total - done) / speed)
    return f"{text}, {speed / (1 << 20):.1f} MiB/s, {left // 60}:{left % 60:02d} left"


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _columns() -> Progress:
    # Imported here: it takes longer than many flushes do, and the agent doesn't need it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.table import Column
    from rich.text import Text

    class Name(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.description)

    class Status(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(
                task.fields["status"] or transfer_text(task.completed, task.total, task.speed)
            )

    return Progress(
        Name(Column(no_wrap=True, overflow="ellipsis", max_width=_NAME_WIDTH)),
        BarColumn(bar_width=20),
        Status(Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=Console(stderr=True),
        speed_estimate_period=_SPEED_WINDOW,
        expand=True,
    )


class _Bar:
    """The bars of checkpoints that are waited for, by save id."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lines: dict[str, TaskID] = {}
        self._done: dict[str, int] = {}

    def show(self, entries: Sequence[CheckpointStatus]) -> None:
        for entry in entries:
            if entry.save_id not in self._lines:
                if entry.state in (State.DURABLE, State.SKIPPED):
                    continue  # it had ended before the wait began
                self._lines[entry.save_id] = self._progress.add_task(
                    entry.name, total=None, status="starting"
                )
                self._done[entry.save_id] = 0
            self._update(entry)

    def _update(self, entry: CheckpointStatus) -> None:
        line, done = self._lines[entry.save_id], entry.transfer.stored_nbytes
        if done < self._done[entry.save_id]:
            self._progress.reset(line, status="")  # another attempt
        self._done[entry.save_id] = done
        self._progress.update(line, status=state_text(entry, time.time()))
        if entry.transfer.nbytes:
            self._progress.update(line, total=entry.transfer.nbytes, completed=done)
        elif (
            entry.state is State.DURABLE
        ):  # the flush was too quick to be watched, or the checkpoint has left memory
            self._progress.update(line, total=1, completed=1)
