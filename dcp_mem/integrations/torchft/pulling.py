"""The replica that heals: asks another one for its state, and reads it into new tensors."""

from __future__ import annotations

import json
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from dcp_mem.comm.control_line import ControlLine
from dcp_mem.comm.greetings import dialled
from dcp_mem.comm.transfer import CHUNK, IncomingChunk, receive
from dcp_mem.common import faults
from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.format.checksums import blocks_of, checksum
from dcp_mem.integrations.torchft.staged import (
    MARK_NBYTES,
    Kind,
    offsets_of,
    put_together,
    unpickled,
)
from dcp_mem.integrations.torchft.talk import Say, Talk, met
from dcp_mem.memory.checked_reads import CheckedReader
from dcp_mem.memory.views import view_of


def pulled(
    metadata: str, step: int, seconds: float, transport: str, *, weights_only: bool, peer: str
) -> Any:
    """Return another replica's state of a step, verified.

    1. Connect, and say which step is wanted; the other replica answers once that is staged.
    2. Unpickle the structure, and make the tensors.
    3. On the same machine: open the other replica's slot, and read it against its checksums.
       Elsewhere: receive its bytes over a channel.

    `transport`: what moves bytes between nodes, as in `Settings.transport`. Raises WaitTimeout,
    SegmentCorrupt, UntrustedObject, DcpMemError.
    """
    deadline = time.monotonic() + seconds
    try:
        with closing(_asked(metadata, step, deadline, peer)) as talk:
            return _Pull(talk, step, transport, peer).state(weights_only=weights_only)
    except RuntimeError as error:
        why = str(error).split("\n")[0]
        is_late = time.monotonic() >= deadline
        raise DcpMemError(f"{peer}: {'timed out: ' if is_late else ''}{why}") from error


def _asked(metadata: str, step: int, deadline: float, peer: str) -> Talk:
    """Return a conversation with the other replica, which has been asked for a step."""
    try:
        facts = json.loads(metadata)
        address, token = (str(facts["host"]), int(facts["port"])), bytes.fromhex(facts["token"])
    except (ValueError, KeyError, TypeError):
        raise DcpMemError(
            f"{peer} uses another checkpoint transport: its address is {metadata[:100]!r}. Give "
            "all replicas the same one."
        ) from None
    talk = Talk(ControlLine(dialled(address, token, deadline)), peer, deadline)
    try:
        talk.say(Say.WANTED, step=step, seconds=talk.seconds_left())
    except BaseException:
        talk.close()
        raise
    return talk


class _Pull:
    """One pull of a state, from the offer on."""

    def __init__(self, talk: Talk, step: int, transport: str, peer: str) -> None:
        self._talk, self._step, self._transport, self._peer = talk, step, transport, peer

    def state(self, *, weights_only: bool) -> Any:
        offer = self._talk.heard(Say.OFFER)
        state, kinds = unpickled(self._talk.heard_bytes(Say.STRUCTURE), weights_only=weights_only)
        offsets, nbytes = offsets_of([kind.nbytes for kind in kinds])
        if nbytes != offer["nbytes"]:
            raise self._corrupt(f"{offer['nbytes']} bytes where its structure says {nbytes}")
        tensors = [torch.empty(kind.shape, dtype=kind.dtype) for kind in kinds]
        faults.point("torchft.pulling")
        descriptor = _opened(offer)
        self._talk.say(Say.ROAD, is_file=descriptor is not None)
        if descriptor is None:
            self._receive(tensors, offsets, nbytes)
        else:
            try:
                self._read(descriptor, kinds, tensors, offsets)
            finally:
                os.close(descriptor)
        self._talk.say(Say.GOT)
        return put_together(state, tensors)

    def _read(
        self,
        descriptor: int,
        kinds: Sequence[Kind],
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
    ) -> None:
        """Read the other replica's slot, on this machine."""
        crcs = np.frombuffer(self._talk.heard_bytes(Say.CHECKSUMS), np.uint32)
        starts = np.array(offsets, np.int64) + MARK_NBYTES
        lengths = np.array([kind.nbytes for kind in kinds], np.int64)
        blocks = blocks_of(starts, lengths)
        if len(crcs) != len(blocks.offsets):
            raise self._corrupt("its checksums are those of another state")
        addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        try:
            damaged = CheckedReader(descriptor, blocks, crcs).read(addresses, starts, lengths)
        except (OSError, EOFError) as error:
            raise self._corrupt(str(error)) from None
        if damaged is not None:
            raise self._corrupt(f"its block {damaged[0]} has another checksum than it should")

    def _receive(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], nbytes: int
    ) -> None:
        """Receive the other replica's bytes over a channel."""
        meeting = self._talk.heard(Say.MEETING)
        channel = met(meeting, self._talk, self._transport, is_sender=False)
        try:
            receive(channel, _chunks(tensors, offsets, nbytes), self._talk.check)
        finally:
            channel.close()

    def _corrupt(self, why: str) -> SegmentCorrupt:
        return SegmentCorrupt(f"step {self._step}", 0, self._peer, why)


def _opened(offer: Mapping[str, Any]) -> int | None:
    """Open the other replica's slot; None where that isn't possible from here."""
    path = str(offer["file"])
    with suppress(OSError):
        facts = os.stat(path)  # looked at first: opening another kind of file might do something
        if not stat.S_ISREG(facts.st_mode) or facts.st_ino != offer["inode"]:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if os.pread(descriptor, MARK_NBYTES, 0) == bytes.fromhex(offer["mark"]):
            return descriptor
        os.close(descriptor)
    return None


def _chunks(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], nbytes: int
) -> Iterator[IncomingChunk]:
    """Yield the chunks that come; one that lies within a tensor is received straight into it."""
    for start in range(0, nbytes, CHUNK):
        stop = min(start + CHUNK, nbytes)
        pieces = list(_pieces(tensors, offsets, start, stop))
        if len(pieces) == 1 and len(pieces[0][1]) == stop - start:
            data: Any = pieces[0][1]
            yield IncomingChunk(data, partial(checksum, data), lambda: None)
        else:
            data = memoryview(bytearray(stop - start))
            yield IncomingChunk(data, partial(checksum, data), partial(_spread, data, pieces))


def _pieces(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield where pieces of tensors lie in the bytes [start, stop), and their memory."""
    for number in range(max(bisect_right(offsets, start) - 1, 0), len(tensors)):
        offset, tensor = offsets[number], tensors[number]
        if offset >= stop:
            return
        low, high = max(offset, start), min(offset + tensor.nbytes, stop)
        if low < high:
            yield low - start, view_of(tensor.data_ptr() + low - offset, high - low)


def _spread(data: memoryview, pieces: Sequence[tuple[int, memoryview]]) -> None:
    for place, piece in pieces:
        piece[:] = data[place : place + len(piece)]
