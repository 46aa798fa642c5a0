"""When the job is told to end: the newest checkpoint goes to storage first, and then whatever would have happened does."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
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

    A thread has the newest complete checkpoint flushed, also one that was to stay in memory, and waits until it is durable, for
    at most `deadline` seconds. Then the handler that was there before is called; where there was none, the process ends by the
    signal, as it would have. Nothing is saved: what was saved last is what storage gets. Each rank has it for itself; none waits
    for another one's step.

    Python calls handlers in the main thread, and only between its own steps: a rank that waits in a collective for one that has
    ended would be killed before. So the thread hears of signals by a wake-up descriptor, which the interpreter writes to at once.
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
        self._seen: dict[int, str] = {}
        self._ear: _Ear | None = None

    def install(self) -> None:
        """Raises ConfigError outside of the main thread, where Python allows no handlers."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError("preemption=: make the manager in the main thread, where signals come")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        if self._signals:
            self._ear = _Ear(self._heard)

    def uninstall(self) -> None:
        """Put back the handlers that were there before, unless somebody has put others there meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
        if self._ear is not None:
            self._ear.close()
            self._ear = None

    def _heard(self, number: int) -> None:
        """In the thread: all that is to be done, but for calling somebody's handler."""
        if number not in self._before:
            return
        before = self._before[number]
        try:
            self._flush(number)
        except Exception:
            log.exception("the newest checkpoint may not be on storage")
        if not callable(before) and before != signal.SIG_IGN:
            ctypes.CDLL(None).signal(number, None)  # the default; Python's own `signal` is for the main thread alone
            os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, whenever that comes to it."""
        before = self._before.get(number, signal.getsignal(number))
        if self._ear is not None and self._ear.is_own:
            self._ear.settle(number)
        elif not callable(before) and before != signal.SIG_IGN:  # a child that was forked; it has nothing to flush
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if callable(before):
            before(number, frame)

    def _flush(self, number: int) -> None:
        started, name = time.monotonic(), signal.Signals(number).name
        memory = job_memory(self._writer.settings)
        newest = _collective(memory)[:_NEWEST] if memory is not None else []
        if memory is None or not newest:
            log.warning("%s: nothing is in memory that storage could get", name)
            return
        if self._seen.get(number) == newest[0].manifest.save_id:
            return  # told twice; the deadline stands
        self._seen[number] = newest[0].manifest.save_id
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


class _Ear:
    """Hears of signals in a thread, however busy the main thread is. Made and closed in the main thread."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        """heard: called with the number of each signal that Python has a handler for, which is called as well."""
        self._heard, self._process = heard, os.getpid()
        self._guard, self._is_busy = threading.Lock(), False
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._other = -1
        self.uncover()
        _ears.append(self)
        threading.Thread(target=self._listen, name="dcp_mem-signals", daemon=True).start()

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it."""
        return self._process == os.getpid()

    def settle(self, number: int) -> None:
        """Return once everything has been done about a signal that has come, and those before it."""
        self._far.send(bytes([number]))  # it may have come while this was deaf
        while True:
            with self._guard:
                if not self._is_busy and not select.select([self._near], [], [], 0)[0]:
                    return
            time.sleep(_PAUSE)

    def uncover(self) -> None:
        self._other = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)

    def cover(self) -> None:
        """Hear nothing, until it is uncovered; whoever heard before does so again."""
        current = signal.set_wakeup_fd(self._other)
        if current != self._far.fileno():  # somebody else's, who came later
            signal.set_wakeup_fd(current)

    def close(self) -> None:
        _ears.remove(self)
        self.cover()
        self._far.close()

    def _listen(self) -> None:
        while True:
            select.select([self._near], [], [])
            with self._guard:
                numbers = self._near.recv(64)
                self._is_busy = bool(numbers)
            if not numbers:
                self._near.close()
                return
            if self._other != -1:
                os.write(self._other, numbers)
            for number in dict.fromkeys(numbers):
                self._heard(number)
            with self._guard:
                self._is_busy = False


_ears: list[_Ear] = []


def _cover_all() -> None:
    """A child that is forked shares the descriptor: what it is told, from its first moment on, isn't meant for its parent."""
    if threading.current_thread() is threading.main_thread():
        for ear in reversed(_ears):
            ear.cover()


def _uncover_all() -> None:
    if threading.current_thread() is threading.main_thread():
        for ear in _ears:
            ear.uncover()


def _deafen() -> None:
    if _ears:
        signal.set_wakeup_fd(-1)


os.register_at_fork(before=_cover_all, after_in_parent=_uncover_all, after_in_child=_deafen)


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
