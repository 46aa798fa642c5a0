"""What each rank does in a load: what it reads, sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from dcp_mem.common.sendable import sendable
from dcp_mem.policy.needs import Extents

Batches = list[list["SharedPiece"]]


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPiece:
    """Bytes [start, stop) of a segment that come into a node's window once."""

    file: str
    start: int
    stop: int
    place: int
    by: int  # the rank of the node that brings them there
    # the rank that it gets them from; None for storage, or its own node's memory
    origin: int | None = None
    to: tuple[int, ...] = ()  # ranks of other nodes that it sends them to
    # They come from a node's memory. The rank that sends them has them there; they don't come into
    # its own node's window.
    is_held: bool = False

    @property
    def comes_in(self) -> bool:
        """Whether they come into the node's window."""
        return self.origin is not None or not self.is_held


@sendable
class PeerPiece(NamedTuple):
    """Bytes [start, stop) of a segment, sent from a node's memory to the only rank in need.

    A plain tuple, because there are many, which are sent to their ranks.
    """

    peer: int  # in the sender's share, the receiver; in the receiver's share, the sender
    file: str
    start: int
    stop: int


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShare:
    """One rank's share of a load."""

    alone: Extents = field(default_factory=dict)
    # what comes into its node's window, batch by batch
    batches: Sequence[Sequence[SharedPiece]] = ()
    window_nbytes: int = 0
    makes_window: bool = False  # whether this rank makes the window for its node
    passes_on: bool = False  # whether nodes send each other anything in any batch
    # what it sends to single ranks, in the same order in which they receive it
    sends: Sequence[PeerPiece] = ()
    receives: Sequence[PeerPiece] = ()  # what it receives as the only rank that needs it
    is_passing: bool = False  # whether any rank sends anything to a single rank

    @property
    def totals(self) -> LoadTotals:
        """What all ranks of the load must know of this share."""
        return LoadTotals(len(self.batches), self.passes_on, self.is_passing)

    def within(self, totals: LoadTotals) -> LoadShare:
        """Return the share as part of a load: with as many batches, some of them empty."""
        missing = totals.batches - len(self.batches)
        return replace(
            self,
            batches=[*self.batches, *([] for _ in range(missing))],
            passes_on=totals.passes_on,
            is_passing=totals.is_passing,
        )


@sendable
class LoadTotals(NamedTuple):
    """What all ranks of a load go through together; a plain tuple, as it is sent to all ranks."""

    batches: int
    passes_on: bool
    is_passing: bool

    def join(self, other: LoadTotals) -> LoadTotals:
        """Join what is known of two sets of ranks."""
        return LoadTotals(
            max(self.batches, other.batches),
            self.passes_on or other.passes_on,
            self.is_passing or other.is_passing,
        )


def joined_share(parts: Sequence[LoadShare]) -> LoadShare:
    """Return the share of a rank, from the parts of it that nodes have decided by themselves.

    The messages between two ranks stay in their order: one node decides on all of them.
    """
    if len(parts) == 1:
        return parts[0]
    return LoadShare(
        alone={file: extents for part in parts for file, extents in part.alone.items()},
        batches=side_by_side(*(part.batches for part in parts)),
        window_nbytes=max((part.window_nbytes for part in parts), default=0),
        makes_window=any(part.makes_window for part in parts),
        passes_on=any(part.passes_on for part in parts),
        sends=[piece for part in parts for piece in part.sends],
        receives=[piece for part in parts for piece in part.receives],
        is_passing=any(part.is_passing for part in parts),
    )


def side_by_side(*several: Sequence[Sequence[SharedPiece]]) -> Batches:
    """Return batches that have what the batches of the same number have.

    What comes from nodes' memory is last: the order of messages between two ranks must be the same
    on both, and only the receiver's leader decides on these.
    """
    return [
        sorted((piece for pieces in of_number for piece in pieces), key=lambda piece: piece.is_held)
        for of_number in zip_longest(*several, fillvalue=())
    ]
