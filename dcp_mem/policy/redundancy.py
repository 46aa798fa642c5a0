"""The redundancy of a checkpoint in memory, as a value."""

from __future__ import annotations

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class


@sendable
@value_class
class Redundancy:
    """Copies of each segment on other nodes, or parity over groups of nodes."""

    copies: int = 0  # how many other nodes have a copy of each segment
    parity: int = 0  # over how many other nodes a node's bytes have parity; 0 for none

    def __bool__(self) -> bool:
        return bool(self.copies or self.parity)

    def on(self, nodes: int) -> Redundancy:
        """Return the redundancy that so many nodes allow: never more than all other nodes.

        `nodes`: number of nodes, at least 1.
        """
        return Redundancy(min(self.copies, nodes - 1), min(self.parity, nodes - 1))

    def __str__(self) -> str:
        return f"redundancy=parity({self.parity})" if self.parity else f"replicas={self.copies}"
