"""Copies and parity that begin as those of an earlier checkpoint (ADR 55).

Parity is an XOR, and a copy is the parity of one segment. So a receiver that begins with its
earlier file needs only old XOR new of each sender, where that isn't zero:

    receiver -> sender   the offer: which checkpoint's file it has, and where the sender's parts
                         ended then
    sender -> receiver   the vote: whether it has its own segment of that checkpoint
    receiver -> sender   the verdict, once all senders have voted
    sender -> receiver   a note on which pages have changed, then old XOR new of these
    sender -> receiver   of parity: what its parts add to the CRC32C of each block

A copy ends with the checksums of the segment's items, as every copy does. CRC32C is linear, so the
checksums of the parts give those of parity. Where the file has others, its old bytes or a sender's
weren't what they had been, and all is sent in full.

Where a sender's segment has the same file in both checkpoints (frozen tensors), the receiver gives
its earlier copy one more name, and nothing else follows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import IncomingChunk, OutgoingChunk
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.checksums import BLOCK, BlockChecksums, Blocks, Crcs, checksum, combined
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import fill, is_same
from dcp_mem.policy.parity import Stripe
from dcp_mem.replicating.plan import FilePart, FilePlan
from dcp_mem.replicating.task import SMALL_CHUNK, newest_replicated

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.bool_]
Read = Callable[[int, int], memoryview]
PAGE = 4096
"""Bytes: what has changed is sent in such pages."""
_COMPARED = 64 * PAGE
"""Bytes that are compared with one call."""
_LEAST_GAP = 8
"""Pages: a shorter unchanged run costs more apart than it saves."""
_SAMPLES = 16
"""Pages of each part that are compared before anything is sent."""


class Vote(IntEnum):
    """What a sender says to an offer."""

    CANNOT = 0
    CAN = 1
    GAINS = 2
    SHARES = 3  # its segment is the same file in both checkpoints


class Offer:
    """The message in which a receiver names the checkpoint whose file it would begin with. It is
    filled in on the sender as it arrives; zeros: there is none.
    """

    def __init__(self, count: int) -> None:
        self.message = bytearray(names.SAVE_ID_NBYTES + 8 * count)
        self._stops = np.frombuffer(self.message, "<i8", offset=names.SAVE_ID_NBYTES)

    def fill(self, save_id: str, stops: Sequence[int]) -> None:
        """Name a checkpoint, and where each part of the sender ended in its segment, in bytes."""
        self.message[: names.SAVE_ID_NBYTES] = save_id.encode()
        self._stops[:] = stops

    @property
    def save_id(self) -> str:
        return self.message[: names.SAVE_ID_NBYTES].rstrip(b"\0").decode(errors="replace")

    @property
    def stops(self) -> list[int]:
        """Where each part of the sender ended in its segment, in bytes."""
        found: list[int] = self._stops.tolist()
        return found


class EarlierFile:
    """A file of an earlier checkpoint on this node, kept from being recycled until `close`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = open_leased(path)
        self._facts = os.fstat(self._descriptor)

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with bytes from `start` on; a file that was cut off is an EOFError."""
        fill(self._descriptor, [memory], start)

    def close(self) -> None:
        end_lease(self._descriptor)
        os.close(self._descriptor)


def begins_as_earlier(plan: FilePlan) -> bool:
    """Return whether ranks decide together what a file is made from: copies, and parity."""
    is_of_others = bool(plan.parts) and plan.receiver not in plan.senders
    return is_of_others and (plan.stripe is not None or plan.is_copy)


# -- the sender --------------------------------------------------------------------------------


class EarlierSegment(EarlierFile):
    def is_at(self, path: str) -> bool:
        """Return whether a segment of the new checkpoint is the same file."""
        return os.path.samestat(os.stat(path), self._facts)

    def vote(self, part: FilePart, stop: int, read: Read) -> Vote:
        """Return what this rank says to an offer, for a part that ended elsewhere before."""
        if not part.start <= stop <= self._facts.st_size:
            return Vote.CANNOT
        both, old = min(part.stop, stop), memoryview(bytearray(PAGE))
        step = max((both - part.start) // _SAMPLES, PAGE)
        for start in range(part.start, both - PAGE + 1, step):
            self.read_into(old, start)
            if old == read(start, start + PAGE):
                return Vote.GAINS
        return Vote.CAN

    def changed(self, part: FilePart, stop: int, read: Read, go_on: Callable[[], None]) -> Pages:
        """Return which pages of a part have changed, or lie before a page that has, nearby."""
        found, both = np.ones(_page_count(part, stop), np.bool_), min(part.stop, stop)
        scratch = np.empty(_COMPARED, np.uint8)  # within the processor's cache
        for low in range(part.start, both, _COMPARED):
            go_on()
            new = np.frombuffer(read(low, min(low + _COMPARED, both)), np.uint8)
            old, first = scratch[: len(new)], (low - part.start) // PAGE
            self.read_into(old.data, low)
            pages = found[first : first - (-len(new) // PAGE)]
            pages[:] = False
            if not is_same(old.ctypes.data, new.ctypes.data, len(new)):
                whole = len(new) // PAGE
                differs = old != new
                pages[:whole] = differs[: whole * PAGE].reshape(-1, PAGE).any(axis=1)
                pages[whole:] = differs[whole * PAGE :].any()
        found[(both - part.start) // PAGE :] |= part.stop != stop
        for first, last in _runs(~found):
            if last - first < _LEAST_GAP:
                found[first:last] = True
        return found

    def chunks(
        self, part: FilePart, stop: int, read: Read, pages: Pages
    ) -> Iterator[OutgoingChunk]:
        """Yield old XOR new of the changed pages of a part."""
        for extents in _chunks(part, stop, pages):
            data = np.zeros(sum(high - low for low, high in extents), np.uint8)
            place = 0
            for low, high in extents:
                piece = data[place : place + high - low]
                place += high - low
                if low < stop:
                    self.read_into(piece[: stop - low].data, low)
                if low < part.stop:
                    new = np.frombuffer(read(low, min(high, part.stop)), np.uint8)
                    piece[: len(new)] ^= new
            yield OutgoingChunk(data.data, partial(checksum, data.data))


def _page_count(part: FilePart, stop: int) -> int:
    return -(-(max(part.stop, stop) - part.start) // PAGE)


def note_nbytes(parts: Sequence[FilePart], stops: Sequence[int]) -> int:
    """Return the bytes of the note on which pages of some parts come: a bit for each page."""
    return sum(-(-_page_count(*one) // 8) for one in zip(parts, stops, strict=True))


def _runs(pages: Pages) -> Iterator[tuple[int, int]]:
    """Yield first and last number, the latter not included, of each run of pages."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], pages, [False]]))).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _chunks(part: FilePart, stop: int, pages: Pages) -> Iterator[list[tuple[int, int]]]:
    """Yield the extents of changed pages in a part, as many at a time as a chunk has."""
    end, chunk, left = max(part.stop, stop), list[tuple[int, int]](), SMALL_CHUNK
    for first, last in _runs(pages):
        low, high = part.start + first * PAGE, min(part.start + last * PAGE, end)
        while low < high:
            cut = min(high, low + left)
            chunk.append((low, cut))
            low, left = cut, left - (cut - low)
            if not left:
                yield chunk
                chunk, left = [], SMALL_CHUNK
    if chunk:
        yield chunk


