"""Signals that end a job: the newest checkpoint is flushed before the signal takes its effect."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.values import Outcome
from dcp_mem.errors import ConfigError
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.runtime.states import job_memory
from dcp_mem.writer import MemoryStorageWriter

_PAUSE = 0.05
_MISSED_SECONDS = 1.0
"""Longest time from a fork to the handler of a signal that came in the middle of it."""
_ECHO_SECONDS = 1.0
"""Longest time from raising a signal to its handler."""
_NEWEST = 2
"""Checkpoints to flush. Nodes that are told to end in the middle of a save may differ on whether
the newest is complete; the one before it is complete on all."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Handlers for signals that announce the job's end, such as SIGTERM, or SIGUSR1 under Slurm.

    1. The interpreter writes the signal's number to a wake-up descriptor, at once. (Python calls
       handlers in the main thread, between bytecodes: a rank that waits in a collective would be
       killed before its handler runs.)
    2. A thread reads it, has the newest complete checkpoint flushed, even one that was to stay in
       memory, and waits until it is durable, for at most `deadline_seconds`. Nothing is saved:
       storage gets what was saved last.
    3. The handler that was there before is called, in the main thread; if there was none, the
       process ends by the signal, as it would have.

    Meanwhile the main thread goes on, but for saves, which wait (`wait`). The handler itself waits
    for nothing: it may have interrupted code that holds what the flush needs, such as a lease, a
    lock of the logger, or one of the user's. Each rank acts by itself and waits for no other rank.
    """

    def __init__(
        self, writer: MemoryStorageWriter, signals: str | Sequence[str], deadline_seconds: float
    ) -> None:
        names = list(signals) if isinstance(signals, (list, tuple)) else [signals]
        self.signals = [_signal(name) for name in names]
        if names and writer.settings.url is None:
            raise ConfigError("preemption=: there is no storage to go to; give a path")
        if not 0 < deadline_seconds < float("inf"):
            raise ConfigError(
                f"preemption_deadline={deadline_seconds!r}: give a number of seconds above 0"
            )
        self._writer, self._deadline = writer, deadline_seconds
        self._seen: dict[int, str] = {}
        self._listener: _SignalListener | None = None

    def install(self) -> None:
        """Install the handlers, unless they are. Raises ConfigError."""
        global _listener
        if self._listener is not None or not self.signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "preemption=: make the manager in the main thread, where signals come"
            )
        if _listener is None or not _listener.is_own:
            _listener = _SignalListener()
        self._listener = _listener
        self._listener.add(self)

    def uninstall(self) -> None:
        """Put back the handlers that were there before, except where others came since.

        Signals that have come are settled first. A handler that others have taken over passes
        signals on to the one before it.
        """
        if threading.current_thread() is threading.main_thread() and self._listener is not None:
            self.wait()
            self._listener.remove(self)
            self._listener = None

    def wait(self) -> None:
        """Return once the signals that have come are settled; a save would overtake the flush."""
        if self._listener is not None and self._listener.is_own:
            self._listener.wait()

    def flush(self, number: int) -> None:
        """Have the newest checkpoint flushed, and wait for that, in the listener's thread."""
        try:
            self._flush(number)
        except Exception:
            log.exception("the newest checkpoint may not be on storage")

    def _flush(self, number: int) -> None:
        started, name = time.monotonic(), signal.Signals(number).name
        memory = job_memory(self._writer.settings)
        held = [] if memory is None else memory.checkpoints()
        newest = [one for one in held if not one.manifest.scope][:_NEWEST]
        if memory is None or not newest:
            log.warning("%s: nothing is in memory that storage could get", name)
            return
        if self._seen.get(number) == newest[0].manifest.save_id:
            return  # The signal came twice; the first deadline stands.
        self._seen[number] = newest[0].manifest.save_id
        _promote(memory, newest)
        self._writer._saver.wake_agent(now=True)
        while True:
            held = [one for one in memory.checkpoints() if not one.manifest.scope]
            present = {one.manifest.save_id: one for one in held}
            now = present.get(newest[0].manifest.save_id)
            if now is None and held and not _became_durable(memory, newest[0]):
                # A save that was under way has taken its place: that is what storage gets.
                newest, now = held[:_NEWEST], held[0]
            known = [one.manifest.save_id for one in newest]
            if _promote(memory, [present[one] for one in known if one in present]):
                self._writer._saver.wake_agent(now=True)
            seconds = time.monotonic() - started
            if now is None or now.flush.outcome == Outcome.DURABLE:
                log.warning("%s: %s is durable (%.1f s)", name, newest[0].name, seconds)
                return
            if seconds > self._deadline:
                rest = _alternative(newest, present)
                log.error("%s: %s is not durable after %.0f s; %s", name, now.name, seconds, rest)
                return
            time.sleep(_PAUSE)


