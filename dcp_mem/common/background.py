"""Threads behind training: how they begin, and those that are kept."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

R = TypeVar("R")
_SECONDS = 0.005


def let_caller_return(unwanted: threading.Event | None = None) -> bool:
    """Wait until the save that has just woken this thread has returned, most likely.

    A thread that wakes at once takes the interpreter's lock from the save, which then hands it back
    and forth instead of returning.

    Returns whether the thread may begin; False once it is unwanted.
    """
    return not (unwanted or threading.Event()).wait(_SECONDS)


COPYING, OVERLAPPING = "dcp_mem-copy", "dcp_mem-overlap"
"""Names of the threads that copy."""


def is_copying_thread() -> bool:
    """Return whether one of the threads that copy calls this.

    A collection of garbage may run anything in them. It must not wait there for copies.
    """
    return threading.current_thread().name.startswith((COPYING, OVERLAPPING))


class KeptThreads:
    """Threads that wait for the next work once theirs is done; made when there are too few.

    A thread that starts makes its caller wait: for milliseconds where all cores are busy. A forked
    child has threads of its own. The process doesn't end before their work is done.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._pool: ThreadPoolExecutor | None = None
        self._home = 0

    def submit(self, act: Callable[..., R], *arguments: object) -> Future[R]:
        """Have one of the threads call `act`."""
        pool = self._pool
        if pool is None or self._home != os.getpid():
            pool = self._pool = ThreadPoolExecutor(self._most, thread_name_prefix=self._name)
            self._home = os.getpid()
        return pool.submit(act, *arguments)


_Work = tuple["Future[None]", Callable[[], object]]


class KeptThread:
    """One thread that does work after work, made with the first; for the reason of `KeptThreads`.

    It keeps no process from ending, and ends with this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Work | None] | None = None
        self._home = 0

    def submit(self, act: Callable[[], object]) -> Future[None]:
        """Have the thread call `act`, after all that it was given before.

        Not to be called by several threads at once.
        """
        queue = self._queue
        if queue is None or self._home != os.getpid():
            queue = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name=self._name, daemon=True).start()
            # Not before the thread has started: nobody would serve the queue if it can't.
            self._queue, self._home = queue, os.getpid()
            weakref.finalize(self, queue.put, None).atexit = False
        done: Future[None] = Future()
        queue.put((done, act))
        return done

    def close(self) -> None:
        """End the thread once its work is done; further work makes another one."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(None)


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        done, act = work
        try:
            act()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del work, done, act  # nothing is held while the thread waits
