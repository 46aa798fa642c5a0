"""A process's locks and leases are its own: they end with it, and with nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dcp_mem.memory.locks import is_leased
from dcp_mem.memory.slots import SlotPool

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
