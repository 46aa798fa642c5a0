"""Bytes of a copy that its receiver has already, from an earlier copy, and that aren't sent.

The receiver copies them from the earlier copy (ADR 27). Both ranks cut a segment
into the same chunks of whole blocks, and agree block by block:

    receiver -> sender   once: the blocks that an earlier copy has at the same places, and their
                         CRC32C
    sender -> receiver   per chunk: which blocks aren't sent, and the hash of these stretches

Only blocks with equal CRC32C are hashed: where everything changes, nothing is.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_mem.comm.transfer import CHUNK, Reduced, Refilled
from dcp_mem.common import faults
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format import names
from dcp_mem.format.checksums import HASH_NBYTES, Blocks, Crcs, blocks_of, hasher
from dcp_mem.format.manifest import ItemTable, Manifest
from dcp_mem.memory.checkpoint import checksums_of
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import fill
from dcp_mem.replicating.task import newest_replicated

Mask = npt.NDArray[np.bool_]
_SHORT = 32 << 10
"""Bytes: a shorter stretch of unchanged blocks costs more as a message less than as bytes more."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A chunk of a segment: bytes [start, stop), with the blocks [first, last)."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def note_nbytes(self) -> int:
        """Bytes of the note on the chunk: a bit for each block, and a hash; 0 without blocks."""
        count = self.last - self.first
        return (count + 7) // 8 + HASH_NBYTES if count else 0


def cuts_of(blocks: Blocks, nbytes: int) -> list[Cut]:
    """Return the chunks of a segment: of whole blocks, and of `CHUNK` bytes at most."""
    starts, cuts, start, first = blocks.offsets.tolist(), list[Cut](), 0, 0
    while nbytes - start > CHUNK:
        last = bisect_right(starts, start + CHUNK) - 1
        if last >= first and starts[last] > start:
            stop = starts[last]
        else:  # nothing begins between `start` and the end of the chunk
            stop, last = start + CHUNK, last + 1
        cuts.append(Cut(start, stop, first, last))
        start, first = stop, last
    return [*cuts, Cut(start, nbytes, first, len(starts))] if nbytes else []


class Told:
    """The message in which a receiver lists the blocks that it has, and their CRC32C.

    `message`: as it crosses the network; the sender has it filled in.
    """

    def __init__(self, count: int) -> None:
        self.message = bytearray(5 * count)
        self._has = np.frombuffer(self.message, np.bool_, count)
        self._crcs = np.frombuffer(self.message, "<u1", 4 * count, count).view("<u4")

    @property
    def is_any(self) -> bool:
        """Whether the receiver has any block."""
        return bool(self._has.any())

    def tell(self, blocks: Blocks, earlier: Blocks, crcs: Crcs) -> None:
        """Note the blocks that lie in an earlier segment where they lie in this one."""
        count = min(len(self._has), len(earlier.offsets), len(crcs))
        self._has[:count] = (blocks.offsets[:count] == earlier.offsets[:count]) & (
            blocks.lengths[:count] == earlier.lengths[:count]
        )
        self._crcs[:count] = crcs[:count]

    def has(self, cut: Cut, crcs: Crcs) -> Mask:
        """Return which blocks of a chunk the receiver has with these checksums."""
        here = slice(cut.first, cut.last)
        is_had: Mask = self._has[here] & (self._crcs[here] == crcs)
        return is_had


def reduced(blocks: Blocks, cut: Cut, data: memoryview, has: Mask) -> Reduced:
    """Leave out of a chunk what its receiver has."""
    if not has.all():
        for first, last, start, stop in _stretches(blocks, cut, has):
            if has[first] and stop - start < _SHORT:
                has[first:last] = False
    pieces, digest = list[memoryview](), hasher()
    for first, _, start, stop in _stretches(blocks, cut, has):
        piece = data[start - cut.start : stop - cut.start]
        if has[first]:
            digest.update(piece)
        else:
            pieces.append(piece)
    return Reduced(bytearray(np.packbits(has).tobytes() + digest.digest()), pieces)


def _stretches(blocks: Blocks, cut: Cut, has: Mask) -> list[tuple[int, int, int, int]]:
    """Return runs of blocks that are all had, or all not: (first, last) in the chunk, and bytes.

    What lies behind a block goes with it.
    """
    changes = (np.flatnonzero(has[1:] != has[:-1]) + 1).tolist()
    places = [cut.start, *blocks.offsets[cut.first :][changes].tolist(), cut.stop]
    return [
        (first, last, start, stop)
        for (first, last), (start, stop) in zip(
            pairwise([0, *changes, len(has)]), pairwise(places), strict=True
        )
        if start < stop
    ]


class EarlierCopy:
    """An earlier copy of a rank's segment on this node, kept from being recycled until `close`."""

    def __init__(self, descriptor: int, table: ItemTable, blocks: Blocks) -> None:
        self._descriptor, self._blocks = descriptor, blocks
        self.told = Told(len(blocks.offsets))
        self.told.tell(blocks, blocks_of(table.offsets, table.lengths), table.crc32c)

    def refill(self, cut: Cut, data: memoryview, note: bytearray) -> Refilled:
        """Copy what isn't sent of a chunk."""
        bits = np.frombuffer(note, np.uint8, len(note) - HASH_NBYTES)
        has = np.unpackbits(bits, count=cut.last - cut.first).astype(np.bool_)
        pieces, digest, is_right = list[memoryview](), hasher(), True
        for first, _, start, stop in _stretches(self._blocks, cut, has):
            piece = data[start - cut.start : stop - cut.start]
            if not has[first]:
                pieces.append(piece)
            elif is_right:
                is_right = self._copy(piece, start)
                digest.update(piece)
        if has.any():
            faults.point("replicate.reused")
        return Refilled(pieces, is_right and digest.digest() == note[len(bits) :])

    def _copy(self, piece: memoryview, start: int) -> bool:
        try:
            fill(self._descriptor, [piece], start)
        except (OSError, EOFError):  # somebody has cut the file off
            return False
        return True

    def close(self) -> None:
        """Let the earlier copy be recycled."""
        end_lease(self._descriptor)
        os.close(self._descriptor)


FindEarlier = Callable[[Blocks], EarlierCopy | None]


def earlier_copy(
    memory: JobMemory, manifest: Manifest, file: str, blocks: Blocks
) -> EarlierCopy | None:
    """Return the copy of a rank's segment in the newest replicated checkpoint that lies here."""
    local = newest_replicated(memory, manifest)
    if local is None:
        return None
    found = names.segment_file(names.rank_of(file), local.manifest.save_id)
    try:
        descriptor = open_leased(local.segment_path(found))
    except OSError:
        return None
    try:
        return EarlierCopy(descriptor, checksums_of(local, found), blocks)
    except (OSError, ManifestInvalid):
        end_lease(descriptor)
        os.close(descriptor)
        return None