def sums_of(parts: Sequence[FilePart], reads: Sequence[Read], nbytes: int) -> Crcs:
    """Return what parts add to the CRC32C of each block of the parity."""
    sums = np.zeros(-(-nbytes // BLOCK), "<u4")
    for part, read in zip(parts, reads, strict=True):
        stop = part.place + part.stop - part.start
        edges = [part.place, *range((part.place // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
        starts, ends = np.array(edges[:-1]), np.array(edges[1:])
        crcs = BlockChecksums(Blocks(starts, ends - starts, np.arange(len(edges))))
        for low in range(part.start, part.stop, SMALL_CHUNK):
            high = min(low + SMALL_CHUNK, part.stop)
            crcs.add(part.place + low - part.start, read(low, high))
        found = zip(starts.tolist(), ends.tolist(), crcs.result().tolist(), strict=True)
        for start, end, crc in found:
            block = start // BLOCK
            block_start, block_end = block * BLOCK, min((block + 1) * BLOCK, nbytes)
            sums[block] ^= _between_zeros(
                crc, start - block_start, end - start, block_end - end
            ) ^ _zeros_crc(block_end - block_start)
    return sums


def _between_zeros(crc: int, before: int, nbytes: int, behind: int) -> int:
    """Return the CRC32C of bytes with zeros before and behind them, from that of the bytes."""
    if before:
        crc = combined(_zeros_crc(before), crc, nbytes)
    return combined(crc, _zeros_crc(behind), behind) if behind else crc


@lru_cache(maxsize=64)
def _zeros_crc(nbytes: int) -> int:
    return checksum(bytes(nbytes))


# -- the receiver ------------------------------------------------------------------------------


@value_class(kw_only=True)
class Earlier:
    """What a receiver may begin with: a file of an earlier checkpoint on this node."""

    local: LocalCheckpoint
    file: EarlierFile
    stops: Sequence[int]  # where each part of the plan ended in its segment then
    nbytes: int  # of the file that the new one begins with


def earlier_of(memory: JobMemory, plan: FilePlan, manifest: Manifest) -> Earlier | None:
    """Return the same copy, or parity, of the newest replicated checkpoint that lies here."""
    local = newest_replicated(memory, manifest)
    found = None if local is None else _same_file(local, plan)
    if local is None or found is None:
        return None
    name, stops = found
    try:
        file = EarlierFile(local.segment_path(name))
    except OSError:
        return None
    nbytes = plan.nbytes if plan.stripe is not None else stops[0]
    return Earlier(local=local, file=file, stops=stops, nbytes=nbytes)


def _same_file(local: LocalCheckpoint, plan: FilePlan) -> tuple[str, Sequence[int]] | None:
    """Return the name of a plan's file in another checkpoint, and where each part ended there."""
    if plan.stripe is None:
        try:
            segment = local.manifest.segments.numbered(names.rank_of(plan.file))
        except ValueError:
            return None
        return segment.file, [min(segment.nbytes, plan.nbytes)]
    for file, record in local.stripes().items():
        if _beginnings(record.stripe) == _beginnings(plan.stripe):
            return file, [share.stop for share in record.stripe.shares]
    return None


def _beginnings(stripe: Stripe) -> object:
    """Return all of a stripe but where its shares end."""
    shares = [(share.rank, share.start, share.place) for share in stripe.shares]
    return stripe.keeper, stripe.nbytes, shares


class Deciding:
    """Has the threads that receive a file from its senders decide what it begins as."""

    def __init__(self, plan: FilePlan, earlier: Earlier | None, seconds: float) -> None:
        """Describe the file; each thread waits for the others for so many seconds."""
        self.is_reused = False
        self.earlier = earlier
        self._plan, self._seconds = plan, seconds
        self._votes: list[int] = []
        self._sums: list[Crcs] = []
        self._memory = memoryview(b"")
        self._barrier = threading.Barrier(len(plan.senders), self._decide)

    def hear(self, channel: Channel, sender: int) -> int:
        """Make a sender the offer, and return its vote."""
        offer = Offer(len(self._plan.parts_from(sender)))
        if self.earlier is not None:
            offer.fill(self.earlier.local.manifest.save_id, self._stops_of(sender))
        channel.send(offer.message).wait()
        vote = bytearray(1)
        channel.receive(vote).wait()
        self._votes += vote
        return vote[0]

    def _stops_of(self, sender: int) -> list[int]:
        assert self.earlier is not None
        parts = zip(self._plan.parts, self.earlier.stops, strict=True)
        return [stop for part, stop in parts if part.sender == sender]

    def settle(self, channel: Channel, memory: memoryview) -> None:
        """Wait for all votes, and tell a sender the verdict; fill the new file with the earlier
        one, or parity with zeros.
        """
        self._memory = memory
        try:
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise DcpMemError("another rank doesn't send its share of this parity") from None
        channel.send(bytearray([self.is_reused])).wait()

    def _decide(self) -> None:
        """Called by the last thread, while the others wait."""
        gains = Vote.CANNOT not in self._votes and Vote.GAINS in self._votes
        if self.earlier is not None and gains:
            nbytes = self.earlier.nbytes
            try:
                self.earlier.file.read_into(self._memory[:nbytes], 0)
                np.frombuffer(self._memory, np.uint8)[nbytes:] = 0
                self.is_reused = True
                faults.point("replicate.reused")
            except (OSError, EOFError) as error:
                log.warning("what lies here of %s isn't used: %s", self._plan.file, error)
        if not (self.is_reused or self._plan.is_copy):
            np.frombuffer(self._memory, np.uint8)[:] = 0

    def chunks(
        self, sender: int, channel: Channel, add: Callable[[int, memoryview], None]
    ) -> Iterator[IncomingChunk]:
        """Yield what `EarlierSegment.chunks` and, of parity, `sums_of` send, after a note; it is
        added by XOR.
        """
        parts, stops = self._plan.parts_from(sender), self._stops_of(sender)
        note, read = bytearray(note_nbytes(parts, stops)), 0
        if note:
            channel.receive(note).wait()
        for part, stop in zip(parts, stops, strict=True):
            count = _page_count(part, stop)
            bits = np.frombuffer(note, np.uint8, -(-count // 8), read)
            read += len(bits)
            for extents in _chunks(part, stop, np.unpackbits(bits, count=count).astype(np.bool_)):
                data = memoryview(bytearray(sum(high - low for low, high in extents)))
                accept = partial(_add, add, data, extents, part.place - part.start)
                yield IncomingChunk(data, partial(checksum, data), accept)
        if self._plan.stripe is not None:
            sums = bytearray(4 * -(-self._plan.nbytes // BLOCK))
            accept = partial(self._sums.append, np.frombuffer(sums, "<u4"))
            yield IncomingChunk(sums, partial(checksum, memoryview(sums)), accept)

    def expected(self) -> Crcs:
        """Return the CRC32C of each block of the XOR of what all senders have."""
        nbytes = self._plan.nbytes
        zeros = [_zeros_crc(min(BLOCK, nbytes - start)) for start in range(0, nbytes, BLOCK)]
        found: Crcs = np.bitwise_xor.reduce(self._sums, axis=0) ^ np.array(zeros, "<u4")
        return found

    def fail(self) -> None:
        """Have the other threads fail as well, which wait for this one."""
        self._barrier.abort()

    def close(self) -> None:
        """Let the earlier file be recycled."""
        if self.earlier is not None:
            self.earlier.file.close()
            self.earlier = None


def _add(
    add: Callable[[int, memoryview], None],
    data: memoryview,
    extents: Sequence[tuple[int, int]],
    shift: int,
) -> None:
    place = 0
    for low, high in extents:
        add(low + shift, data[place : place + high - low])
        place += high - low
