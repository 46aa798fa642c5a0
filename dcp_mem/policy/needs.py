"""The bytes that ranks need of a checkpoint's segments, and which ranks need the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

from dcp_mem.common.sendable import sendable
from dcp_mem.policy.pieces import Extent

Edges = Callable[[str], Sequence[int] | None]
"""Returns where a segment may be cut, ascending; None for anywhere."""
Extents = Mapping[str, Sequence[Extent]]
"""Bytes of segments, by file; what one rank needs is merged."""
Span = tuple[Extent, tuple[int, ...]]
"""Bytes of a segment, and who needs them."""


@sendable
@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a rank needs, and the room of its node."""

    node: str
    extents: Extents  # the bytes that the rank needs
    window_nbytes: int  # the bytes that its node has for a window


def spans(needs: Mapping[int, Extents]) -> Iterator[tuple[str, Iterator[Span]]]:
    """Yield the needed bytes of each segment, cut where those who need them change."""
    needed: dict[str, list[tuple[int, Sequence[Extent]]]] = {}
    for number, of_one in needs.items():
        for file, extents in of_one.items():
            needed.setdefault(file, []).append((number, extents))
    for file, of_file in sorted(needed.items()):
        if len(of_file) == 1:
            number, extents = of_file[0]
            yield file, zip(extents, repeat((number,)))
        else:
            yield file, _spans_of(_events(of_file))


def _events(
    needed: Sequence[tuple[int, Sequence[Extent]]],
) -> Mapping[int, tuple[list[int], list[int]]]:
    """Return, for each place in a segment, those whose needs begin there and end there."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for number, extents in needed:
        for start, stop in extents:
            events.setdefault(start, ([], []))[0].append(number)
            events.setdefault(stop, ([], []))[1].append(number)
    return events


def _spans_of(events: Mapping[int, tuple[list[int], list[int]]]) -> Iterator[Span]:
    """Yield the needed ranges of one segment, with those who need them."""
    active: set[int] = set()
    for place, following in pairwise(sorted(events)):
        begins, ends = events[place]
        active.difference_update(ends)
        active.update(begins)
        if active:
            yield (place, following), tuple(sorted(active))
