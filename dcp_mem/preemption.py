"""When the job is told to end: the newest checkpoint goes to storage first, and then whatever would have happened does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from dcp_mem.errors import ConfigError
from dcp_mem.events import log
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.operating.inventory import job_memory
from dcp_mem.writer import MemoryStorageWriter

_PAUSE = 0.05
_NEWEST = 2
"""Where nodes are told to end in the middle of a save, some may have it complete and others not: the one before is whole."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Handlers for signals that announce the job's end: SIGTERM, or SIGUSR1 where Slurm is told to send that before it.

    The handler has the newest complete checkpoint flushed, also one that was to stay in memory, and waits until it is durable,
    for at most `deadline` seconds. Then the handler that was there before is called; where there was none, the process ends by
    the signal, as it would have. It runs in the main thread, in the middle of whatever training does there, and saves nothing
    itself: what was saved last is what storage gets. Each rank has it for itself; none waits for another one's step.
    """

    def __init__(self, writer: MemoryStorageWriter, signals: str | Sequence[str], deadline: float) -> None:
        """signals: names. Raises ConfigError for those that there aren't, and for a writer without a path."""
        names = [signals] if isinstance(signals, str) else list(signals)
        self._signals = [_signal(name) for name in names]
        if names and writer.settings.url is None:
            raise ConfigError("preemption=: there is no storage to go to; give a path")
        if not 0 < deadline < float("inf"):
            raise ConfigError(f"deadline={deadline!r}: give a number of seconds above 0")
        self._writer, self._deadline = writer, deadline
        self._before: dict[int, Handler] = {}
        self._is_ending = False

    def install(self) -> None:
        """Raises ConfigError outside of the main thread, where Python allows no handlers."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError("preemption=: make the manager in the main thread, where signals come")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Put back the handlers that were there before, unless somebody has put others there meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending:
            return  # told twice; the deadline stands
        self._is_ending = True
        try:
            self._flush(signal.Signals(number).name)
        except Exception:
            log.exception("the newest checkpoint may not be on storage")
        finally:
            self._is_ending = False
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _flush(self, name: str) -> None:
        started = time.monotonic()
        memory = job_memory(self._writer.settings)
        newest = _collective(memory)[:_NEWEST] if memory is not None else []
        if memory is None or not newest:
            log.warning("%s: nothing is in memory that storage could get", name)
            return
        for held in newest:
            if held.flush.outcome != "durable" and not held.manifest.persist:
                memory.promote(held)
        self._writer.wake_agent(now=True)
        while True:
            there = {held.manifest.save_id: held for held in memory.held()}
            now = there.get(newest[0].manifest.save_id)
            seconds = time.monotonic() - started
            if now is None or now.flush.outcome == "durable":
                log.warning("%s: %s is durable (%.1f s)", name, newest[0].name, seconds)
                return
            if seconds > self._deadline:
                log.error("%s: %s is not durable after %.0f s; %s", name, now.name, seconds, _else(newest, there))
                return
            time.sleep(_PAUSE)


def _else(newest: Sequence[Held], there: dict[str, Held]) -> str:
    found = [there.get(one.manifest.save_id, one) for one in newest[1:]]
    durable = [one.name for one in found if one.flush.outcome == "durable"]
    return f"{durable[0]} is" if durable else "the agent goes on for as long as it lives"


def _collective(memory: JobMemory) -> list[Held]:
    return [held for held in memory.held() if not held.manifest.scope]


def _signal(name: object) -> signal.Signals:
    try:
        found = signal.Signals[str(name)]
    except KeyError:
        found = None
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"preemption={name!r}: give names of signals that can be handled, such as 'SIGTERM' or 'SIGUSR1'"
        )
    return found
