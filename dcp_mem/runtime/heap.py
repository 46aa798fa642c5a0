"""Heap that describing a plan has taken and freed, and that the system should have back."""

from __future__ import annotations

from dcp_mem.common.gc_pause import give_back_heap


class GrownHeap:
    """Whether a plan was described lately: that leaves tens of megabytes of free heap.

    Any thread may call anything: at worst, memory is given back twice, or at the next save.
    """

    def __init__(self) -> None:
        self._has_grown = False

    def note_growth(self) -> None:
        """Remember that a plan was described."""
        self._has_grown = True

    def trim(self) -> None:
        """Give back what is free by now; more may be free at the next save."""
        if self._has_grown:
            give_back_heap()

    def settle(self) -> None:
        """Give back what is free, once after a plan was described: all of it is by now."""
        if self._has_grown:
            self._has_grown = False
            give_back_heap()
