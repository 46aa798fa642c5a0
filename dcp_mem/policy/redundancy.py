"""What a checkpoint in memory survives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Redundancy:
    """So many copies of each segment on other nodes; or parity over groups of nodes, of each over so many others."""

    copies: int = 0
    parity: int = 0

    def __bool__(self) -> bool:
        return bool(self.copies or self.parity)

    def on(self, nodes: int) -> Redundancy:
        """The same, as far as so many nodes allow."""
        return Redundancy(min(self.copies, nodes - 1), min(self.parity, nodes - 1))

    def __str__(self) -> str:
        return f"redundancy=parity({self.parity})" if self.parity else f"replicas={self.copies}"
