"""The bytes of a node's segments on their way to storage.

Parts of all segments are in flight at once. A part is mapped, hashed, handed to the route as it
lies in memory, and unmapped: nothing is copied, and no more is mapped than is in flight.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from dcp_mem.common import faults
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment
from dcp_mem.errors import SegmentCorrupt
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.reuse import SegmentCopies, StoredSegment
from dcp_mem.format.checksums import HASH_NBYTES, BlockChecksums, blocks_of, hasher
from dcp_mem.format.manifest import ItemTable, StoredParts
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import mapped
from dcp_mem.storage import LEAST_PART, Copies, Storage, Upload, part_count

_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 32


@value_class(kw_only=True)
class SegmentUpload:
    """A segment that is to be on storage."""

    segment: Segment
    table: ItemTable  # its items, with checksums if they have been made: then nothing else is put
    key: str
    is_stored: bool  # whether storage has it whole already; then it is only read for its checksums
    # whether to hash its parts, so that later checkpoints can be made from them
    is_hashed: bool = False
    stored: StoredSegment | None = None  # what unchanged parts are copied from; None: all are sent


@value_class
class Uploaded:
    """A segment that is on storage."""

    table: ItemTable
    parts: StoredParts | None  # for later checkpoints; None where nothing can be copied from it


def parts_at_once() -> int:
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, 2 * (os.cpu_count() or 1)))


def upload_all(
    directory: str,
    outgoing: Sequence[SegmentUpload],
    storage: Storage,
    meter: Meter,
    throttle: Throttle,
) -> dict[str, Uploaded]:
    """Upload the segments of a directory that storage lacks, and read all of them for checksums.

    1. Lease and open every segment, and begin its upload.
    2. Put the parts of all segments, in several threads; the first failure stops all. Parts that
       storage has in an earlier checkpoint are copied there.
    3. Finish each segment's upload with its last part.
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
        in_daemons(
            lambda task: task[0].put_parts(task[1]),
            tasks,
            at_once=parts_at_once(),
            name="dcp_mem-upload",
        )
        return {one.outgoing.segment.file: one.uploaded() for one in opened}


@contextmanager
def _opened(
    directory: str,
    outgoing: SegmentUpload,
    storage: Storage,
    meter: Meter,
    throttle: Throttle,
    stop: threading.Event,
) -> Iterator[_OpenedSegment]:
    nbytes, stored = outgoing.segment.nbytes, outgoing.stored
    with _leased(directory, outgoing.segment) as descriptor, ExitStack() as resources:
        upload = None
        if not outgoing.is_stored:
            upload = storage.upload(outgoing.key, nbytes, stored.source if stored else None)
            resources.callback(upload.close)
        yield _OpenedSegment(
            os.path.basename(directory),
            outgoing,
            descriptor,
            upload,
            copies=SegmentCopies(stored, upload, storage, nbytes),
            meter=meter,
            throttle=throttle,
            stop=stop,
        )


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
        copies: SegmentCopies,
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
        self._copies = copies
        self._hashes = [bytes(HASH_NBYTES)] * self._left
        self._crcs = [0] * self._left

    def table(self) -> ItemTable:
        """Return the segment's items with their checksums, once all parts have been read."""
        found = self.checksums.result()
        if self._known is not None and not np.array_equal(found, self._known):
            raise self._changed()
        return replace(self.outgoing.table, crc32c=found)

    def uploaded(self) -> Uploaded:
        """Return what is on storage, once the upload is finished."""
        etag = "" if self._upload is None else self._upload.etag()
        if not etag or not self.outgoing.is_hashed:
            return Uploaded(self.table(), None)
        parts = StoredParts(
            part_nbytes=self._part_nbytes,
            crc32c=tuple(self._crcs),
            hashes=b"".join(self._hashes),
            etag=etag,
            checked=self._copies.checked(),
        )
        return Uploaded(self.table(), parts)

    def _changed(self) -> SegmentCorrupt:
        segment, why = self.outgoing.segment, "has changed since it was saved"
        return SegmentCorrupt(self._name, segment.rank, "memory", f"{segment.file} {why}")

    def tasks(self) -> list[tuple[_OpenedSegment, range]]:
        """Return the numbers of the parts, in runs that one thread takes."""
        everything = range(self._left)
        if self._upload is not None and self._upload.in_order:
            return [(self, everything)]
        # What is copied as a whole or not at all begins with its tail, which changes most often:
        # then few parts are held back in vain.
        is_whole = self._upload is not None and self._upload.copies is Copies.WHOLE
        numbers = reversed(everything) if is_whole else everything
        return [(self, range(number, number + 1)) for number in numbers]

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
            self._complete(self._upload)
        if is_last:
            faults.point("flush.segment")

    def _complete(self, upload: Upload) -> None:
        """Finish the upload, or have all of the segment copied, if nothing of it has changed."""
        if self._copies.copy_whole():
            nbytes = self.outgoing.segment.nbytes
            self._meter.count(nbytes, is_sent=False, is_reused=True)
            return
        self._send_released(upload)
        if not self._stop.is_set():
            faults.point("flush.parts")
            upload.finish()

    def _put_part(self, number: int) -> None:
        data = self._mapped(number)
        # Where there is a source, most parts have either changed, which their CRC32C tells, or
        # needn't be sent: only the latter are hashed.
        is_first = self.outgoing.is_hashed and self.outgoing.stored is None
        hashed = hasher() if is_first else None
        crc32c = self._crcs[number] = self.checksums.add(number * self._part_nbytes, data, hashed)
        if self.checksums.is_wrong:
            raise self._changed()
        if hashed is None and self.outgoing.is_hashed and self._copies.may_be_same(number, crc32c):
            hashed = hasher()
            hashed.update(data)
        if hashed is not None:
            self._hashes[number] = hashed.digest()
        if self._upload is None:
            self._meter.count(len(data), is_sent=False)
        else:
            self._put_or_copy(self._upload, number, data, crc32c)
        faults.point("flush.part")

    def _put_or_copy(self, upload: Upload, number: int, data: memoryview, crc32c: int) -> None:
        is_copied = self._copies.take(number, crc32c, self._hashes[number])
        if is_copied:
            self._meter.count(len(data), is_sent=False, is_reused=True)
        elif is_copied is False:
            if upload.in_order:
                self._send_released(upload)
            self._send(upload, number, data, crc32c)
            self._send_released(upload, most=1)

    def _send_released(self, upload: Upload, most: int | None = None) -> None:
        """Send parts that were held back, as the segment as a whole has changed."""
        for number, crc32c in self._copies.released(most):
            self._send(upload, number, self._mapped(number), crc32c)

    def _send(self, upload: Upload, number: int, data: memoryview, crc32c: int) -> None:
        self._throttle.wait(len(data), self._stop)
        if self._stop.is_set():
            return
        is_sent = upload.put_part(number, data, crc32c)
        if not is_sent:
            self._throttle.give_back(len(data))
        self._meter.count(len(data), is_sent=is_sent)

    def _mapped(self, number: int) -> memoryview:
        start = number * self._part_nbytes
        nbytes = min(self._part_nbytes, self.outgoing.segment.nbytes - start)
        return mapped(self._descriptor, start, nbytes) if nbytes else memoryview(b"")
