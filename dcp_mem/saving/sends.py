"""Saves that DCP sends to another process: one at a time, in the order of their calls.

DCP gives each such save a thread of its own, and all of them one pipe to one process. Threads that
send at once read each other's answers, and in the beginning each starts a process. So each thread
waits here, before it sends anything, until the save before has its answer.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dcp_mem.comm.dcp_call import is_sending, sending_threads
from dcp_mem.runtime.turns import Turn, Turns

_POLL_SECONDS = 0.005
_BEGIN_SECONDS = 10.0
"""Time for DCP's thread to begin with a save, once that has been staged."""


@dataclass(frozen=True, slots=True)
class _Send:
    """A save that is being sent."""

    turn: Turn  # kept: a turn that is dropped is over
    on_end: Callable[[], None]  # called once the save has its answer, at the next look


_turns = Turns()
_has_sent = threading.Event()
_sending: dict[threading.Thread, _Send] = {}


def next_send() -> Turn:
    """Return the turn of a save that is about to be staged, in the thread that calls for it.

    The first save has DCP start the process. Whoever comes meanwhile waits for that here.
    """
    _end_answered()
    turn = _turns.take()
    try:
        while not (_has_sent.is_set() or turn.is_next):
            time.sleep(_POLL_SECONDS)
    except BaseException:
        turn.end()
        raise
    return turn


def note_staged(turn: Turn) -> None:
    """Have a turn end by itself, should DCP fail before it sends the save."""
    turn.follow(partial(_has_failed, weakref.ref(turn), time.monotonic()))


def wait_to_send(turn: Turn | None = None, on_end: Callable[[], None] = lambda: None) -> None:
    """Wait until the saves before have their answers; return at once outside of DCP's executor.

    `turn`: as `next_send` returned it. None for a save without one: it comes behind all that have
    been called for, unless this thread has waited for this save already. `on_end`: called once this
    save has its answer, when the next one is called for, or sent.
    """
    _end_answered()
    here = threading.current_thread()
    if not is_sending(threading.get_ident()) or (turn is None and here in _sending):
        return
    while True:
        if turn is None or turn.is_over:
            turn = _turns.take()
        turn.follow(partial(_is_answered, here))
        _sending[here] = _Send(turn, on_end)
        turn.wait()
        if not turn.is_over:  # as it is where others took the save for one that has failed
            break
    _has_sent.set()


def _end_answered() -> None:
    for thread in list(_sending):
        if _is_answered(thread) and (send := _sending.pop(thread, None)) is not None:
            send.on_end()


def _is_answered(thread: threading.Thread) -> bool:
    return not (thread.is_alive() and is_sending(thread.ident or 0))


def _has_failed(turn: weakref.ref[Turn], since: float) -> bool:
    """Return whether a save must have failed: its thread has had time to begin, and none has."""
    if time.monotonic() - since < _BEGIN_SECONDS:
        return False
    sends = list(_sending.items())  # first: a thread may just be about to be among them
    if any(send.turn is turn() for _, send in sends):
        return False
    return sending_threads() <= {thread.ident for thread, _ in sends}


def _forget_parent() -> None:
    """After a fork: the child sends to a process of its own."""
    global _turns, _has_sent
    _turns, _has_sent = Turns(), threading.Event()
    _sending.clear()


os.register_at_fork(after_in_child=_forget_parent)
