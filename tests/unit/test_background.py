"""Threads that are kept for the next work."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_mem
from dcp_mem import MemoryStorageWriter
from dcp_mem.common.background import KeptThread, KeptThreads, let_caller_return
from dcp_mem.common.parallel import in_parallel
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import forked


def _named(name: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(name)]


def _fail() -> None:
    raise LookupError("nothing there")


@pytest.mark.parametrize("make", [KeptThread, lambda name: KeptThreads(1, name)])
def test_a_thread_does_work_after_work_in_its_order(make: Any) -> None:
    name = f"kept-order-{id(make)}"  # the other kind's thread may still be there
    threads, done = make(name), list[int]()
    work = [threads.submit(lambda number=number: done.append(number)) for number in range(5)]
    assert not wait(work, timeout=20).not_done
    assert done == list(range(5))
    assert len(_named(name)) == 1


@pytest.mark.parametrize("make", [KeptThread, lambda name: KeptThreads(1, name)])
def test_work_that_fails_says_so_and_the_thread_goes_on(make: Any) -> None:
    threads = make("kept-failing")
    with pytest.raises(LookupError, match="nothing there"):
        threads.submit(_fail).result(timeout=20)
    assert threads.submit(lambda: None).result(timeout=20) is None


def _ends_well_in_a_child(act: Callable[[], object]) -> bool:
    """Fork this process and let the child act; False where it fails, or doesn't end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _work_before_and_after_a_fork() -> list[bool]:
    found = []
    for threads in (KeptThread("kept-forked"), KeptThreads(2, "kept-forked")):
        wait([threads.submit(lambda: None) for _ in range(3)])

        def work(threads: KeptThread | KeptThreads = threads) -> None:
            threads.submit(lambda: None).result(timeout=20)

        found.append(_ends_well_in_a_child(work))
    return found


def test_a_forked_child_has_threads_of_its_own() -> None:
    assert forked(_work_before_and_after_a_fork) == [True, True]


def _save_in(root: str, name: str) -> None:
    # Enough for two threads to copy. Made by numpy: torch's own threads don't outlive a fork.
    state = {"w": torch.from_numpy(np.ones(4 << 20, np.float32))}
    with MemoryStorageWriter(None, memory_root=root, job=name) as writer:
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
        dcp_mem.async_save(state, checkpoint_id="step-2", storage_writer=writer).result(timeout=30)


def _saves_before_and_after_a_fork(root: str) -> bool:
    torch.set_num_threads(2)
    _save_in(root, "parent")
    return _ends_well_in_a_child(lambda: _save_in(root, "child"))


def test_a_forked_child_saves_with_threads_after_its_parent_has(memory_root: Path) -> None:
    assert forked(_saves_before_and_after_a_fork, str(memory_root), timeout=100)


def test_a_kept_thread_ends_with_its_owner() -> None:
    thread = KeptThread("kept-owned")
    thread.submit(lambda: None).result(timeout=20)
    assert _named("kept-owned")
    del thread
    gc.collect()
    wait_until(lambda: not _named("kept-owned"))


def test_a_closed_thread_ends_once_its_work_is_done_and_is_made_anew() -> None:
    thread, may_end = KeptThread("kept-closed"), threading.Event()
    first = thread.submit(may_end.wait)
    thread.close()
    assert not first.done()
    may_end.set()
    first.result(timeout=20)
    wait_until(lambda: not _named("kept-closed"))
    assert thread.submit(lambda: None).result(timeout=20) is None
    thread.close()


def test_what_is_no_longer_wanted_does_not_begin() -> None:
    unwanted = threading.Event()
    assert let_caller_return(unwanted)
    unwanted.set()
    assert not let_caller_return(unwanted)


def test_one_item_alone_is_worked_on_by_the_caller() -> None:
    def failing(item: int) -> int:
        raise ValueError(item)

    assert list(in_parallel(lambda item: (item, threading.get_ident()), [7])) == [
        (7, threading.get_ident())
    ]
    assert list(in_parallel(lambda item: item, [])) == []
    assert len({*in_parallel(lambda item: threading.get_ident(), [1, 2])} - {threading.get_ident()})
    with pytest.raises(ValueError, match="7"):
        list(in_parallel(failing, [7]))
