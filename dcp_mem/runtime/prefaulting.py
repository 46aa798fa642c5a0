"""Slots are made ready between saves, in the background: pages populated, frames written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from dcp_mem.common.background import KeptThread, let_caller_return
from dcp_mem.common.log import log
from dcp_mem.config import Settings
from dcp_mem.memory import pinning
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slots import SlotPool
from dcp_mem.runtime.heap import GrownHeap
from dcp_mem.runtime.layouts import PlanLayout, put_frames


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The sizes of the slots that one checkpoint takes on a rank.

    Attributes:
        own: Bytes of the slot of the rank's own segment.
        layout: What that slot is made ready for.
        copies: Bytes of each slot for a segment, or parity, that comes from another rank.
    """

    own: int
    layout: PlanLayout
    copies: Sequence[int] = ()

    @property
    def count(self) -> int:
        """The number of these slots."""
        return 1 + len(self.copies)


class Prefaulting:
    """The thread that makes a rank's free slots ready, for one save at a time.

    Any thread may start and stop it. On return from `stop` nothing is made ready any more, until
    somebody starts it again.

    Args:
        memory: The job's memory on this node.
        slots: Where free slots are made ready.
        heap: Trimmed once the slots are ready.
    """

    def __init__(self, memory: JobMemory, slots: SlotPool, heap: GrownHeap) -> None:
        self._memory, self._slots, self._heap = memory, slots, heap
        self._thread = KeptThread("dcp_mem-prefault")
        self._under_way: Future[None] | None = None
        self._unwanted = threading.Event()  # of what is under way
        self._guard = threading.Lock()  # the thread never takes it, so it is held while that ends

    def start(self, sizes: SlotSizes, checkpoints: int) -> Future[None]:
        """Make free slots for so many checkpoints ready in the background.

        Args:
            sizes: What one checkpoint takes.
            checkpoints: For how many checkpoints there are to be free slots.

        Returns:
            What tells when that has ended.
        """
        return self._start(sizes, lambda: checkpoints)

    def _start(self, sizes: SlotSizes, checkpoints: Callable[[], int]) -> Future[None]:
        with self._guard:
            self._end()
            self._unwanted = unwanted = threading.Event()
            self._under_way = self._thread.submit(lambda: self._work(sizes, checkpoints, unwanted))
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
        self,
        settings: Settings,
        sizes: SlotSizes,
        *,
        rank: int,
        node_nbytes: int,
        pending_nbytes: int = 0,
    ) -> None:
        """Bring the rank's slots up to what `keep` + 1 checkpoints take, within the memory budget.

        In the background, as `start` does it.

        Args:
            settings: Of the job: how many checkpoints stay, and the memory limit.
            sizes: What one checkpoint takes of this rank's slots.
            rank: Names this rank's segments.
            node_nbytes: Bytes that one checkpoint takes on this node, copies included.
            pending_nbytes: Bytes that are about to be taken on this node for copies.
        """

        def missing() -> int:
            # In this order: a segment that retires in between is counted twice, never overlooked.
            in_use = self._memory.count_segments(rank)
            free = self._slots.free_count() // sizes.count
            room = self._room(settings, max(node_nbytes, 1), pending_nbytes)
            wanted = min(settings.keep + 1 - in_use, free + max(room, 0))
            return wanted if wanted > free else 0

        if not pending_nbytes:
            self._start(sizes, missing)
        elif count := missing():  # counted before the copies take what is pending
            self.start(sizes, count)

    def _room(self, settings: Settings, per_checkpoint: int, pending_nbytes: int) -> int:
        """Return for how many more checkpoints there is memory."""
        room = (self._memory.free_bytes() - pending_nbytes) // per_checkpoint - 1
        if settings.memory_limit is None:
            return room
        left = settings.memory_limit - self._memory.allocated_bytes() - pending_nbytes
        return min(room, left // per_checkpoint)

    def _work(
        self, sizes: SlotSizes, checkpoints: Callable[[], int], unwanted: threading.Event
    ) -> None:
        if not let_caller_return(unwanted):
            return
        try:
            count = checkpoints()
            if not count:
                return
            pinning.touch_pages_near_device()
            for number in range(1, count * sizes.count + 1):  # one checkpoint after the other
                self._make_ready(sizes, number, lambda: not unwanted.is_set())
        except Exception:
            log.warning(
                "prefaulting failed; saves will fault their pages in themselves", exc_info=True
            )
        self._heap.trim()

    def _make_ready(self, sizes: SlotSizes, count: int, wanted: Callable[[], bool]) -> None:
        """Have so many free slots, the last of them of the size that is next in turn."""
        kind = (count - 1) % sizes.count
        if kind:
            self._slots.prefault(count, sizes.copies[kind - 1], lambda slot: None, wanted)
        else:
            self._slots.prefault(
                count, sizes.own, lambda slot: put_frames(slot, sizes.layout), wanted
            )
