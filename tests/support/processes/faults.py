"""Fault points: the one place in tests that knows how a process is armed with them.

faults.arm("stage.copied:kill:1")       # in this process, as DCP_MEM_FAULTS does in a new one
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from dcp_mem.common import faults
from dcp_mem.common.faults import POINTS, FaultInjected, arm, is_armed

__all__ = ["POINTS", "FaultInjected", "arm", "at_point", "is_armed", "passes_of"]

_MANY = 1_000_000


def passes_of(name: str, act: Callable[[], object]) -> int:
    """Act; return how often this process has passed a point meanwhile."""
    arm(f"{name}:raise:{_MANY}")
    act()
    left = faults._armed[name][1]
    arm("")
    return _MANY - left


@contextmanager
def at_point(name: str, act: Callable[[], object]) -> Iterator[None]:
    """Have `act` happen where a point is passed, but not within itself."""
    point = faults.point

    def acting(passed: str) -> None:
        if passed == name:
            with patch.object(faults, "point", point):
                act()
        point(passed)

    with patch.object(faults, "point", acting):
        yield
