"""Checksums of complete checkpoints, made behind training, in a thread of their own.

From then on a flipped bit is found: by loads, by the flush, and by replication. The thread runs in
the agent, or in a trainer where there is no agent.

It takes the cores and the caches of training. So after each checkpoint it rests, for many times as
long as that took, and goes on with the newest one: of checkpoints that are overtaken within moments
most get no checksums.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dcp_mem.common import faults, files
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon, let_caller_return
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError, ManifestInvalid
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.checksums import MOST_RUN, Blocks, Crcs, blocks_of, checksum, runs_of
from dcp_mem.format.manifest import ItemTable, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.checkpoint import LocalCheckpoint, checksums_of, has_checksums
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.views import fill

_NICENESS = 15
_REST = 20
"""The thread rests so many times as long as a checkpoint's checksums took."""
_PATIENCE = 10.0
"""Seconds that the end of the thread waits for checksums that are being made."""


class Gone(Exception):
    """The checkpoint has left memory, or nobody wants its checksums any more."""


class ChecksumThread:
    """Makes the checksums of the complete checkpoints of some jobs, newest first.

    All methods may be called from any thread.

    `look_seconds`: look for new checkpoints so often, besides when told; None: only when told.
    """

    def __init__(self, root: str, look_seconds: float | None = None) -> None:
        self._root, self._look_seconds = root, look_seconds
        self._jobs: dict[str, str] = {}
        self._tried: dict[str, set[str]] = {}
        self._catalog: tuple[str, Catalog] | None = None
        self._woken = threading.Event()
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_stopping = self._is_at_work = self._hurries = False
        self._rests_until: dict[str, float] = {}
        self._resting: set[str] = set()  # jobs of which there is more to do, after a rest

    def wake(self, job: str, on_nonfinite: str) -> None:
        """Have the checksums of a job made, now and whenever it has new checkpoints."""
        with self._guard:
            self._jobs[job] = on_nonfinite
            self._hurries = False
            self._woken.set()
            if self._thread is None and not self._is_stopping:
                self._thread = daemon(self._run, "dcp_mem-checksums")

    @property
    def is_busy(self) -> bool:
        """Whether checksums are being made, or will be after a rest."""
        is_due = self._woken.is_set() or bool(self._resting)
        return self._is_at_work or (is_due and not self._is_stopping)

    def hurry(self) -> None:
        """Don't rest before the next `wake`: training has ended."""
        self._hurries = True
        if self._resting:
            self._woken.set()

    def stop(self) -> None:
        """End the thread, after a while at most; what is left then stays without checksums."""
        deadline = time.monotonic() + _PATIENCE
        self.hurry()
        while self._thread is not None and self.is_busy and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._guard:
            self._is_stopping = True
            self._woken.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a thread has a niceness of its own on Linux
            if os.getpriority(os.PRIO_PROCESS, 0) < _NICENESS:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while not self._is_stopping:
            self._woken.wait(self._pause())
            let_caller_return()
            self._is_at_work = True
            self._woken.clear()
            for job, on_nonfinite in list(self._jobs.items()):
                self._try(job, on_nonfinite)
            self._is_at_work = False

    def _try(self, job: str, on_nonfinite: str) -> None:
        self._resting.discard(job)
        try:
            self._sum_up_job(job, on_nonfinite)
        except Exception:  # memory that has vanished, or a defect: the next checkpoint may do
            log.exception("checksums of %s can't be made", job)

    def _pause(self) -> float | None:
        """Return how long to wait for news, in seconds; None for as long as it takes."""
        waits = [self._rest_of(job) for job in self._resting]
        if self._look_seconds is not None:
            waits.append(self._look_seconds)
        return min(waits, default=None)

    def _rest_of(self, job: str) -> float:
        """Return for how many seconds from now on a job's checksums rest."""
        until = self._rests_until.get(job, 0.0)
        return 0.0 if self._hurries else max(0.0, until - time.monotonic())

    def _sum_up_job(self, job: str, on_nonfinite: str) -> None:
        """Make what is missing, newest checkpoint first; what has to wait is left for later."""
        if not os.path.isdir(os.path.join(self._root, job)):
            return
        memory = JobMemory(self._root, job)
        for checkpoint in memory.checkpoints():
            with contextlib.suppress(OSError, DcpMemError):  # memory may be full: it stays shared
                memory.copy_catalog(checkpoint)
        are_checked = on_nonfinite != "ignore"
        while not self._is_stopping:
            missing = self._missing(memory, are_checked=are_checked)
            if missing is None:
                return
            if self._rest_of(job) and not are_checked:
                self._resting.add(job)
                return
            checkpoint, segments = missing
            started = time.monotonic()
            for segment in segments:
                if not self._is_stopping:
                    self._sum_up(memory, checkpoint, segment, on_nonfinite)
            ended = time.monotonic()
            self._rests_until[job] = ended + _REST * (ended - started)

    def _missing(
        self, memory: JobMemory, *, are_checked: bool
    ) -> tuple[LocalCheckpoint, Sequence[Segment]] | None:
        """Return the newest checkpoint with segments of this node to look at, and these.

        `are_checked`: whether those with checksums have to be looked at as well, once.
        """
        checkpoints = memory.checkpoints()
        here = {checkpoint.manifest.save_id for checkpoint in checkpoints}
        tried = self._tried.setdefault(memory.job, set())
        tried -= {file for file in tried if names.save_id_of(file) not in here}
        for checkpoint in checkpoints:
            segments = [
                segment
                for segment in checkpoint.manifest.of_node(memory.node)
                if segment.file not in tried
                and (are_checked or not has_checksums(checkpoint, segment.file))
            ]
            if segments:
                return checkpoint, segments
        return None

    def _sum_up(
        self,
        memory: JobMemory,
        checkpoint: LocalCheckpoint,
        segment: Segment,
        on_nonfinite: str,
    ) -> None:
        try:
            catalog = self._catalog_of(checkpoint)
            table = items_of(catalog.layout(segment.rank), segment.tail)
            if self._carry_over(memory, checkpoint, segment, table):
                self._tried[memory.job].add(segment.file)
                return
            check = FiniteCheck(catalog, segment.rank) if on_nonfinite != "ignore" else None
            crcs = checksums_in_file(
                checkpoint.segment_path(segment.file),
                blocks_of(table.offsets, table.lengths),
                may_go_on=lambda: not self._is_stopping,
                look=_nothing if check is None else check.look,
            )
            faults.point("checksums.made")
            table = replace(table, crc32c=crcs)
            memory.add_checksums(checkpoint.manifest, {segment.file: table})
            if check is not None and check.found:
                log.warning("%s, rank %d: %s", checkpoint.name, segment.rank, check)
                if on_nonfinite == "reject":
                    memory.reject(checkpoint, str(check))
        except (Gone, FileNotFoundError):
            pass  # what has left memory isn't found again
        except (DcpMemError, OSError, EOFError) as error:
            log.warning("%s has no checksums in memory: %s", segment.file, error)
        # Whatever came of it, it is tried once: a checkpoint without checksums is a whole one.
        self._tried[memory.job].add(segment.file)

    def _carry_over(
        self, memory: JobMemory, checkpoint: LocalCheckpoint, segment: Segment, table: ItemTable
    ) -> bool:
        """Take the checksums of another checkpoint that shares the segment; False without one.

        What was looked at there need not be looked at again, unless it was rejected.
        """
        path = checkpoint.segment_path(segment.file)
        for other in memory.checkpoints() if os.stat(path).st_nlink > 1 else ():
            file = names.segment_file(segment.rank, other.manifest.save_id)
            if file == segment.file or file not in self._tried[memory.job] or other.rejected:
                continue
            with contextlib.suppress(FileNotFoundError, ManifestInvalid):
                known = checksums_of(other, file)
                is_same = os.path.samefile(path, other.segment_path(file))
                if is_same and known.has_items_of(table):
                    memory.add_checksums(checkpoint.manifest, {segment.file: known})
                    return True
        return False

    def _catalog_of(self, checkpoint: LocalCheckpoint) -> Catalog:
        key = checkpoint.manifest.catalog
        if self._catalog is None or self._catalog[0] != key:
            self._catalog = key, read_catalog(checkpoint.directory, key)
        return self._catalog[1]


