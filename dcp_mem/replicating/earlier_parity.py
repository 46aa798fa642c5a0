"""Parity that is made from an earlier checkpoint's, and from what has changed since (ADR 38).

Parity is an XOR. So a keeper that begins with its earlier parity needs only the XOR of old and new
bytes of each sender, and of that only what isn't zero:

    keeper -> sender   the offer: which checkpoint's parity it has, and where the sender's shares
                       ended then
    sender -> keeper   the vote: whether it has its own segment of that checkpoint
    keeper -> sender   the verdict, once all senders have voted
    sender -> keeper   old XOR new, chunk by chunk, with a note before each: which pages aren't zero
    sender -> keeper   the CRC32C of what its shares add to each block of the parity

CRC32C is linear: the checksums of the shares give those of the parity. Where it has others, its old
bytes or a sender's weren't what they had been, and all is sent in full.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import IncomingChunk, OutgoingChunk, Reduced, Refilled
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError
from dcp_mem.format import names
from dcp_mem.format.checksums import BLOCK, BlockChecksums, Blocks, Crcs, checksum, combined
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease, open_leased
from dcp_mem.memory.views import fill
from dcp_mem.policy.parity import Stripe
from dcp_mem.replicating.plan import FilePart, FilePlan
from dcp_mem.replicating.task import SMALL_CHUNK, newest_replicated

Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.bool_]
Read = Callable[[int, int], memoryview]
PAGE = 4096
"""Bytes: what has changed is sent in such pages of a chunk."""
_SAMPLES = 16
"""Pages of each share that are compared before anything is sent."""


class Vote(IntEnum):
    """What a sender says to an offer."""

    CANNOT = 0
    CAN = 1
    GAINS = 2


class Offer:
    """The message in which a keeper names the parity that it would begin with.

    `message`: as it crosses the network; the sender has it filled in. Zeros: there is none.
    """

    def __init__(self, count: int) -> None:
        self.message = bytearray(names.SAVE_ID_NBYTES + 8 * count)
        self._stops = np.frombuffer(self.message, "<i8", offset=names.SAVE_ID_NBYTES)

    def fill(self, save_id: str, stops: Sequence[int]) -> None:
        """Name a checkpoint.

        `stops`: where each share of the sender ended in its segment, in bytes.
        """
        self.message[: names.SAVE_ID_NBYTES] = save_id.encode()
        self._stops[:] = stops

    @property
    def save_id(self) -> str:
        """The save id of the checkpoint; "" for none."""
        return self.message[: names.SAVE_ID_NBYTES].rstrip(b"\0").decode(errors="replace")

    @property
    def stops(self) -> list[int]:
        """Where each share of the sender ended in its segment, in bytes."""
        found: list[int] = self._stops.tolist()
        return found


# -- the sender --------------------------------------------------------------------------------


class EarlierSegment:
    """A segment of an earlier checkpoint on this node, kept from being recycled until `close`."""

    def __init__(self, path: str) -> None:
        """Open the segment.

        Raises OSError.
        """
        self._descriptor = open_leased(path)
        self._nbytes = os.fstat(self._descriptor).st_size

    def vote(self, part: FilePart, stop: int, read: Read) -> Vote:
        """Return what this rank says to an offer, for one of its shares.

        `read`: returns bytes of the segment as it is now.
        """
        if not part.start <= stop <= self._nbytes:
            return Vote.CANNOT
        both = min(part.stop, stop)
        step = max((both - part.start) // _SAMPLES, PAGE)
        for start in range(part.start, both - PAGE + 1, step):
            if not self.difference(start, start + PAGE, stop, read, part.stop).any():
                return Vote.GAINS
        return Vote.CAN

    def difference(self, start: int, stop: int, old_end: int, read: Read, new_end: int) -> Bytes:
        """Return old XOR new of bytes [start, stop), filled up with zeros to whole pages.

        `read`: returns bytes of the segment as it is now. Raises OSError, EOFError.
        """
        found = np.empty(-(-(stop - start) // PAGE) * PAGE, np.uint8)
        had = max(min(stop, old_end) - start, 0)
        found[had:] = 0
        if had:
            fill(self._descriptor, [found[:had].data], start)
        if start < new_end:
            new = np.frombuffer(read(start, min(stop, new_end)), np.uint8)
            np.bitwise_xor(found[: len(new)], new, out=found[: len(new)])
        return found

    def chunks(self, part: FilePart, stop: int, read: Read) -> Iterator[OutgoingChunk]:
        """Yield old XOR new of a share.

        `read`: returns bytes of the segment as it is now.
        """
        for low, high in _cuts(part, stop):
            found = self.difference(low, high, stop, read, part.stop)
            data = found[: high - low].data
            has_changed = _has_changed(found)
            crc = partial(checksum, data) if has_changed.any() else partial(_zeros_crc, len(data))
            yield OutgoingChunk(data, crc, partial(_reduced, found, has_changed, len(data)))

    def close(self) -> None:
        """Let the segment be recycled."""
        end_lease(self._descriptor)
        os.close(self._descriptor)


def _cuts(part: FilePart, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks of a share that ended elsewhere in the earlier checkpoint."""
    end = max(part.stop, stop)
    for low in range(part.start, end, SMALL_CHUNK):
        yield low, min(low + SMALL_CHUNK, end)


