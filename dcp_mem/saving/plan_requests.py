"""Plans that come back from the process that saves to the one that copies.

With the process executor of `dcp.async_save` the ranks plan in other processes than those that
copy. A state whose plan isn't known takes a request along. The plan comes back in memory that both
processes have open, and later states like that one are copied straight into slots, for as long as
the process that saves has the plan.
"""

from __future__ import annotations

import os
import pickle
import struct
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

from dcp_mem.planning.plan_columns import LocalPlan

_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ToldPlan:
    """One rank's part of a plan that all ranks have made, as another process can use it."""

    plan_id: str
    local: LocalPlan  # what the rank would write if it saved alone
    mask: bytes  # which rows of that it writes, a bit each
    to_lowest_rank: bool


class PlanRequest:
    """Asks another process for the plan of the save that it makes; it may be pickled to that."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make room for an answer.

        `descriptor`: of the memory that the answer goes to; None for new memory.
        """
        if descriptor is None:
            descriptor = os.memfd_create("dcp_mem-plan", os.MFD_CLOEXEC)
        self._descriptor = descriptor
        self._told: ToldPlan | None = None
        weakref.finalize(self, os.close, descriptor).atexit = False

    def answer(self, told: ToldPlan) -> None:
        """Answer with a plan. Called by the process that saves."""
        data = pickle.dumps(told)
        os.pwrite(self._descriptor, data, _LENGTH.size)
        os.pwrite(self._descriptor, _LENGTH.pack(len(data)), 0)  # last: now it may be read

    def withdraw(self) -> None:
        """Take the answer back: this process forgets the plan."""
        os.pwrite(self._descriptor, _LENGTH.pack(0), 0)

    @property
    def is_answered(self) -> bool:
        """Whether the saving process has sent the plan, and not withdrawn it since."""
        return self._length > 0

    @property
    def answered(self) -> ToldPlan | None:
        """The plan, if `is_answered`."""
        length = self._length
        if length and self._told is None:
            # From a process that this one has started, through memory that nobody else has open.
            self._told = pickle.loads(os.pread(self._descriptor, length, _LENGTH.size))
        return self._told if length else None

    @property
    def _length(self) -> int:
        head = os.pread(self._descriptor, _LENGTH.size, 0)
        return int(_LENGTH.unpack(head)[0]) if head else 0

    def __reduce__(self) -> Any:
        return _received, (DupFd(self._descriptor),)


def _received(duplicate: Any) -> PlanRequest:
    return PlanRequest(duplicate.detach())