def _nothing(low: int, data: memoryview) -> None:
    return


def checksums_in_file(
    path: str,
    blocks: Blocks,
    may_go_on: Callable[[], bool],
    look: Callable[[int, memoryview], None],
) -> Crcs:
    """Return the checksum of each block of a segment in memory.

    No lease is taken, which would keep the next save from recycling the slot. Instead the segment
    is looked for again after each read: while it has its name, nobody writes to it.

    `look`: is given bytes, and where they begin in the segment, while the cache has them.
    """
    found = np.zeros(len(blocks.offsets), "<u4")
    memory = memoryview(bytearray(MOST_RUN))
    starts, stops = blocks.offsets.tolist(), (blocks.offsets + blocks.lengths).tolist()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        inode = os.fstat(descriptor).st_ino
        for first, last in runs_of(blocks, np.flatnonzero(blocks.lengths)):
            low = starts[first]
            data = memory[: stops[last] - low]
            fill(descriptor, [data], low)
            for number in range(first, last + 1):
                found[number] = checksum(data[starts[number] - low : stops[number] - low])
            look(low, data)
            if not may_go_on() or not files.lies_at(path, inode):
                raise Gone(path)
    finally:
        os.close(descriptor)
    return found


# -- values that aren't finite: all bits of their exponents are set; without infinity that is NaN --

