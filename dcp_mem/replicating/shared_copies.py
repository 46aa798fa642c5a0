"""Copies of segments of frozen items, which later checkpoints share on the nodes that have them.

Before such a segment is sent, both ranks agree whether the receiver has its bytes:

    receiver -> sender   the key of what it has; zeros: nothing
    sender -> receiver   the key of the segment, and the checkpoints that turned out to be stale

Where the keys are the same, the receiver gives its copy one more name, and nothing is sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_mem.comm.collectives import Channel
from dcp_mem.format import names
from dcp_mem.format.checksums import Crcs
from dcp_mem.memory.slot import Slot, SlotHold
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating.plan import FilePlan

KEY_NBYTES = 16
_NOTHING = bytes(KEY_NBYTES)
MOST_STALE = 64
"""Save ids of stale checkpoints that a message has room for."""


def _nobody() -> None:
    return


def new_key() -> bytes:
    """Return a key for bytes that no other segment has."""
    return uuid.uuid4().bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownCopy:
    """A copy of a segment of frozen items that this process has received."""

    key: bytes
    slot: Slot
    claims: int
    crcs: Crcs


class SharedCopies:
    """The copies that this process has received, by the segments' numbers; for any thread."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._known: dict[int, KnownCopy] = {}

    def keep(self, number: int, copy: KnownCopy) -> None:
        """Have later checkpoints share a copy."""
        self._known[number] = copy

    def has(self, number: int) -> bool:
        """Return whether there is a copy of a segment with this number."""
        known = self._known.get(number)
        return known is not None and self._slots.has_bytes(known.slot, known.claims)

    def held(self, number: int) -> tuple[KnownCopy, SlotHold] | None:
        """Return the copy of a segment with this number, held; None where there is none."""
        known = self._known.get(number)
        hold = None if known is None else self._slots.hold(known.slot, known.claims)
        return None if known is None or hold is None else (known, hold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a save's segments of frozen items are shared with other nodes."""

    key: bytes = _NOTHING  # of the bytes of this rank's own one; zeros where it has none
    stale: Sequence[str] = ()  # save ids of checkpoints that turned out to hold stale bytes of it
    copies: SharedCopies
    # claims a slot for a copy that is sent after all; or returns why there is none
    claim: Callable[[FilePlan], Slot | str]
    # called once other nodes have copies of this rank's own one
    on_replicated: Callable[[], None] = _nobody

    def answer(self, channel: Channel) -> bool:
        """Tell a receiver what this rank's segment is; return whether it has that."""
        has = bytearray(KEY_NBYTES)
        channel.receive(has).wait()
        stale = "".join(self.stale[-MOST_STALE:]).encode()
        channel.send(
            bytearray(self.key + stale.ljust(names.SAVE_ID_NBYTES * MOST_STALE, b"\0"))
        ).wait()
        return has == self.key


def ask(channel: Channel, known: KnownCopy | None) -> tuple[bytes, Sequence[str]]:
    """Tell the sender what this rank has of its segment of frozen items.

    Returns the key of the sender's segment, and the save ids of stale checkpoints.
    """
    channel.send(bytearray(_NOTHING if known is None else known.key)).wait()
    answer = bytearray(KEY_NBYTES + names.SAVE_ID_NBYTES * MOST_STALE)
    channel.receive(answer).wait()
    told = answer[KEY_NBYTES:].rstrip(b"\0").decode(errors="replace")
    stale = [
        told[start : start + names.SAVE_ID_NBYTES]
        for start in range(0, len(told), names.SAVE_ID_NBYTES)
    ]
    return bytes(answer[:KEY_NBYTES]), stale


def number_of(plan: FilePlan) -> int:
    """Return the number of the segment that a plan copies."""
    return names.rank_of(plan.file)