class _SignalListener:
    """A process's thread that learns of signals at once, however busy the main thread is.

    It is made and changed in the main thread. It ends with its last user.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._users: list[Preemption] = []
        self._before: dict[int, Handler] = {}
        self._settled: set[int] = set()  # signals that are flushed for, and not passed on yet
        self._is_busy = False
        self._echoes: dict[int, float] = {}  # signals that this has raised, and when
        self._forked = 0.0
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._other = -1
        self.resume()
        threading.Thread(target=self._listen, name="dcp_mem-signals", daemon=True).start()

    def add(self, user: Preemption) -> None:
        """Flush for this user, too, from now on."""
        self._users.append(user)
        for number in user.signals:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def remove(self, user: Preemption) -> None:
        """Flush for this user no more, and put back the handlers that no other one needs."""
        global _listener
        self._users.remove(user)
        for number, before in list(self._before.items()):
            if not self._users_of(number) and signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                del self._before[number]
        if not self._users:
            self._close()
            _listener = None

    def _users_of(self, number: int) -> list[Preemption]:
        return [user for user in self._users if number in user.signals]

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made it."""
        return self._process == os.getpid()

    def wait(self) -> None:
        """Return once the signals that have come have been acted on."""
        while self._is_acting():
            time.sleep(_PAUSE)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on that is settled; any other is the thread's."""
        before = self._before.get(number, signal.getsignal(number))
        if not self.is_own or not self._users_of(number):
            # This is a forked child, which has nothing to flush, or other handlers came since.
            if callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif number not in self._settled:
            self._tell(number)
        else:
            self._settled.discard(number)
            if callable(before):
                before(number, frame)

    def _tell(self, number: int) -> None:
        """Have a signal acted on that this couldn't hear of; others are known already.

        It came while this was paused, or another library has taken the wake-up descriptor.
        """
        was_paused = time.monotonic() - self._forked < _MISSED_SECONDS
        is_deaf = self._wakeup_descriptor() != self._far.fileno()
        if (was_paused or is_deaf) and not self._is_acting():
            self._far.send(bytes([number]))

    def _act(self, number: int) -> None:
        """Flush, in the thread; then pass the signal on."""
        users = self._users_of(number)
        if not users:
            return
        before = self._before[number]
        in_daemons(lambda user: user.flush(number), users, name="dcp_mem-preemption")
        if callable(before):
            if signal.getsignal(number) == self._handle:  # else others have taken the signal
                self._settled.add(number)
                self._echoes[number] = time.monotonic()
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, number)  # which ends a sleep of the main thread, too
        elif before != signal.SIG_IGN:
            # Python's own `signal` may be called in the main thread alone. None: the default.
            ctypes.CDLL(None).signal(number, None)
            os.kill(os.getpid(), number)

    def _is_acting(self) -> bool:
        return self._is_busy or bool(select.select([self._near], [], [], 0)[0]) or self._is_busy

    def resume(self) -> None:
        """Take over the wake-up descriptor; what it was before gets the signals passed on."""
        self._other = signal.set_wakeup_fd(self._far.fileno(), warn_on_full_buffer=False)

    def pause(self) -> None:
        """Give the wake-up descriptor back to whoever had it before."""
        current = signal.set_wakeup_fd(self._other)
        if current != self._far.fileno():  # Another library has taken it since.
            with suppress(OSError, ValueError):  # it is closed
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _close(self) -> None:
        """Stop listening; who has taken the wake-up descriptor since may still give it back."""
        current = self._wakeup_descriptor()
        self.pause()
        if current in (-1, self._far.fileno(), self._other):
            self._far.close()

    def _wakeup_descriptor(self) -> int:
        """Return the descriptor that Python writes signals to, and leave it; in the main thread."""
        own = self._far.fileno()
        current = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        if current != own:
            with suppress(OSError, ValueError):  # it is closed
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return current

    def _listen(self) -> None:
        while True:
            select.select([self._near], [], [])
            self._is_busy = True  # before the number is read: `wait` sees one of the two
            try:
                numbers = self._near.recv(64)
                if not numbers:
                    self._near.close()
                    return
                come = dict.fromkeys(numbers)
                self._take([number for number in come if not self._is_echo(number)])
            except Exception:
                log.exception("a signal may not have been acted on")
            finally:
                self._is_busy = False

    def _take(self, numbers: Sequence[int]) -> None:
        if self._other != -1 and numbers:
            with suppress(OSError):  # its owner has closed it, or reads nothing
                os.write(self._other, bytes(numbers))
        for number in numbers:
            self._act(number)

    def _is_echo(self, number: int) -> bool:
        raised = self._echoes.pop(number, None)
        return raised is not None and time.monotonic() - raised < _ECHO_SECONDS


_listener: _SignalListener | None = None


def _pause() -> None:
    """Stop listening while a child is forked: it shares the descriptor with this process."""
    if _listener is not None and threading.current_thread() is threading.main_thread():
        _listener.pause()


def _resume() -> None:
    if _listener is not None and threading.current_thread() is threading.main_thread():
        _listener._forked = time.monotonic()
        _listener.resume()


def _ignore_signals_in_child() -> None:
    if _listener is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_ignore_signals_in_child)


def _promote(memory: JobMemory, checkpoints: Sequence[LocalCheckpoint]) -> bool:
    """Have checkpoints flushed that were to stay in memory; return whether there were any."""
    lacking = [one for one in checkpoints if one.flush.outcome != Outcome.DURABLE]
    promoted = [memory.promote(one) for one in lacking if not one.manifest.persist]
    return any(promoted)


def _became_durable(memory: JobMemory, checkpoint: LocalCheckpoint) -> bool:
    """Tell whether a checkpoint that has left memory was on storage by then."""
    save_id = checkpoint.manifest.save_id
    return any(
        row.save_id == save_id and row.outcome == Outcome.DURABLE for row in memory.history.rows()
    )


def _alternative(newest: Sequence[LocalCheckpoint], present: dict[str, LocalCheckpoint]) -> str:
    found = [present.get(one.manifest.save_id, one) for one in newest[1:]]
    durable = [one.name for one in found if one.flush.outcome == Outcome.DURABLE]
    return f"{durable[0]} is" if durable else "the agent goes on for as long as it lives"


def _signal(name: object) -> signal.Signals:
    try:
        found = signal.Signals[str(name)]
    except KeyError:
        found = None
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"preemption={name!r}: give names of signals that can be handled, such as 'SIGTERM' "
            f"or 'SIGUSR1'"
        )
    return found