def _has_changed(difference: Bytes) -> Pages:
    """Return which pages of a difference aren't all zeros."""
    words = difference.view(np.uint64).reshape(-1, PAGE // 8)
    found: Pages = np.bitwise_or.reduce(words, axis=1) != 0
    return found


def _reduced(difference: Bytes, has_changed: Pages, nbytes: int) -> Reduced:
    note = bytearray(np.packbits(has_changed).tobytes())
    changed = difference.reshape(-1, PAGE)[has_changed]
    return Reduced(note, _sent(changed, has_changed, nbytes))


def _sent(changed: Bytes, has_changed: Pages, nbytes: int) -> list[Bytes]:
    """Return the changed pages as they are sent: without what fills up the last page of a chunk."""
    filled_up = len(has_changed) * PAGE - nbytes if has_changed[-1] else 0
    return [changed.reshape(-1)[: changed.size - filled_up]] if len(changed) else []


def sums_of(parts: Sequence[FilePart], reads: Sequence[Read], nbytes: int) -> Crcs:
    """Return what shares add to the CRC32C of each block of the parity.

    `reads`: for each of them, what returns the segment's bytes.
    """
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


def begins_as_earlier(plan: FilePlan) -> bool:
    """Return whether ranks decide together what a file is made from, as for parity."""
    return plan.stripe is not None and bool(plan.parts) and plan.receiver not in plan.senders


def vote(channel: Channel, own: Vote) -> bool:
    """Tell a keeper this rank's vote; return whether the file begins as the earlier parity."""
    channel.send(bytearray([own])).wait()
    verdict = bytearray(1)
    channel.receive(verdict).wait()
    return bool(verdict[0])


# -- the keeper --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EarlierParity:
    """An earlier checkpoint's parity on this node, kept from being recycled until `close`."""

    descriptor: int
    save_id: str
    stripe: Stripe

    def close(self) -> None:
        """Let the parity be recycled."""
        end_lease(self.descriptor)
        os.close(self.descriptor)


def earlier_parity(memory: JobMemory, plan: FilePlan, manifest: Manifest) -> EarlierParity | None:
    """Return the parity of the same shares in the newest replicated checkpoint that lies here."""
    assert plan.stripe is not None
    local = newest_replicated(memory, manifest)
    if local is None:
        return None
    for file, record in local.stripes().items():
        if _begin_alike(record.stripe, plan.stripe):
            try:
                descriptor = open_leased(local.segment_path(file))
            except OSError:
                return None
            return EarlierParity(descriptor, local.manifest.save_id, record.stripe)
    return None


def _begin_alike(one: Stripe, other: Stripe) -> bool:
    """Return whether stripes differ at most in where their shares end."""
    first, second = (
        [(share.rank, share.start, share.place) for share in stripe.shares]
        for stripe in (one, other)
    )
    return (one.keeper, one.nbytes, first) == (other.keeper, other.nbytes, second)


class Deciding:
    """Has the threads that receive from the senders of a stripe decide what it is made from.

    `is_reused`: the verdict: the parity begins as the earlier one.
    """

    def __init__(self, plan: FilePlan, earlier: EarlierParity | None, seconds: float) -> None:
        """Describe the stripe.

        `seconds`: how long a thread waits for the others.
        """
        self.is_reused = False
        self._plan, self._earlier, self._seconds = plan, earlier, seconds
        self._votes: list[int] = []
        self._sums: list[Crcs] = []
        self._memory = memoryview(b"")
        self._barrier = threading.Barrier(len(plan.senders), self._decide)

    def offer(self, sender: int) -> bytearray:
        """Return the offer to a sender."""
        assert self._plan.stripe is not None
        offer = Offer(len(self._plan.parts_from(sender)))
        if self._earlier is not None:
            offer.fill(self._earlier.save_id, self._stops_of(sender))
        return offer.message

    def _stops_of(self, sender: int) -> list[int]:
        """Return where a sender's shares ended in the earlier checkpoint."""
        assert self._earlier is not None
        shares = zip(self._plan.parts, self._earlier.stripe.shares, strict=True)
        return [share.stop for part, share in shares if part.sender == sender]

    def settle(self, channel: Channel, memory: memoryview) -> None:
        """Hear a sender's vote, wait for the others', and tell it the verdict.

        `memory`: of the parity; this fills it with the earlier one, or with zeros. Raises
        DcpMemError.
        """
        vote = bytearray(1)
        channel.receive(vote).wait()
        self._votes += vote
        self._memory = memory
        try:
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            raise DcpMemError("another rank doesn't send its share of this parity") from None
        channel.send(bytearray([self.is_reused])).wait()

    def _decide(self) -> None:
        """Called by the last thread, while the others wait."""
        gains = Vote.CANNOT not in self._votes and Vote.GAINS in self._votes
        if self._earlier is not None and gains:
            try:
                fill(self._earlier.descriptor, [self._memory], 0)
                self.is_reused = True
                faults.point("replicate.reused")
            except (OSError, EOFError) as error:
                log.warning("the earlier parity isn't used: %s", error)
        if not self.is_reused:
            np.frombuffer(self._memory, np.uint8)[:] = 0

    def chunks(
        self, sender: int, add: Callable[[int, memoryview], None]
    ) -> Iterator[IncomingChunk]:
        """Yield what `EarlierSegment.chunks` and `sums_of` send.

        `add`: adds bytes to the parity from a place on.
        """
        buffers: list[Bytes] = []  # free ones, used again and again
        for part, stop in zip(self._plan.parts_from(sender), self._stops_of(sender), strict=True):
            for low, high in _cuts(part, stop):
                buffer = buffers.pop() if buffers else np.empty(SMALL_CHUNK, np.uint8)
                place = part.place + low - part.start
                one = _Received(buffer, high - low, partial(add, place), buffers)
                yield one.chunk()
        sums = bytearray(4 * -(-self._plan.nbytes // BLOCK))
        accept = partial(self._sums.append, np.frombuffer(sums, "<u4"))
        yield IncomingChunk(sums, partial(checksum, memoryview(sums)), accept)

    def is_parity(self, crcs: Sequence[int]) -> bool:
        """Return whether what began as the earlier parity is the XOR of what all senders have."""
        if not self.is_reused:
            return True
        nbytes = self._plan.nbytes
        expected = np.bitwise_xor.reduce(self._sums, axis=0).tolist()
        lengths = (min(BLOCK, nbytes - start) for start in range(0, nbytes, BLOCK))
        sums = zip(crcs, expected, lengths, strict=True)
        return all(crc == one ^ _zeros_crc(length) for crc, one, length in sums)

    def fail(self) -> None:
        """Have the other threads fail as well, which wait for this one."""
        self._barrier.abort()

    def close(self) -> None:
        """Let the earlier parity be recycled."""
        if self._earlier is not None:
            self._earlier.close()
            self._earlier = None


class _Received:
    """A chunk of a difference that is received."""

    def __init__(
        self,
        buffer: Bytes,
        nbytes: int,
        add: Callable[[memoryview], None],
        buffers: list[Bytes],
    ) -> None:
        self._buffer, self._add, self._buffers = buffer, add, buffers
        self._pages = buffer[: -(-nbytes // PAGE) * PAGE].reshape(-1, PAGE)
        self._data = buffer[:nbytes].data
        self._noted: Pages | None = None  # which pages come; None: all of them
        self._changed = np.empty((0, PAGE), np.uint8)
        self._is_zero = False

    def chunk(self) -> IncomingChunk:
        note_nbytes = -(-len(self._pages) // 8)
        return IncomingChunk(
            self._data, self._crc, self._accept, note_nbytes=note_nbytes, refill=self._refill
        )

    def _refill(self, note: bytearray) -> Refilled:
        bits = np.unpackbits(np.frombuffer(note, np.uint8), count=len(self._pages))
        self._noted = bits.astype(np.bool_)
        self._changed = np.zeros((int(bits.sum()), PAGE), np.uint8)
        return Refilled(_sent(self._changed, self._noted, len(self._data)), is_right=True)

    def _crc(self) -> int:
        noted, self._noted = self._noted, None  # where the chunk comes again, it comes in full
        self._is_zero = noted is not None and not len(self._changed)
        if self._is_zero:
            return _zeros_crc(len(self._data))
        if noted is not None:
            self._pages[~noted] = 0
            self._pages[noted] = self._changed
        return checksum(self._data)

    def _accept(self) -> None:
        if not self._is_zero:
            self._add(self._data)
        self._buffers.append(self._buffer)
