"""The bytes of a node's segments on their way to storage.

Parts of all segments are in flight at once. A part is mapped, hashed, handed to the route as it
lies in memory, and unmapped: nothing is copied, and no more is mapped than is in flight.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_daemons
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.reuse import StoredSegment
from dcp_mem.format.checksums import HASH_NBYTES, BlockChecksums, blocks_of, hasher
from dcp_mem.format.manifest import ItemTable, StoredParts
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import mapped
from dcp_mem.storage import LEAST_PART, Copies, Storage, Upload, part_count

T = TypeVar("T")

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
    2. Have storage copy segments of which nothing has changed, where it copies all or nothing.
    3. Put the parts of all others, in several threads; the first failure stops all. Parts that
       storage has in an earlier checkpoint are copied there.
    4. Finish each segment's upload with its last part.
    """
    stop = threading.Event()
    with ExitStack() as resources:
        opened = [
            _OpenedSegment(directory, one, storage, resources, meter, throttle, stop)
            for one in outgoing
        ]
        parts = sum(len(one.numbers) for one in opened)
        meter.expect(sum(one.segment.nbytes for one in outgoing), parts)
        wholes = [one for one in opened if one.copies is Copies.WHOLE]
        # The tail changes most often: then nothing else is read twice.
        _each(lambda one: one.compare(one.numbers[-1]), wholes)
        wholes = [one for one in wholes if one.copies is Copies.WHOLE]
        compared = [(one, number) for one in wholes for number in one.numbers[:-1]]
        _each(lambda task: task[0].compare(task[1]), compared)
        _each(_OpenedSegment.copy_whole, wholes)
        tasks = [task for one in opened for task in one.tasks()]
        _each(lambda task: task[0].put_parts(task[1]), tasks)
        return {one.outgoing.segment.file: one.uploaded() for one in opened}


