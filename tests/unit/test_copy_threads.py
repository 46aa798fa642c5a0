"""The threads that send and receive copies: none is left, however the work ends."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_mem.common.parallel import daemon
from dcp_mem.replicating import worker
from dcp_mem.replicating.plan import FilePart, FilePlan
from dcp_mem.replicating.worker import Worker

_COPIES = "dcp_mem-copy"


class _Ranks:
    """This rank, with peers that are always done."""

    rank, size = 0, 3

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.left = ""

    def all_reduce(self, value: Any, join: object) -> Any:
        self._act()
        return value

    def leave(self, why: str) -> None:
        self.left = why


class _SlowWorker(Worker):
    """Its channels take a second, unless the work is given up."""

    def _send(self, receiver: int, plans: object) -> None:
        for _ in range(20):
            time.sleep(0.05)
            self._go_on()


def _worker(ranks: _Ranks) -> Worker:
    plans = [
        FilePlan(
            receiver=receiver,
            file=f"to {receiver}",
            nbytes=1,
            slot_nbytes=1,
            parts=(FilePart(sender=0, file="own", start=0, stop=1, place=0),),
        )
        for receiver in (1, 2)
    ]
    memory: Any = SimpleNamespace(checkpoint_directory=lambda name: name)
    task: Any = SimpleNamespace(
        manifest=SimpleNamespace(name="step-1"),
        ranks=ranks,
        plans=plans,
        slots={},
        own_slot=None,
        timeout=0.4,
        stale=(),
    )
    slots: Any = None
    return _SlowWorker(memory, slots, task, threading.Event())


@pytest.fixture
def alive() -> Callable[[], list[threading.Thread]]:
    """What tells the threads that have begun since; other tests may have left kept ones."""
    before = set(threading.enumerate())
    return lambda: [
        thread
        for thread in threading.enumerate()
        if thread.name == _COPIES and thread not in before
    ]


def test_an_interrupted_worker_ends_its_threads_and_leaves_the_ranks(
    alive: Callable[[], list[threading.Thread]],
) -> None:
    def interrupt() -> None:
        assert alive()
        raise KeyboardInterrupt

    ranks = _Ranks(interrupt)
    with pytest.raises(KeyboardInterrupt):
        _worker(ranks).run()
    assert not alive()
    assert ranks.left == "KeyboardInterrupt"


def test_threads_that_were_started_are_waited_for_where_another_one_could_not_be(
    monkeypatch: pytest.MonkeyPatch, alive: Callable[[], list[threading.Thread]]
) -> None:
    started: list[str] = []

    def start(act: Callable[[], object], name: str) -> threading.Thread:
        started.append(name)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        return daemon(act, name)

    monkeypatch.setattr(worker, "daemon", start)
    failures = _worker(_Ranks(lambda: None)).run()
    assert not alive()
    assert failures == ((0, "replicating: RuntimeError: can't start new thread"),)
