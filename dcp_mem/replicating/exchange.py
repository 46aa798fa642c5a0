"""One segment on its way from a rank's slot into another rank's: chunk by chunk, with checksums taken at both ends.

First a letter of the receiver, that it is ready or why it isn't; then the chunks, a few in flight; last, what the sender has
computed of the blocks. No byte is copied but by the network.

Behind each message goes a byte, and one comes back for it; both ends wait for these bytes. For gloo (torch 2.6 to 2.13) tells at
once who waits for a message that its peer is gone, but not who waits for one that is half here, or half gone.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dcp_mem import faults
from dcp_mem.errors import DcpMemError
from dcp_mem.format.checksums import BlockChecksums, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.slots import Slot
from dcp_mem.ranks.base import Line, Passing

CHUNK = 8 << 20
_IN_FLIGHT = 4
_LETTER = 512


class Source:
    """This rank's segment, as it lies in its slot. Its checksums are computed once, however many it is sent to."""

    def __init__(self, slot: Slot, nbytes: int, table: ItemTable) -> None:
        assert slot.mapping is not None
        self.nbytes = nbytes
        self._mapped, self._mapped_nbytes = memoryview(slot.mapping.buffer).cast("B"), slot.mapping.nbytes
        self._descriptor = slot.descriptor
        self._table = table
        self._checksums = BlockChecksums(blocks_of(table.offsets, table.lengths))
        self._seen: set[int] = set()
        self._left = len(range(0, nbytes, CHUNK))
        self._all_summed = threading.Condition()

    def read(self, start: int, stop: int) -> memoryview:
        """These bytes, where they lie. Only byte items that have grown since the slot was mapped lie behind its mapping."""
        if stop <= self._mapped_nbytes:
            return self._mapped[start:stop]
        rest = bytearray(stop - start)
        os.preadv(self._descriptor, [rest], start)
        return memoryview(rest)

    def sum_up(self, start: int, data: memoryview) -> None:
        """Take the checksums of a chunk, unless another thread has done so, or is doing it."""
        with self._all_summed:
            if start in self._seen:
                return
            self._seen.add(start)
        self._checksums.add(start, data)
        with self._all_summed:
            self._left -= 1
            self._all_summed.notify_all()

    def table(self) -> ItemTable:
        """The segment's items with their checksums, once it has been sent to somebody."""
        with self._all_summed:
            self._all_summed.wait_for(lambda: not self._left)
            return replace(self._table, crc32c=self._checksums.result())


def send(line: Line, source: Source, go_on: Callable[[], None]) -> None:
    """Send a segment. go_on: asked before each chunk; it raises where the rest isn't wanted.

    Raises DcpMemError where the receiver can't take it, and RuntimeError where it is gone or silent.
    """
    letter = bytearray(_LETTER)
    line.receive(letter).wait()
    refusal = letter.rstrip(b"\0").decode(errors="replace")
    if refusal:
        raise DcpMemError(refusal)
    passing = deque[Passing]()
    for start, stop in _chunks(source.nbytes):
        go_on()
        if len(passing) == _IN_FLIGHT:
            passing.popleft().wait()
        data = source.read(start, stop)
        passing.append(_Answered(line, data))
        source.sum_up(start, data)
        faults.point("replicate.chunk")
    sums = source.table().crc32c
    if len(sums):
        passing.append(_Answered(line, bytearray(sums.tobytes())))
    while passing:
        passing.popleft().wait()


class _Answered:
    """A message on its way, the byte behind it, and the answer to it."""

    def __init__(self, line: Line, data: Any) -> None:
        self._answer = line.receive(bytearray(1))
        self._message, self._end = line.send(data), line.send(bytearray(1))

    def wait(self) -> None:
        self._answer.wait()
        self._message.wait()
        self._end.wait()


class _Expected:
    """A message that is to come into this memory, and the byte behind it."""

    def __init__(self, line: Line, data: Any) -> None:
        self._line = line
        self._message, self._end = line.receive(data), line.receive(bytearray(1))

    def wait(self) -> Passing:
        """Wait until it is here, and answer it; the answer doesn't leave unless somebody holds it."""
        self._end.wait()
        self._message.wait()
        return self._line.send(bytearray(1))


def refuse(line: Line, why: str) -> None:
    """Let the sender know that this rank can't take its segment."""
    line.send(bytearray(why.encode()[:_LETTER].ljust(_LETTER, b"\0"))).wait()


def receive(line: Line, target: memoryview, table: ItemTable, go_on: Callable[[], None]) -> ItemTable:
    """Receive a segment into this memory, and check it; returns its items with their checksums.

    Raises DcpMemError where it isn't what was sent, and RuntimeError where the sender is gone or silent. No byte comes later.
    """
    checksums = BlockChecksums(blocks_of(table.offsets, table.lengths))
    passing = deque[tuple[int, memoryview, _Expected]]()
    answers: list[Passing] = []
    refuse(line, "")
    try:
        for start, stop in _chunks(len(target)):
            go_on()
            if len(passing) == _IN_FLIGHT:
                answers.append(_take(passing, checksums))
            passing.append((start, target[start:stop], _Expected(line, target[start:stop])))
        while passing:
            answers.append(_take(passing, checksums))
    finally:
        passing.clear()  # what is given up here isn't written to any more
    found = checksums.result()
    _compare(line, found)
    return replace(table, crc32c=found)


def _take(passing: deque[tuple[int, memoryview, _Expected]], checksums: BlockChecksums) -> Passing:
    """Wait for the next chunk, and answer it."""
    start, data, message = passing[0]
    answer = message.wait()
    checksums.add(start, data)
    passing.popleft()
    return answer


def _compare(line: Line, found: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
    if not len(found):
        return
    sent = bytearray(found.nbytes)
    _Expected(line, sent).wait().wait()
    wrong = int(np.count_nonzero(np.frombuffer(sent, found.dtype) != found))
    if wrong:
        raise DcpMemError(f"{wrong} of {len(found)} blocks came otherwise than they were sent")


def _chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + CHUNK, nbytes)) for start in range(0, nbytes, CHUNK)]
