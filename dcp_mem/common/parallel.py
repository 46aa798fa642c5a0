"""Threads: kept ones, many like things several at a time, and how work behind training begins."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # First: what is to come before its end goes last.
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet, finalize

T = TypeVar("T")
R = TypeVar("R")
_SECONDS = 0.005
COPYING, OVERLAPPING = "dcp_mem-copy", "dcp_mem-overlap"
"""Names of the threads that copy."""


def is_copying_thread() -> bool:
    """Return whether one of the threads that copy calls this.

    A collection of garbage may run anything in them. It must not wait there for copies.
    """
    return threading.current_thread().name.startswith((COPYING, OVERLAPPING))


def let_caller_return(unwanted: threading.Event | None = None) -> bool:
    """Wait until the save that has just woken this thread has returned, most likely.

    A thread that wakes at once takes the interpreter's lock from the save, which then hands it back
    and forth instead of returning.

    Returns whether the thread may begin; False once it is unwanted.
    """
    return not (unwanted or threading.Event()).wait(_SECONDS)


class KeptThreads:
    """Threads that wait for the next work once theirs is done; made when there are too few.

    A thread that starts makes its caller wait: for milliseconds where all cores are busy. One
    thread does its work in order. A forked child has threads of its own. They end with this object.

    `is_awaited`: whether the process doesn't end before their work is done.
    """

    def __init__(self, most: int, name: str, *, is_awaited: bool = False) -> None:
        self._most, self._name = most, name
        self._threads: _Threads | None = None
        if is_awaited:
            _awaited.add(self)

    def submit(self, act: Callable[..., R], *arguments: object) -> Future[R]:
        """Have one of the threads call `act`."""
        threads = self._threads
        if threads is None or threads.home != os.getpid():
            threads = self._threads = _Threads(self._most, self._name)
            finalize(self, threads.end).atexit = False
        return threads.submit(partial(act, *arguments))

    def close(self) -> _Threads | None:
        """End the threads once their work is done, and return them; further work makes others."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.end()
        return threads


class _Threads:
    """Daemon threads of this process, and what they are to do."""

    def __init__(self, most: int, name: str) -> None:
        self.home = os.getpid()
        self._most, self._name = most, name
        self._work = SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]()
        self._guard = threading.RLock()  # reentrant: a garbage collection may come in between
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that wait; too many only once all that may be exist

    def submit(self, act: Callable[[], R]) -> Future[R]:
        done = Future[R]()
        with self._guard:
            if self._idle > 0:
                self._idle -= 1
            elif len(self._threads) < self._most:
                self._threads.append(daemon(self._serve, self._name))
        # Not before: where no thread can be started, nobody would do it.
        self._work.put((done, act))
        return done

    def end(self) -> None:
        """End the threads once their work is done."""
        for _ in self._threads:
            self._work.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            done, act = work
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(act())
                except BaseException as error:
                    done.set_exception(error)
            del work, done, act  # nothing is held while the thread waits
            with self._guard:
                self._idle += 1


_awaited = WeakSet[KeptThreads]()


def before_pools_end(act: Callable[[], None]) -> None:
    """Have a function called at the process's end, before `concurrent.futures` ends its pools."""
    getattr(threading, "_register_atexit", atexit.register)(act)


def _finish_work() -> None:
    for kept in list(_awaited):
        threads = kept.close()
        if threads is not None and threads.home == os.getpid():
            threads.join()


before_pools_end(_finish_work)


def in_parallel(
    act: Callable[[T], R],
    work: Iterable[T],
    *,
    at_once: int = 8,
    ahead: int = 0,
    name: str = "dcp_mem-work",
) -> Iterator[R]:
    """Yield what `act` returns for each item, in order, working a few items ahead of the caller.

    When the iterator ends, or is closed, no call is under way any more. One item alone is worked on
    by the caller: starting a thread holds it up for longer than a small item takes.

    `ahead`: so many items; by default twice as many as are worked on at once.
    """
    if isinstance(work, Sequence) and len(work) == 1:
        yield act(work[0])
        return
    threads, under_way = _Threads(at_once, name), deque[Future[R]]()
    try:
        for one in work:
            under_way.append(threads.submit(partial(act, one)))
            if len(under_way) >= (ahead or 2 * at_once):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
        threads.end()
        threads.join()


def in_daemons(
    act: Callable[[T], R], items: Sequence[T], *, at_once: int = 16, name: str = "dcp_mem-survey"
) -> list[R]:
    """Return what `act` returns for each item; none is begun once one has failed before it."""
    return list(in_parallel(act, items, at_once=at_once, ahead=len(items) + 1, name=name))


def daemon(act: Callable[[], object], name: str = "dcp_mem-survey") -> threading.Thread:
    """Start and return a thread that runs `act` and keeps no process from ending."""
    thread = threading.Thread(target=act, name=name, daemon=True)
    thread.start()
    return thread
