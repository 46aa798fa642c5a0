"""Choose a free slot for a segment, and compute by how much the slot grows.

A slot's file is hardly longer than its segment: what is left of the last huge page takes plain
pages. It keeps its size from segment to segment, unless it has become far too large.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class

HUGE = 2 << 20
"""Bytes of a huge page."""
_UNIT = 64 << 10
"""Slots have sizes of whole units: the largest of Linux's plain pages."""
_TOO_LARGE = 64 << 20


@sendable
@value_class(kw_only=True)
class FreeSlot:
    """A free slot that a process could claim."""

    name: str
    inode: int
    capacity: int  # size of its file, in bytes
    present: int
    # whether the process that asks holds it; what no process holds, any may take
    is_held: bool = True
    frames: str = ""  # key of the heads and tails that it holds; "" for none


@value_class
class SlotNeed:
    """A slot that a save will claim."""

    nbytes: int  # bytes that it must have room for
    frames: str = ""  # key of the heads and tails that it should hold


def file_size_for(nbytes: int) -> int:
    """Return the size of a new slot's file for so many bytes."""
    return -(-nbytes // _UNIT) * _UNIT


def capacity_for(nbytes: int) -> int:
    """Return the most memory that a slot for so many bytes takes: whole huge pages.

    That is what it takes on a tmpfs with `huge=always`, and what is counted before it is there. On
    others it takes the size of its file.
    """
    return -(-nbytes // HUGE) * HUGE


def preferred(need: SlotNeed, free: Sequence[FreeSlot]) -> list[FreeSlot]:
    """Return free slots in the order in which a claim tries them.

    First come slots that hold the frames, then those that this process has open, then those that
    are large enough, then the one of nearest size.
    """
    return sorted(
        free,
        key=lambda one: (
            not (one.is_held and one.frames == need.frames),
            not one.is_held,
            one.present < need.nbytes,
            abs(one.present - need.nbytes),
        ),
    )


def is_too_large(capacity: int, nbytes: int) -> bool:
    """Return whether a slot gives memory back when a segment of so many bytes takes it."""
    return capacity > 2 * nbytes + _TOO_LARGE


def growth(needs: Sequence[SlotNeed], free: Sequence[FreeSlot]) -> int:
    """Return by how many bytes slots grow, or come anew, for claims in this order, at most."""
    left, total = list(free), 0
    for need in needs:
        capacity = capacity_for(need.nbytes)
        taken = next(iter(preferred(need, left)), None)
        if taken is None:
            total += capacity
            continue
        left.remove(taken)
        if need.nbytes <= taken.capacity and not is_too_large(taken.capacity, need.nbytes):
            # It doesn't grow, but all of it is populated.
            capacity = max(taken.capacity, file_size_for(need.nbytes))
        total += max(0, capacity - taken.present)
    return total
