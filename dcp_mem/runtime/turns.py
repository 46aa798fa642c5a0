"""Saves of one job in one process take turns, in the order in which they asked.

    turn = turns.take()       a ticket, at once
    turn.wait()               until all earlier turns are over
    …                         the save
    turn.end()                the next one goes on

A turn whose save has ended without saying so is over as well: its ticket was dropped, its thread
has died or saves anew, or what it follows says so. So no save waits for one that nobody makes.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

_POLL_SECONDS = 0.001
"""Between two looks at turns that may be over without having been ended."""
_FIRST_COLLECTION = 0.5
"""Seconds of waiting after which garbage is collected; each pause is twice the one before."""


class Turns:
    """Gives out turns, in order. Any thread may call anything at any time, signal handlers too.

    After a fork the turns of the parent process hold nobody up in the child.
    """

    def __init__(self) -> None:
        # Reentrant: a garbage collection or a signal handler may come in between.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: list[_Entry] = []  # in order; turns that are over may still be among them
        self._pid = os.getpid()

    def take(self) -> Turn:
        """Return a turn behind all those taken before, without waiting for them."""
        entry = _Entry()
        turn = Turn(self, entry)
        if self._is_here():
            with self._changed:
                self._waiting.append(entry)
        return turn

    def abandon_here(self) -> None:
        """End the turns that the calling thread holds, for it has come to the next thing to do.

        A turn that it waits for comes later: the wait goes on once the signal handler that has come
        in between is done.
        """
        here = threading.current_thread()
        for entry in self._before(None):
            if entry.holder is here:
                self._end(entry)
            elif entry.waiter is here:
                entry.is_put_off = True
                self._end(entry)

    def has_here(self) -> bool:
        """Return whether the calling thread holds a turn: it has waited for it, and not ended it.

        Such a thread needs no other turn for what belongs to its save.
        """
        here = threading.current_thread()
        return any(entry.holder is here for entry in self._before(None))

    def _is_here(self) -> bool:
        return self._pid == os.getpid()

    def _before(self, entry: _Entry | None) -> list[_Entry]:
        """Return the turns before this one that haven't been ended; all of them for None."""
        if not self._is_here():
            return []
        with self._changed:
            self._waiting = [one for one in self._waiting if not one.is_ended]
            if entry not in self._waiting:
                return list(self._waiting) if entry is None else []
            return self._waiting[: self._waiting.index(entry)]

    def _is_next(self, entry: _Entry) -> bool:
        here = threading.current_thread()
        return all(one.is_over(here) for one in self._before(entry))

    def _wait(self, entry: _Entry) -> None:
        here = threading.current_thread()
        entry.waiter = here
        try:
            self._wait_until_next(entry, here)
            while entry.is_put_off:
                with self._changed:
                    entry.is_ended = entry.is_put_off = False
                    self._waiting = [*(one for one in self._waiting if one is not entry), entry]
                self._wait_until_next(entry, here)
            entry.holder = here
        finally:
            entry.waiter = None

    def _wait_until_next(self, entry: _Entry, here: threading.Thread) -> None:
        started, patience = time.monotonic(), _FIRST_COLLECTION
        # Asked without the lock: it isn't known what a turn follows does.
        while [one for one in self._before(entry) if not one.is_over(here)]:
            with self._changed:
                if self._before(entry):
                    self._changed.wait(_POLL_SECONDS)  # in short steps, as long as it may take
            if time.monotonic() - started > patience:
                gc.collect()  # a dropped ticket may be in a cycle with the error of its save
                patience *= 2

    def _end(self, entry: _Entry) -> None:
        entry.is_ended = True
        if self._is_here():
            with self._changed:
                self._changed.notify_all()


class Turn:
    """One save's turn. Its end is the end of the `with` block, `end()`, or that of the ticket."""

    def __init__(self, turns: Turns, entry: _Entry) -> None:
        self._turns, self._entry = turns, entry
        # Without a lock: the collector may run anywhere. Who waits looks again in a moment.
        weakref.finalize(self, entry.abandon).atexit = False

    def wait(self) -> None:
        """Block until all earlier turns are over; from then on the calling thread holds this one.

        An earlier turn that the calling thread itself holds counts as abandoned, since a thread
        makes one save at a time. KeyboardInterrupt, and what other signal handlers raise, ends the
        wait; the turn keeps its place then, until it is ended.
        """
        self._turns._wait(self._entry)

    @property
    def is_next(self) -> bool:
        """Whether all earlier turns are over."""
        return self._turns._is_next(self._entry)

    @property
    def is_over(self) -> bool:
        """Whether this turn has ended."""
        return self._entry.is_ended

    def end(self) -> None:
        """Let the next turn begin. Ending twice is fine."""
        self._turns._end(self._entry)

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Have the turn end once its save is over, should nobody call `end`.

        `is_over`: returns whether the save is over. Other threads call it, about every millisecond
        while they wait. It must not raise, wait, nor keep this turn alive.
        """
        self._entry.follows = is_over

    def hand_over(self) -> None:
        """Have the turn stay when the calling thread, if it holds it, comes to its next save."""
        if self._entry.holder is threading.current_thread():
            self._entry.holder = None

    def __enter__(self) -> Turn:
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class _Entry:
    """A turn's place among the others; it doesn't keep the turn alive."""

    def __init__(self) -> None:
        self.holder: threading.Thread | None = None  # who has waited for it
        self.waiter: threading.Thread | None = None  # who waits for it
        self.is_put_off = False
        self.follows: Callable[[], bool] | None = None
        self.is_ended = False

    def abandon(self) -> None:
        self.is_ended = True

    def is_over(self, asking: threading.Thread) -> bool:
        """Tell whether the turn is over for a thread that waits behind it, and remember it."""
        holder, follows = self.holder, self.follows
        is_left = holder is not None and (holder is asking or not holder.is_alive())
        if is_left or (follows is not None and follows()):
            self.is_ended = True
        return self.is_ended
