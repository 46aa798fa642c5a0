"""The segments of a checkpoint as columns: they may be thousands, and every save writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, overload

from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment
from dcp_mem.format.names import segment_file

Tail = tuple[tuple[int, int], ...]
"""(offset, bytes) of each item behind a segment's layout."""
_COLUMNS = ("rank", "node", "nbytes", "layout", "tail")


@value_class(eq=False, kw_only=True)
class Segments(Sequence[Segment]):
    """Segments of one save, as columns; each `Segment` is made when it is asked for.

    A segment's file name follows from its rank and the save id. First comes a segment of each rank,
    by rank; then the second segments of those that have one, with `names.FROZEN` added to `rank`.
    """

    save_id: str
    rank: Sequence[int]
    node: Sequence[str]
    nbytes: Sequence[int]
    layout: Sequence[str]
    tail: Sequence[Tail]

    @staticmethod
    def of(save_id: str, segments: Iterable[Segment]) -> Segments:
        """Return these segments as columns."""
        found = list(segments)
        return Segments(
            save_id=save_id,
            **{name: [getattr(one, name) for one in found] for name in _COLUMNS},
        )

    def for_next_save(self, save_id: str, tails: Mapping[int, Tail]) -> Segments:
        """Return the segments of the next save of the same plan."""
        nbytes, tail = list(self.nbytes), list(self.tail)
        for number, new in tails.items():
            nbytes[number], tail[number] = sum(new[-1]), new
        return replace(self, save_id=save_id, nbytes=nbytes, tail=tail)

    def numbered(self, number: int) -> Segment:
        """Return the segment with a number: that of a rank, or a rank's second one.

        Raises ValueError.
        """
        is_in_place = number < len(self.rank) and self.rank[number] == number
        return self[number if is_in_place else self.rank.index(number)]

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Segment]:
        columns = [getattr(self, name) for name in _COLUMNS]
        return map(_segment, repeat(self.save_id), *columns)

    @overload
    def __getitem__(self, number: int) -> Segment: ...

    @overload
    def __getitem__(self, number: slice) -> list[Segment]: ...

    def __getitem__(self, number: int | slice) -> Segment | list[Segment]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return _segment(self.save_id, *[getattr(self, name)[number] for name in _COLUMNS])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for JSON; each node and layout is listed once, as there are few."""
        nodes, layouts = _numbered(self.node), _numbered(self.layout)
        return {
            "nodes": list(nodes),
            "layouts": list(layouts),
            "rank": self.rank,
            "node": list(map(nodes.__getitem__, self.node)),
            "nbytes": self.nbytes,
            "layout": list(map(layouts.__getitem__, self.layout)),
            "tail": self.tail,
        }

    @staticmethod
    def from_fields(
        save_id: str,
        nodes: Sequence[str],
        layouts: Sequence[str],
        rank: Sequence[int],
        node: Sequence[int],
        nbytes: Sequence[int],
        layout: Sequence[int],
        tail: Sequence[Sequence[Sequence[int]]],
    ) -> Segments:
        """Read what `to_fields` returned; the arguments after the save id are its keys.

        `tail`: of each segment: (offset, bytes) of each item of its tail. Raises TypeError,
        ValueError, LookupError.
        """
        tails = [tuple((int(offset), int(length)) for offset, length in one) for one in tail]
        if {len(column) for column in (rank, node, nbytes, layout)} - {len(tails)}:
            raise ValueError("columns of segments differ in length")
        if not {type(one) for column in (rank, nbytes) for one in column} <= {int}:
            raise ValueError("a rank or size that is no number")
        if not {type(one) for one in (*nodes, *layouts)} <= {str}:
            raise ValueError("a node or layout that is no text")
        if min(rank, default=0) < 0 or len(set(rank)) != len(rank) or min(nbytes, default=0) < 0:
            raise ValueError("a rank or size that can't be")
        for one, size in zip(tails, nbytes, strict=True):
            if any(min(extent) < 0 or sum(extent) > size for extent in one):
                raise ValueError("a tail that reaches beyond its segment")
        return Segments(
            save_id=save_id,
            rank=rank,
            node=[nodes[one] for one in node],
            nbytes=nbytes,
            layout=[layouts[one] for one in layout],
            tail=tails,
        )


def _segment(save_id: str, rank: int, node: str, nbytes: int, layout: str, tail: Tail) -> Segment:
    file = segment_file(rank, save_id)
    return Segment(rank=rank, node=node, file=file, nbytes=nbytes, layout=layout, tail=tail)


def _numbered(texts: Sequence[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}
