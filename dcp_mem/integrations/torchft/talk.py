"""What a replica that heals and a replica that has the state say to each other.

    healing -> other   WANTED: which step, and for how long it waits
    other -> healing   REFUSED: why not; or OFFER: sizes and places, and behind it STRUCTURE
    healing -> other   ROAD: whether it has opened the slot itself, or the bytes are to be sent
    other -> healing   CHECKSUMS, for a file; or MEETING: where the channel's ends meet
    healing -> other   GOT: it has all of it

An offer is made once the state of that step is staged. Texts and numbers are JSON. The replicas
have no store in common: that which has the state serves one, in which a channel's ends meet.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.control_line import MOST_NBYTES, ControlLine, Frame
from dcp_mem.comm.timed_store import MeetingPlace, TimedCalls, TimedStore
from dcp_mem.comm.transports import Pair, connected
from dcp_mem.errors import DcpMemError, SegmentCorrupt, WaitTimeout
from dcp_mem.format.checksums import checksum


class Say(IntEnum):
    """Kinds of frames."""

    WANTED = 1
    REFUSED = 2
    OFFER = 3
    STRUCTURE = 4
    ROAD = 5
    CHECKSUMS = 6
    MEETING = 7
    GOT = 8


class Talk:
    """One end of a conversation, which ends at a deadline of the monotonic clock."""

    def __init__(self, line: ControlLine, peer: str, deadline: float) -> None:
        self._line, self._peer, self.deadline = line, peer, deadline
        self._came = deque[Frame]()

    def say(self, kind: Say, **facts: Any) -> None:
        """Send facts. Raises DcpMemError."""
        self._send(Frame(kind, 0, json.dumps(facts).encode()))

    def say_bytes(self, kind: Say, data: bytes) -> None:
        """Send bytes, of any number, in as many frames as they take. Raises DcpMemError."""
        self.say(kind, nbytes=len(data), crc=checksum(data))
        for number, start in enumerate(range(0, len(data), MOST_NBYTES)):
            self._send(Frame(kind, number, data[start : start + MOST_NBYTES]))

    def heard(self, kind: Say) -> Mapping[str, Any]:
        """Return the facts of the next frame, which is of this kind. Raises DcpMemError."""
        facts: Mapping[str, Any] = json.loads(self._next(kind))
        return facts

    def heard_bytes(self, kind: Say) -> bytes:
        """Return bytes that come in as many frames as they take. Raises SegmentCorrupt."""
        facts, data = self.heard(kind), bytearray()
        while len(data) < facts["nbytes"]:
            data += self._next(kind)
        if checksum(memoryview(data)) != facts["crc"]:
            why = f"its {kind.name.lower()} came otherwise than it was sent"
            raise SegmentCorrupt("the state", 0, self._peer, why)
        return bytes(data)

    def is_over(self) -> bool:
        """Return whether the peer has closed its end."""
        self._came.extend(self._line.frames())
        return self._line.is_over

    def seconds_left(self) -> float:
        """Return the seconds until the deadline. Raises WaitTimeout."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise WaitTimeout(f"timed out waiting for {self._peer}")
        return seconds

    def check(self) -> None:
        """Check that it is worth while to go on. Raises WaitTimeout, DcpMemError."""
        self.seconds_left()
        if self.is_over():
            raise DcpMemError(f"{self._peer} is gone")

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def _send(self, frame: Frame) -> None:
        self._line.send(frame)
        while self._line.has_outgoing:
            self._line.wait(self.seconds_left())
            self._came.extend(self._line.frames())

    def _next(self, kind: Say) -> bytes:
        while not self._came:
            self._came.extend(self._line.frames())
            if self._came:
                break
            if self._line.is_over:
                raise DcpMemError(f"{self._peer} is gone")
            self._line.wait(self.seconds_left())
        frame = self._came.popleft()
        if frame.kind == Say.REFUSED:
            raise DcpMemError(f"{self._peer} refuses: {json.loads(frame.body)['why']}")
        if frame.kind != kind or not frame.body:
            raise DcpMemError(f"{self._peer} speaks otherwise: it says {frame.kind}, not {kind}")
        return frame.body


def met(meeting: Mapping[str, Any], talk: Talk, transport: str, *, is_sender: bool) -> Channel:
    """Return this end of a new channel to the peer, which meets it in a store.

    `meeting`: the store's host and port, and the channel's name there. Raises RuntimeError.
    """
    seconds = talk.seconds_left()
    timeout, address = timedelta(seconds=seconds), (str(meeting["host"]), int(meeting["port"]))
    store = TimedCalls(seconds).do(
        lambda: dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    )
    place = MeetingPlace(TimedStore(store, seconds), f"{meeting['name']}/", talk.check)
    return connected(transport, Pair(store=place, is_sender=is_sender, seconds=seconds))
