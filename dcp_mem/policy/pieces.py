"""How the bytes that are needed of a segment are cut into requests."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

PIECE = 32 << 20
"""Bytes of a request: enough to pay for it (at 16 MiB requests were a quarter of the CPU), few enough for many at once."""
_GAP = 1 << 20
"""Bytes between two ranges that are better read along than asked for apart."""
_LARGE = 2 << 20
_MOST_APART = 128
Extent = tuple[int, int]


def merged(extents: Iterable[Extent], gap: int = _GAP) -> list[Extent]:
    """Ranges that cover the given ones, in order, with at least `gap` bytes between them."""
    found: list[Extent] = []
    for start, stop in sorted(extents):
        if found and start - found[-1][1] < gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif start < stop:
            found.append((start, stop))
    return found


def with_large_apart(extents: Iterable[Extent]) -> list[Extent]:
    """The same, but that large ranges stay as they are: who receives one by itself has it where it belongs at once.

    Of much, only what is large beside it all, so that there aren't many more of them.
    """
    distinct = merged(extents, 0)
    large = max(_LARGE, sum(stop - start for start, stop in distinct) // _MOST_APART)
    found: list[Extent] = []
    for is_large, run in groupby(distinct, lambda extent: extent[1] - extent[0] >= large):
        of_one_kind = list(run)
        found += of_one_kind if is_large else merged(of_one_kind)
    return found


def cut(extent: Extent, edges: Sequence[int] | None) -> Iterator[Extent]:
    """The range in pieces. edges: where it may be cut, ascending; None: anywhere."""
    start, stop = extent
    while stop - start > PIECE:
        middle = start + PIECE
        if edges is not None:
            before = edges[bisect_right(edges, middle) - 1] if edges else start
            after = bisect_left(edges, middle)
            middle = before if before > start else min(edges[after], stop) if after < len(edges) else stop
        yield start, middle
        start = middle
    if start < stop:
        yield start, stop
