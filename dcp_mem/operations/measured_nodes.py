"""What the checks between nodes have in common: which nodes are slow, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

_SLOW = 0.5
"""A node below this part of the best rate is called slow."""
_MOST_NAMED = 5


class MeasuredNode(Protocol):
    """A node's figures.

    Attributes:
        rank: Of the process that measured.
        host: The machine's name.
        rate: Bytes per second between it and a neighbour.
    """

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def rate(self) -> float: ...


Node = TypeVar("Node", bound=MeasuredNode)


def slow_among(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are much slower than the fastest one."""
    return [node for node in nodes if node.rate < _SLOW * max(one.rate for one in nodes)]


def named(nodes: Sequence[MeasuredNode]) -> str:
    """Return the names of the first few nodes, and how many more there are."""
    text = ", ".join(f"{node.host} (rank {node.rank})" for node in nodes[:_MOST_NAMED])
    more = len(nodes) - _MOST_NAMED
    return text + (f" and {more} more" if more > 0 else "")
