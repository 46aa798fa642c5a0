"""Decide into which requests the bytes that are needed of a segment are cut.

Decided from the needed ranges. The rules:

1. Ranges that lie close together are read as one: reading the gap costs less than another request.
2. Large ranges stay apart where the receiver can read each of them to where it belongs.
3. No request is much larger than `PIECE`; where checksums cover blocks, cuts fall between blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

PIECE = 32 << 20
"""Bytes of a request.

Enough to be worth it: with 16 MiB, a quarter of the CPU time went to requests. Few enough to have
many requests at once.
"""
_GAP = 1 << 20
"""Ranges with fewer bytes than this between them are read in one request."""
_LARGE = 2 << 20
_MOST_APART = 128
Extent = tuple[int, int]


def merged(extents: Iterable[Extent], gap: int = _GAP) -> list[Extent]:
    """Return ranges that cover the given ones, in order.

    `gap`: ranges with fewer bytes than this between them become one.
    """
    found: list[Extent] = []
    for start, stop in sorted(extents):
        if found and start - found[-1][1] < gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def with_large_apart(extents: Iterable[Extent]) -> list[Extent]:
    """Return the ranges merged, except large ones, each of which stays a range of its own.

    A range of its own is received where it belongs, without a copy. A range counts as large by its
    share of all bytes as well, so that there are never many of them.

    `extents`: (start, stop) of each range, in any order; they may overlap.
    """
    distinct = merged(extents, 0)
    large = max(_LARGE, sum(stop - start for start, stop in distinct) // _MOST_APART)
    found: list[Extent] = []
    for is_large, run in groupby(distinct, lambda extent: extent[1] - extent[0] >= large):
        of_one_kind = list(run)
        found += of_one_kind if is_large else merged(of_one_kind)
    return found


def cut(extent: Extent, edges: Sequence[int] | None, nbytes: int = 0) -> Iterator[Extent]:
    """Yield the range in pieces of about equal size.

    `edges`: where it may be cut, ascending; None for anywhere. `nbytes`: the bytes of a piece; 0
    for `PIECE`.
    """
    (start, stop), nbytes = extent, nbytes or PIECE
    while stop - start > nbytes:
        middle = start + nbytes
        if edges is not None:
            before = edges[bisect_right(edges, middle) - 1] if edges else start
            after = bisect_left(edges, middle)
            middle = (
                before
                if before > start
                else min(edges[after], stop)
                if after < len(edges)
                else stop
            )
        yield start, middle
        start = middle
    if start < stop:
        yield start, stop
