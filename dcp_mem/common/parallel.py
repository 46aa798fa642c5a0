"""Do many like things several at a time, and have nothing left under way afterwards."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(
    act: Callable[[T], R], work: Iterable[T], *, at_once: int = 8, name: str = "dcp_mem-work"
) -> Iterator[R]:
    """Yield what `act` returns for each item, in order, working a few items ahead of the caller.

    When the iterator ends, or is closed, no call is under way any more. One item alone is worked on
    by the caller: starting a thread holds it up for longer than a small item takes.
    """
    if isinstance(work, Sequence) and len(work) == 1:
        yield act(work[0])
        return
    with ThreadPoolExecutor(at_once, thread_name_prefix=name) as pool:
        under_way: deque[Future[R]] = deque()
        try:
            for one in work:
                under_way.append(pool.submit(act, one))
                if len(under_way) >= 2 * at_once:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def before_pools_end(act: Callable[[], None]) -> None:
    """Have a function called at the process's end, before `concurrent.futures` ends its pools."""
    getattr(threading, "_register_atexit", atexit.register)(act)


def in_daemons(
    act: Callable[[T], R], items: Sequence[T], *, at_once: int = 16, name: str = "dcp_mem-survey"
) -> list[R]:
    """Return what `act` returns for each item, worked on by daemon threads.

    The threads of a pool would keep the process from ending for as long as storage doesn't answer;
    daemon threads don't.
    """
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    left = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    index, item = next(left, (-1, None))
                if index < 0:
                    return
                results[index] = act(item)  # type: ignore[arg-type]
        except Exception as error:
            errors.append(error)

    workers: list[threading.Thread] = []
    try:
        # One by one: where one can't be started, those before it are in the list.
        workers.extend(daemon(work, name) for _ in items[:at_once])
        for worker in workers:
            worker.join()
    except BaseException as error:  # an interrupt, or no more threads
        errors.append(error)
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]


def daemon(act: Callable[[], object], name: str = "dcp_mem-survey") -> threading.Thread:
    """Start and return a thread that runs `act` and keeps no process from ending."""
    thread = threading.Thread(target=act, name=name, daemon=True)
    thread.start()
    return thread
