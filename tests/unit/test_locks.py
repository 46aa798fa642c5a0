"""A process's locks and leases are its own: they end with it, and with nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dcp_mem import JobInUse
from dcp_mem.memory.locks import JobLock, RunIdentity, is_leased, job_is_live
from dcp_mem.memory.slots import SlotPool
from tests.support.processes.forks import forkserver

pytestmark = pytest.mark.timeout(120)

_SECONDS = 30


@contextmanager
def _forked_child() -> Iterator[None]:
    """A child of this process that does nothing, while the context lasts."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)
        os.write(there, b"x")
        while True:
            signal.pause()
    os.read(here, 1)
    os.close(here)
    os.close(there)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _status_of_child(act: Callable[[], int]) -> int:
    """What `act` returns in a forked child of this process."""
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)
        status = 255
        with contextlib.suppress(BaseException):
            status = act()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# -- leases on slots -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_forked_child_has_no_part_in_the_leases_on_its_parents_slots(
    memory_root: Path, is_shared: bool
) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.claim(4096, "")
    if is_shared:
        pool.share(slot)
    with _forked_child():
        assert is_leased(slot.path), "the parent has lost its lease"
        os.close(slot.descriptor)  # as its end would
        slot.descriptor = -1
        assert not is_leased(slot.path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_has_the_slots_leaves_them(memory_root: Path) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.claim(4096, "")
    with pool._guard:
        assert _status_of_child(lambda: 7 if slot.descriptor == -1 else 1) == 7
    slot.write_at(0, b"the parent's")
    assert Path(slot.path).read_bytes()[:12] == b"the parent's"
    pool.abandon(slot)
    pool.close()


# -- the job's lock --------------------------------------------------------------------------------


def _answer(directory: str, asked: Connection) -> None:
    """Say each time that it is asked whether the job is in use by another run."""
    while asked.recv():
        asked.send(_is_in_use(directory))


def _is_in_use(directory: str) -> bool:
    try:
        JobLock(directory, "job", RunIdentity("another run", "another")).close()
    except JobInUse:
        return True
    return False


def test_a_thread_that_looks_whether_a_job_is_live_does_not_drop_its_lock(
    memory_root: Path,
) -> None:
    directory, has_ended = str(memory_root), threading.Event()

    def look() -> None:
        while not has_ended.is_set():
            job_is_live(directory)

    ask, asked = forkserver().Pipe()
    other = forkserver().Process(target=_answer, args=(directory, asked), daemon=True)
    other.start()
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(300):
            lock = JobLock(directory, "job", RunIdentity("run", "token"))
            ask.send(True)
            assert ask.poll(_SECONDS)
            assert ask.recv(), f"lock {number} is lost"
            assert job_is_live(directory)
            lock.close()
    finally:
        sys.setswitchinterval(interval)
        has_ended.set()
        looking.join(_SECONDS)
        ask.send(False)
        other.join(_SECONDS)
        other.kill()
    assert not job_is_live(directory)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_sees_its_parents_job_end(memory_root: Path) -> None:
    directory = str(memory_root)
    lock = JobLock(directory, "job", RunIdentity("run", "token"))
    has_closed, may_look = os.pipe(), os.pipe()

    def look() -> int:
        was_live = job_is_live(directory)
        os.write(may_look[1], b"x")
        os.read(has_closed[0], 1)
        return 7 if was_live and not job_is_live(directory) else 1

    def close() -> None:
        os.read(may_look[0], 1)
        lock.close()
        os.write(has_closed[1], b"x")

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    assert _status_of_child(look) == 7
    closing.join(_SECONDS)
    for descriptor in (*has_closed, *may_look):
        os.close(descriptor)