_BITS = {
    "torch.float64": ("<u8", 0x7FF0_0000_0000_0000),
    "torch.complex128": ("<u8", 0x7FF0_0000_0000_0000),
    "torch.float32": ("<u4", 0x7F80_0000),
    "torch.complex64": ("<u4", 0x7F80_0000),
    "torch.float16": ("<u2", 0x7C00),
    "torch.complex32": ("<u2", 0x7C00),
    "torch.bfloat16": ("<u2", 0x7F80),
    "torch.float8_e5m2": ("u1", 0x7C),
    "torch.float8_e4m3fn": ("u1", 0x7F),
    "torch.float8_e8m0fnu": ("u1", 0xFF),
}
"""By dtype: how to look at the bytes, and the bits that are all set where a value isn't finite."""


class FiniteCheck:
    """Counts values that aren't finite in the tensors of one segment.

    Tensors without a plain payload, and dtypes without a mask above, are left out.

    `found`: how many such values there are, by the tensor's name.
    """

    def __init__(self, catalog: Catalog, rank: int) -> None:
        self.found: Counter[str] = Counter()
        writer = np.flatnonzero(catalog.ranks == rank)
        rows = np.flatnonzero(catalog.writer == writer[0]) if len(writer) else writer
        layout, entries = catalog.layout(rank), catalog.entry_of_row()[rows]
        self._payloads: list[tuple[int, int, str, str, int]] = []
        for entry, number in zip(entries.tolist(), catalog.number[rows].tolist(), strict=True):
            properties = int(catalog.properties[entry])
            if properties < 0 or number >= len(layout) or layout.payload_offsets[number] < 0:
                continue
            kind, bits = _BITS.get(catalog.table[properties].dtype, ("", 0))
            start, nbytes = layout.payload_offsets[number], layout.payload_nbytes[number]
            if kind and nbytes:
                name = catalog.names[int(catalog.name[entry])]
                self._payloads.append((int(start), int(start + nbytes), name, kind, bits))
        self._payloads.sort()
        self._starts = [start for start, *_ in self._payloads]
        self._stops = [stop for _, stop, *_ in self._payloads]

    def look(self, low: int, data: memoryview) -> None:
        """Look at bytes of the segment; no value may be cut in two."""
        high = low + len(data)
        first, last = bisect_right(self._stops, low), bisect_left(self._starts, high)
        for start, stop, name, kind, bits in self._payloads[first:last]:
            values = np.frombuffer(data[max(start, low) - low : min(stop, high) - low], kind)
            count = int(np.count_nonzero((values & values.dtype.type(bits)) == bits))
            if count:
                self.found[name] += count

    def __str__(self) -> str:
        names = [f"{name} ({count})" for name, count in self.found.most_common(4)]
        more = f" and {len(self.found) - 4} more tensors" if len(self.found) > 4 else ""
        return f"values that aren't finite in {', '.join(names)}{more}"
