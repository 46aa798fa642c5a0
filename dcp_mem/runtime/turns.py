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
import itertools
import math
import threading
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

_POLL_SECONDS = 0.001
_FIRST_COLLECTION = 0.5
"""Seconds of waiting after which garbage is collected; each pause is twice the one before."""


class Turns:
    """Gives out turns, in order. Any thread may call anything at any time, signal handlers too.

    So there is no lock here: what is done to the table, the interpreter does at once.
    """

    def __init__(self) -> None:
        self._taken = WeakValueDictionary[int, Turn]()
        self._numbers = itertools.count()

    def take(self) -> Turn:
        """Return a turn behind all those taken before, without waiting for them."""
        return Turn(self)

    def abandon_here(self) -> None:
        """End the turns that the calling thread holds, for it has come to the next thing to do.

        A turn that it waits for comes later: the wait goes on once the signal handler that has come
        in between is done.
        """
        here = threading.current_thread()
        for turn in self._unended():
            if turn.holder is here:
                turn.end()
            elif turn.waiter is here:
                turn.number = math.inf

    def has_here(self) -> bool:
        """Return whether the calling thread holds a turn: it has waited for it, and not ended it.

        Such a thread needs no other turn for what belongs to its save.
        """
        here = threading.current_thread()
        return any(turn.holder is here for turn in self._unended())

    def _add(self, turn: Turn) -> int:
        number = next(self._numbers)
        self._taken[number] = turn
        return number

    def _unended(self) -> list[Turn]:
        turns = [turn() for turn in self._taken.valuerefs()]
        return [turn for turn in turns if turn is not None and not turn.is_over]


class Turn:
    """One save's turn. Its end is the end of the `with` block, `end()`, or that of the ticket."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._follows: Callable[[], bool] | None = None
        self.holder: threading.Thread | None = None  # who has waited for it
        self.waiter: threading.Thread | None = None  # who waits for it
        self.is_over = False  # whether it has ended
        self.number: float = math.inf  # what comes before it has a lower one; infinite: put off
        self.number = turns._add(self)

    def wait(self) -> None:
        """Block until all earlier turns are over; from then on the calling thread holds this one.

        An earlier turn that the calling thread itself holds counts as abandoned, since a thread
        makes one save at a time. KeyboardInterrupt, and what other signal handlers raise, ends the
        wait; the turn keeps its place then, until it is ended.
        """
        self.waiter = threading.current_thread()
        started, patience = time.monotonic(), _FIRST_COLLECTION
        try:
            while not self.is_next or self.number == math.inf:
                if self.number == math.inf:
                    self.number = self._turns._add(self)
                    continue
                time.sleep(_POLL_SECONDS)
                if time.monotonic() - started > patience:
                    gc.collect()  # a dropped ticket may be in a cycle with the error of its save
                    patience *= 2
            self.holder = self.waiter
        finally:
            self.waiter = None

    @property
    def is_next(self) -> bool:
        """Whether all earlier turns are over, or this one is."""
        here, number = threading.current_thread(), self.number
        earlier = (turn for turn in self._turns._unended() if turn.number < number)
        return self.is_over or all(turn._is_left(here) for turn in earlier)

    def _is_left(self, asking: threading.Thread) -> bool:
        """Tell whether the turn is over for a thread that waits behind it; end it if so."""
        holder, follows = self.holder, self._follows
        is_left = holder is not None and (holder is asking or not holder.is_alive())
        if is_left or (follows is not None and follows()):
            self.end()
        return self.is_over

    def end(self) -> None:
        """Let the next turn begin. Ending twice is fine."""
        self.is_over = True

    def follow(self, is_over: Callable[[], bool] | None) -> None:
        """Have the turn end once its save is over, should nobody call `end`.

        `is_over`: returns whether the save is over; None while it goes on for as long as it takes.
        Other threads call it, about every millisecond while they wait. It must not raise, wait, nor
        keep this turn alive.
        """
        self._follows = is_over

    def hand_over(self) -> None:
        """Have the turn stay when the calling thread, if it holds it, comes to its next save."""
        if self.holder is threading.current_thread():
            self.holder = None

    def __enter__(self) -> Turn:
        try:
            self.wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
