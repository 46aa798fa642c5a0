"""A node's segments on their way to storage: parts of all of them in flight at once, checksums taken on the way.

A part is mapped, hashed, handed to the route as it lies there, and unmapped: nothing is copied, and no more memory is
mapped than is in flight.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from dcp_mem import faults
from dcp_mem.errors import SegmentCorrupt
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import mapped
from dcp_mem.storage import LEAST_PART, Storage, Upload, part_count
from dcp_mem.values import Segment

_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 32


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A segment that storage shall have. table: its items, without checksums. is_stored: storage has it whole already."""

    segment: Segment
    table: ItemTable
    key: str
    is_stored: bool


def parts_at_once() -> int:
    """How many parts a node has in flight."""
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, 2 * (os.cpu_count() or 1)))


def upload_all(
    directory: str, outgoing: Sequence[Outgoing], storage: Storage, meter: Meter, throttle: Throttle
) -> dict[str, ItemTable]:
    """Upload a directory's segments that storage lacks, and read the others; returns their tables, complete, by file.

    Raises StorageUnavailable, StorageRefused, SegmentCorrupt (memory lacks bytes). What was put by then may stay, for the
    next attempt to go on with.
    """
    stop = threading.Event()
    with ExitStack() as resources:
        ways = [resources.enter_context(_way(directory, one, storage, meter, throttle, stop)) for one in outgoing]
        tasks = [task for way in ways for task in way.tasks()]
        meter.expect(sum(one.segment.nbytes for one in outgoing), sum(len(numbers) for _, numbers in tasks))
        with ThreadPoolExecutor(parts_at_once(), thread_name_prefix="dcp_mem-upload") as pool:
            try:
                for _ in pool.map(lambda task: task[0].pass_on(task[1]), tasks):
                    pass
            except BaseException:
                stop.set()
                raise
        return {way.outgoing.segment.file: way.table() for way in ways}


@contextmanager
def _way(
    directory: str, outgoing: Outgoing, storage: Storage, meter: Meter, throttle: Throttle, stop: threading.Event
) -> Iterator[_Way]:
    segment = outgoing.segment
    with _leased(directory, segment) as descriptor:
        upload = None if outgoing.is_stored else storage.upload(outgoing.key, segment.nbytes)
        try:
            yield _Way(outgoing, descriptor, upload, meter, throttle, stop)
        finally:
            if upload is not None:
                upload.close()


@contextmanager
def _leased(directory: str, segment: Segment) -> Iterator[int]:
    name = os.path.basename(directory)
    try:
        descriptor = open_leased(os.path.join(directory, segment.file))
    except FileNotFoundError:
        raise SegmentCorrupt(name, segment.rank, "memory", f"{segment.file} is gone") from None
    try:
        there = os.fstat(descriptor).st_size
        if there < segment.nbytes:  # reading a mapping behind the end of its file would be SIGBUS
            raise SegmentCorrupt(name, segment.rank, "memory", f"ends at {there} of {segment.nbytes} bytes")
        yield descriptor
    finally:
        end_lease(descriptor)
        os.close(descriptor)


class _Way:
    """One segment's way through the threads that take parts."""

    def __init__(
        self,
        outgoing: Outgoing,
        descriptor: int,
        upload: Upload | None,
        meter: Meter,
        throttle: Throttle,
        stop: threading.Event,
    ) -> None:
        self.outgoing = outgoing
        self.checksums = BlockChecksums(blocks_of(outgoing.table.offsets, outgoing.table.lengths))
        self._descriptor, self._upload, self._meter, self._throttle, self._stop = (
            descriptor,
            upload,
            meter,
            throttle,
            stop,
        )
        self._part_nbytes = LEAST_PART if upload is None else upload.part_nbytes
        self._left = part_count(outgoing.segment.nbytes, self._part_nbytes)
        self._lock = threading.Lock()

    def table(self) -> ItemTable:
        """The segment's items with their checksums, once all parts have passed."""
        return replace(self.outgoing.table, crc32c=self.checksums.result())

    def tasks(self) -> list[tuple[_Way, range]]:
        """The parts' numbers, in runs that one thread takes."""
        everything = range(self._left)
        if self._upload is not None and self._upload.in_order:
            return [(self, everything)]
        return [(self, range(number, number + 1)) for number in everything]

    def pass_on(self, numbers: range) -> None:
        try:
            for number in numbers:
                if not self._stop.is_set():
                    self._pass_one(number)
        except BaseException:
            self._stop.set()  # now: who waits for all parts hears of them in their order
            raise
        if self._stop.is_set():
            return  # not all of them may have been put
        with self._lock:
            self._left -= len(numbers)
            is_last = not self._left
        if is_last and self._upload is not None:
            faults.point("flush.parts")
            self._upload.finish()
        if is_last:
            faults.point("flush.segment")

    def _pass_one(self, number: int) -> None:
        start = number * self._part_nbytes
        nbytes = min(self._part_nbytes, self.outgoing.segment.nbytes - start)
        is_sent = False
        data = mapped(self._descriptor, start, nbytes) if nbytes else memoryview(b"")
        crc32c = self.checksums.add(start, data)
        if self._upload is not None:
            self._throttle.wait(nbytes, self._stop)
            if self._stop.is_set():
                return
            is_sent = self._upload.put_part(number, data, crc32c)
            if not is_sent:
                self._throttle.give_back(nbytes)
        self._meter.count(nbytes, is_sent=is_sent)
        faults.point("flush.part")
