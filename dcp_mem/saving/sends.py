"""Saves that DCP sends to another process: one at a time, in the order of their calls.

DCP gives each such save a thread of its own, and all of them one pipe to one process. Threads that
send at once read each other's answers, and in the beginning each starts a process. So each thread
waits here, before it sends anything, until the save before has its answer.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from dcp_mem.comm.dcp_call import SendingCall, sending_call, sending_calls
from dcp_mem.runtime.turns import Turn, Turns

_POLL_SECONDS = 0.005
_BEGIN_SECONDS = 10.0
"""Time for a thread to begin with a save that was called for."""
_turns = Turns()
_has_sent = threading.Event()
_sending: dict[SendingCall, Turn] = {}
"""The turns of what is being sent. A turn that is dropped would be over."""


def next_send() -> Turn:
    """Return the turn of a save that is about to be sent, in the thread that calls for it.

    The first one has DCP start the process; whoever comes meanwhile waits for that here.
    """
    turn = _turns.take()
    turn.follow(partial(_has_failed, time.monotonic()))
    while not (_has_sent.is_set() or turn.is_next):
        time.sleep(_POLL_SECONDS)
    return turn


def wait_to_send(turn: Turn | None = None) -> None:
    """Wait until the saves before have their answers; return at once outside of DCP's executor.

    Args:
        turn: As `next_send` returned it. None for a save that has none, which is next after all
            that have been called for; nothing is waited for where the same call has one already.
    """
    call, known = sending_call(), set(_sending)
    for one in known - sending_calls():  # in this order: others may begin meanwhile
        _sending.pop(one, None)
    if call is None or call in _sending:
        return
    _sending[call] = turn = turn or _turns.take()
    turn.follow(partial(_is_answered, call))
    turn.wait()
    _has_sent.set()


def _is_answered(call: SendingCall) -> bool:
    return call not in sending_calls()


def _has_failed(since: float) -> bool:
    """Tell of a save that hasn't been sent whether its thread must have failed before."""
    if time.monotonic() - since < _BEGIN_SECONDS:
        return False
    return sending_calls() <= _sending.keys()


def _forget_parent() -> None:
    """After a fork: the child sends to a process of its own."""
    global _turns, _has_sent
    _turns, _has_sent = Turns(), threading.Event()
    _sending.clear()


os.register_at_fork(after_in_child=_forget_parent)
