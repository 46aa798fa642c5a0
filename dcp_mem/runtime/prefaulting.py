"""Slots are made ready between saves, in the background: pages populated, frames written."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from dcp_mem.common.gc_pause import GrownHeap
from dcp_mem.common.log import log
from dcp_mem.common.parallel import KeptThreads, let_caller_return
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings
from dcp_mem.memory import pinning
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.runtime.layouts import PlanLayout, put_frames


@value_class
class SlotSizes:
    """The sizes of the slots that one checkpoint takes on a rank."""

    own: int  # bytes of the slot of the rank's own segment
    layout: PlanLayout
    # bytes of each slot for a segment, or parity, that comes from another rank
    copies: Sequence[int] = ()
    # layout of a further slot, which all checkpoints share; None where none is needed
    base: PlanLayout | None = None


@value_class(kw_only=True)
class NodeNeeds:
    """The memory that the next checkpoints need on this node, in bytes."""

    checkpoint: int
    base: int = 0  # what all of them share, and isn't there yet
    records: int = 0
    pending: int = 0  # what is about to be taken for copies, and is set aside already
    # for how many more checkpoints the ranks have found memory together; None where each rank looks
    # by itself, and may count what others are making just then
    room: int | None = None


class Prefaulting:
    """The thread that makes a rank's free slots ready, for one save at a time.

    Any thread may call `fill_up` and `stop`. On return from `stop` nothing is made ready any more,
    until somebody calls `fill_up` again.
    """

    def __init__(self, memory: JobMemory, slots: SlotPool, heap: GrownHeap) -> None:
        self._memory, self._slots, self._heap = memory, slots, heap
        self._thread = KeptThreads(1, "dcp_mem-prefault")
        self._under_way: Future[None] | None = None
        self._unwanted = threading.Event()  # of what is under way
        self._guard = threading.Lock()  # the thread never takes it, so it is held while that ends

    def stop(self) -> None:
        """End the background work where it is; what it has done by then isn't lost."""
        with self._guard:
            self._end()

    def close(self) -> None:
        """Stop, and end the thread."""
        with self._guard:
            self._end()
            self._thread.close()

    @property
    def is_busy(self) -> bool:
        """Whether slots are being made ready."""
        under_way = self._under_way
        return under_way is not None and not under_way.done()

    def _end(self) -> None:
        self._unwanted.set()
        if self._under_way is not None:
            wait([self._under_way])
            self._under_way = None

    def fill_up(
        self, settings: Settings, sizes: SlotSizes, needs: NodeNeeds, *, rank: int
    ) -> Future[None] | None:
        """Bring the rank's slots up to what `keep` + 1 checkpoints take, within the limit."""
        # Where copies are about to take slots, those are counted before they do.
        count = self._missing(settings, sizes, needs, rank) if needs.pending else None
        if count == 0:
            return None
        with self._guard:
            self._end()
            self._unwanted = unwanted = threading.Event()
            self._under_way = self._thread.submit(
                self._work, settings, sizes, needs, rank, count, unwanted
            )
            return self._under_way

    def _missing(self, settings: Settings, sizes: SlotSizes, needs: NodeNeeds, rank: int) -> int:
        """Return for how many checkpoints the rank is to have free slots; 0 where it has enough."""
        # In this order: a segment that retires in between is counted twice, never overlooked.
        in_use = self._memory.count_segments(rank)
        free = self._slots.free_count() // (1 + len(sizes.copies))
        wanted = min(settings.keep + 1 - in_use, free + max(self._room(settings, needs), 0))
        return wanted if wanted > free else 0

    def _room(self, settings: Settings, needs: NodeNeeds) -> int:
        """Return for how many more checkpoints there is memory."""
        if needs.room is not None:
            return needs.room
        per_checkpoint = max(needs.checkpoint, 1)
        room = (self._memory.free_bytes() - needs.base - needs.pending) // per_checkpoint - 1
        left = self._left(settings, needs) - needs.base
        return int(min(room, left // per_checkpoint))

    def _left(self, settings: Settings, needs: NodeNeeds) -> float:
        """Return the bytes that the memory limit leaves for slots."""
        if settings.memory_limit is None:
            return math.inf
        # The newest checkpoint's other files may still come, and so do those of the next one.
        return settings.memory_limit - self._memory.allocated_bytes() - 2 * needs.records

    def _work(
        self,
        settings: Settings,
        sizes: SlotSizes,
        needs: NodeNeeds,
        rank: int,
        count: int | None,
        unwanted: threading.Event,
    ) -> None:
        if not let_caller_return(unwanted):
            return
        try:
            if count is None:
                count = self._missing(settings, sizes, needs, rank)
            if not count:
                return
            pinning.touch_pages_near_device()
            slots = [(sizes.own, sizes.layout), *((nbytes, None) for nbytes in sizes.copies)]
            slots *= count  # one checkpoint after the other
            if sizes.base is not None:
                slots.insert(0, (sizes.base.layout.nbytes, sizes.base))
            for number, (nbytes, layout) in enumerate(slots):
                self._slots.prefault(
                    number + 1,
                    nbytes,
                    partial(_prepare, layout),
                    lambda: not unwanted.is_set(),
                    lambda more: more <= self._left(settings, needs),
                )
        except Exception:
            log.warning(
                "prefaulting failed; saves will fault their pages in themselves", exc_info=True
            )
        self._heap.trim()


def _prepare(layout: PlanLayout | None, slot: Slot) -> None:
    if layout is not None:
        put_frames(slot, layout)
