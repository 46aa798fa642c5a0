"""Slots are made ready between saves, in the background: pages populated, frames written."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

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

    @property
    def count(self) -> int:
        """The number of these slots, but for what all checkpoints share."""
        return 1 + len(self.copies)


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

    def _start(
        self,
        sizes: SlotSizes,
        checkpoints: Callable[[], int],
        has_room: Callable[[int], bool],
    ) -> Future[None]:
        with self._guard:
            self._end()
            self._unwanted = unwanted = threading.Event()
            self._under_way = self._thread.submit(
                lambda: self._work(sizes, checkpoints, unwanted, has_room)
            )
            return self._under_way

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

        def missing() -> int:
            # In this order: a segment that retires in between is counted twice, never overlooked.
            in_use = self._memory.count_segments(rank)
            free = self._slots.free_count() // sizes.count
            room = self._room(settings, needs)
            wanted = min(settings.keep + 1 - in_use, free + max(room, 0))
            return wanted if wanted > free else 0

        def has_room(nbytes: int) -> bool:
            return nbytes <= self._left(settings, needs)

        if not needs.pending:
            return self._start(sizes, missing, has_room)
        if count := missing():  # counted before the copies take what is pending
            return self._start(sizes, lambda: count, has_room)
        return None

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
        sizes: SlotSizes,
        checkpoints: Callable[[], int],
        unwanted: threading.Event,
        has_room: Callable[[int], bool],
    ) -> None:
        if not let_caller_return(unwanted):
            return

        def wanted() -> bool:
            return not unwanted.is_set()

        try:
            count = checkpoints()
            if not count:
                return
            pinning.touch_pages_near_device()
            shared = 0
            if sizes.base is not None:
                shared = 1
                self._make(1, sizes.base.layout.nbytes, sizes.base, wanted, has_room)
            for number in range(count * sizes.count):  # one checkpoint after the other
                kind = number % sizes.count
                self._make(
                    shared + number + 1,
                    sizes.copies[kind - 1] if kind else sizes.own,
                    None if kind else sizes.layout,
                    wanted,
                    has_room,
                )
        except Exception:
            log.warning(
                "prefaulting failed; saves will fault their pages in themselves", exc_info=True
            )
        self._heap.trim()

    def _make(
        self,
        count: int,
        nbytes: int,
        layout: PlanLayout | None,
        wanted: Callable[[], bool],
        has_room: Callable[[int], bool],
    ) -> None:
        """Have so many free slots, the last of them of this size, with the layout's frames."""

        def prepare(slot: Slot) -> None:
            if layout is not None:
                put_frames(slot, layout)

        self._slots.prefault(count, nbytes, prepare, wanted, has_room)
