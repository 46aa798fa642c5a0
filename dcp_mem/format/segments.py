"""The segments of a checkpoint, field by field: there may be thousands, and every save writes them down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from dcp_mem.format.names import segment_file
from dcp_mem.values import Segment

Tail = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Segments(Sequence[Segment]):
    """Segments of one save. A Segment is made when it is asked for; its file follows from its rank and the save id."""

    save_id: str
    rank: Sequence[int]
    node: Sequence[str]
    nbytes: Sequence[int]
    layout: Sequence[str]
    tail: Sequence[Tail]

    @staticmethod
    def of(save_id: str, segments: Iterable[Segment]) -> Segments:
        """These segments, by field."""
        found = list(segments)
        return Segments(
            save_id,
            [one.rank for one in found],
            [one.node for one in found],
            [one.nbytes for one in found],
            [one.layout for one in found],
            [one.tail for one in found],
        )

    def moved_on(self, save_id: str, tails: Mapping[int, Tail]) -> Segments:
        """What the next save of the same plan makes of them. tails: that differ, by number."""
        nbytes, tail = list(self.nbytes), list(self.tail)
        for number, new in tails.items():
            nbytes[number], tail[number] = sum(new[-1]), new
        return Segments(save_id, self.rank, self.node, nbytes, self.layout, tail)

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, number: int) -> Segment: ...

    @overload
    def __getitem__(self, number: slice) -> list[Segment]: ...

    def __getitem__(self, number: int | slice) -> Segment | list[Segment]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        rank = self.rank[number]
        file = segment_file(rank, self.save_id)
        return Segment(rank, self.node[number], file, self.nbytes[number], self.layout[number], self.tail[number])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def to_fields(self) -> dict[str, Any]:
        """The fields as JSON has them; nodes and layouts, of which there are few, once."""
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
        """Read what `to_fields` made. Raises TypeError, ValueError or LookupError for anything else."""
        tails = [tuple((int(offset), int(length)) for offset, length in one) for one in tail]
        if {len(column) for column in (rank, node, nbytes, layout)} - {len(tails)}:
            raise ValueError("columns of segments differ in length")
        return Segments(save_id, rank, [nodes[one] for one in node], nbytes, [layouts[one] for one in layout], tails)


def _numbered(texts: Sequence[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}
