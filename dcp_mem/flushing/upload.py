"""The bytes of a node's segments on their way to storage.

Parts of all segments are in flight at once. A part is mapped, hashed, handed to the route as it
lies in memory, and unmapped: nothing is copied, and no more is mapped than is in flight.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from dcp_mem.common import faults
from dcp_mem.common.values import Segment
from dcp_mem.errors import SegmentCorrupt
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import mapped
from dcp_mem.storage import LEAST_PART, Storage, Upload, part_count

_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 32


@dataclass(frozen=True, slots=True)
class SegmentUpload:
    """A segment that is to be on storage.

    Attributes:
        table: Its items, with checksums if they have been made: then nothing else is put.
        key: On storage.
        is_stored: Whether storage has it whole already; then it is only read for its checksums.
    """

    segment: Segment
    table: ItemTable
    key: str
    is_stored: bool


def parts_at_once() -> int:
    """Return how many parts a node has in flight."""
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, 2 * (os.cpu_count() or 1)))


def upload_all(
    directory: str,
    outgoing: Sequence[SegmentUpload],
    storage: Storage,
    meter: Meter,
    throttle: Throttle,
) -> dict[str, ItemTable]:
    """Upload the segments of a directory that storage lacks, and read all of them for checksums.

    1. Lease and open every segment, and begin its upload.
    2. Take the parts of all segments through a pool of threads; the first failure stops all.
    3. Finish each segment's upload with its last part.

    Args:
        directory: The checkpoint's, in memory.
        outgoing: The segments.
        storage: Where to.
        meter: Counts the parts.
        throttle: Lets the parts through.

    Returns:
        The segments' items with checksums, by file.

    Raises:
        StorageUnavailable, StorageRefused: Parts that were put may stay; the next attempt goes on
            with them.
        SegmentCorrupt: Memory lacks bytes of a segment, or has others than were saved.
    """
    stop = threading.Event()
    with ExitStack() as resources:
        opened = [
            resources.enter_context(_opened(directory, one, storage, meter, throttle, stop))
            for one in outgoing
        ]
        tasks = [task for segment in opened for task in segment.tasks()]
        meter.expect(
            sum(one.segment.nbytes for one in outgoing), sum(len(numbers) for _, numbers in tasks)
        )
        # Not `in_parallel`: that works only a few items ahead, and one slow part would hold up all.
        with ThreadPoolExecutor(parts_at_once(), thread_name_prefix="dcp_mem-upload") as pool:
            try:
                for _ in pool.map(lambda task: task[0].put_parts(task[1]), tasks):
                    pass
            except BaseException:
                stop.set()
                raise
        return {one.outgoing.segment.file: one.table() for one in opened}


@contextmanager
def _opened(
    directory: str,
    outgoing: SegmentUpload,
    storage: Storage,
    meter: Meter,
    throttle: Throttle,
    stop: threading.Event,
) -> Iterator[_OpenedSegment]:
    segment = outgoing.segment
    with _leased(directory, segment) as descriptor:
        upload = None if outgoing.is_stored else storage.upload(outgoing.key, segment.nbytes)
        try:
            yield _OpenedSegment(
                os.path.basename(directory),
                outgoing,
                descriptor,
                upload,
                meter=meter,
                throttle=throttle,
                stop=stop,
            )
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
        size = os.fstat(descriptor).st_size
        # Reading a mapping beyond the end of its file would be SIGBUS.
        if size < segment.nbytes:
            raise SegmentCorrupt(
                name, segment.rank, "memory", f"ends at {size} of {segment.nbytes} bytes"
            )
        yield descriptor
    finally:
        end_lease(descriptor)
        os.close(descriptor)


class _OpenedSegment:
    """A segment in flight: its open file, its upload, and which parts are left."""

    def __init__(
        self,
        name: str,
        outgoing: SegmentUpload,
        descriptor: int,
        upload: Upload | None,
        *,
        meter: Meter,
        throttle: Throttle,
        stop: threading.Event,
    ) -> None:
        self._name, self.outgoing = name, outgoing
        table = outgoing.table
        self._known = table.crc32c if len(table.crc32c) else None
        self.checksums = BlockChecksums(blocks_of(table.offsets, table.lengths), self._known)
        self._descriptor, self._upload = descriptor, upload
        self._meter, self._throttle, self._stop = meter, throttle, stop
        self._part_nbytes = LEAST_PART if upload is None else upload.part_nbytes
        self._left = part_count(outgoing.segment.nbytes, self._part_nbytes)
        self._lock = threading.Lock()

    def table(self) -> ItemTable:
        """Return the segment's items with their checksums, once all parts have been read."""
        found = self.checksums.result()
        if self._known is not None and not np.array_equal(found, self._known):
            raise self._changed()
        return replace(self.outgoing.table, crc32c=found)

    def _changed(self) -> SegmentCorrupt:
        segment, why = self.outgoing.segment, "has changed since it was saved"
        return SegmentCorrupt(self._name, segment.rank, "memory", f"{segment.file} {why}")

    def tasks(self) -> list[tuple[_OpenedSegment, range]]:
        """Return the numbers of the parts, in runs that one thread takes."""
        everything = range(self._left)
        if self._upload is not None and self._upload.in_order:
            return [(self, everything)]
        return [(self, range(number, number + 1)) for number in everything]

    def put_parts(self, numbers: range) -> None:
        """Put these parts, and finish the upload if they are the last ones."""
        try:
            for number in numbers:
                if not self._stop.is_set():
                    self._put_part(number)
        except BaseException:
            # Set here: the caller of the pool sees failures only in the order of the parts.
            self._stop.set()
            raise
        if self._stop.is_set():
            return  # parts may be missing
        with self._lock:
            self._left -= len(numbers)
            is_last = not self._left
        if is_last and self._upload is not None:
            self.table()
            faults.point("flush.parts")
            self._upload.finish()
        if is_last:
            faults.point("flush.segment")

    def _put_part(self, number: int) -> None:
        start = number * self._part_nbytes
        nbytes = min(self._part_nbytes, self.outgoing.segment.nbytes - start)
        is_sent = False
        data = mapped(self._descriptor, start, nbytes) if nbytes else memoryview(b"")
        crc32c = self.checksums.add(start, data)
        if self.checksums.is_wrong:
            raise self._changed()
        if self._upload is not None:
            self._throttle.wait(nbytes, self._stop)
            if self._stop.is_set():
                return
            is_sent = self._upload.put_part(number, data, crc32c)
            if not is_sent:
                self._throttle.give_back(nbytes)
        self._meter.count(nbytes, is_sent=is_sent)
        faults.point("flush.part")