def _each(act: Callable[[T], None], tasks: Sequence[T]) -> None:
    # Not `in_parallel`: that works only a few items ahead, and one slow part would hold up all.
    in_daemons(act, tasks, at_once=parts_at_once(), name="dcp_mem-upload")


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
    """A segment in flight: its open file, its upload, and which parts are left.

    `resources`: closes both.
    """

    def __init__(
        self,
        directory: str,
        outgoing: SegmentUpload,
        storage: Storage,
        resources: ExitStack,
        meter: Meter,
        throttle: Throttle,
        stop: threading.Event,
    ) -> None:
        segment, table, stored = outgoing.segment, outgoing.table, outgoing.stored
        self._name, self.outgoing, self._storage = os.path.basename(directory), outgoing, storage
        self._meter, self._throttle, self._stop = meter, throttle, stop
        self._known = table.crc32c if len(table.crc32c) else None
        self.checksums = BlockChecksums(blocks_of(table.offsets, table.lengths), self._known)
        self._descriptor = resources.enter_context(_leased(directory, segment))
        self._upload: Upload | None = None
        self._part_nbytes = LEAST_PART
        if not outgoing.is_stored:
            source = None if stored is None else stored.source
            self._upload = storage.upload(outgoing.key, segment.nbytes, source)
            resources.callback(self._upload.close)
            self._part_nbytes = self._upload.part_nbytes
        self.copies = _copies(outgoing, self._upload)
        self._has_copied = False
        self.numbers = range(part_count(segment.nbytes, self._part_nbytes))
        self._left = len(self.numbers)
        self._lock = threading.Lock()
        self._hashes, self._crcs = [b""] * self._left, [0] * self._left

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
            hashes=b"".join(one or bytes(HASH_NBYTES) for one in self._hashes),
            etag=etag,
            checked=self._checked(),
        )
        return Uploaded(self.table(), parts)

    def _checked(self) -> float:
        """Return when all bytes of the segment, as storage has it now, were last known as right."""
        stored, upload = self.outgoing.stored, self._upload
        if stored is None or upload is None or not self._has_copied or upload.verifies_copies:
            return time.time()
        return stored.parts.checked if stored.is_trusted else time.time()

    def _changed(self) -> SegmentCorrupt:
        segment, why = self.outgoing.segment, "has changed since it was saved"
        return SegmentCorrupt(self._name, segment.rank, "memory", f"{segment.file} {why}")

    def compare(self, number: int) -> None:
        """See whether a part has changed, where storage copies all of a segment or nothing."""
        if self.copies is Copies.WHOLE:
            data = self._read(number)
            if not self._is_stored(number, len(data)):
                self.copies = Copies.NOTHING

    def copy_whole(self) -> None:
        """Have storage copy all of the segment, if nothing of it has changed."""
        if self.copies is Copies.WHOLE and self._upload is not None:
            self.table()
            if self._is_copied(self._upload.copy_whole, self.outgoing.segment.nbytes):
                self._left = 0
                faults.point("reuse.whole")
                faults.point("flush.segment")

    def tasks(self) -> list[tuple[_OpenedSegment, range]]:
        """Return the numbers of the parts that are left, in runs that one thread takes."""
        if not self._left:
            return []
        if self._upload is not None and self._upload.in_order:
            return [(self, self.numbers)]
        return [(self, range(number, number + 1)) for number in self.numbers]

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
        data, upload = self._read(number), self._upload
        crc32c, nbytes = self._crcs[number], len(data)
        is_same = self.copies is Copies.PARTS and self._is_stored(number, nbytes)
        if upload is None:
            self._meter.count(nbytes, is_sent=False)
        elif is_same and self._is_copied(lambda: upload.copy_part(number, crc32c), nbytes):
            faults.point("reuse.part")
        else:
            self._send(upload, number, data, crc32c)
        faults.point("flush.part")

    def _read(self, number: int) -> memoryview:
        """Map a part, and compare it with its checksums; hash it, where a copy goes by that."""
        data, stored = self._mapped(number), self.outgoing.stored
        # Where there is a source, most parts have either changed, which their CRC32C tells, or
        # needn't be sent: only the latter are hashed.
        hashed = hasher() if self.outgoing.is_hashed and stored is None else None
        crc32c = self._crcs[number] = self.checksums.add(number * self._part_nbytes, data, hashed)
        if self.checksums.is_wrong:
            raise self._changed()
        if stored is not None and stored.may_have(number, crc32c):
            hashed = hasher()
            hashed.update(data)
        self._hashes[number] = b"" if hashed is None else hashed.digest()
        return data

    def _is_stored(self, number: int, nbytes: int) -> bool:
        """Return whether a part that was read is in the earlier checkpoint."""
        stored, upload, digest = self.outgoing.stored, self._upload, self._hashes[number]
        if stored is None or upload is None or not stored.has(number, digest, nbytes):
            return False
        if upload.verifies_copies or stored.is_trusted:
            return True
        return stored.still_has(self._storage, number, digest)

    def _is_copied(self, copy: Callable[[], bool], nbytes: int) -> bool:
        """Return whether storage has copied; if not, it isn't asked again for this segment."""
        try:
            is_copied = copy()
        except DcpMemError as error:
            log.info("%s can't copy, so bytes are sent: %s", self._storage.url, error)
            is_copied = False
        if is_copied:
            self._has_copied = True
            self._meter.count(nbytes, is_sent=False, is_reused=True)
        else:
            self.copies = Copies.NOTHING
        return is_copied

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


def _copies(outgoing: SegmentUpload, upload: Upload | None) -> Copies:
    """Return what storage may copy from the earlier checkpoint: the parts must be cut alike."""
    stored = outgoing.stored
    if stored is None or upload is None or stored.parts.part_nbytes != upload.part_nbytes:
        return Copies.NOTHING
    is_as_long = stored.nbytes == outgoing.segment.nbytes
    return Copies.NOTHING if upload.copies is Copies.WHOLE and not is_as_long else upload.copies
