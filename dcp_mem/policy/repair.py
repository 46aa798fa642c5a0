"""What is missing after a loss of nodes: where lost segments come back, and who gets copies again, from whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class Loads:
    """Hands work to whoever has least by then; of several, to the first one."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def add(self, one: int, nbytes: int) -> None:
        self._taken[one] = self._taken.get(one, 0) + nbytes

    def give(self, among: Collection[int], nbytes: int) -> int:
        """Who takes so many bytes more."""
        one = min(among, key=lambda one: (self._taken.get(one, 0), one))
        self.add(one, nbytes)
        return one


def homes(lost: Mapping[int, int], held: Sequence[int]) -> dict[int, int]:
    """The node on which each lost segment comes back, the largest first. lost: their bytes. held: of each node."""
    loads = Loads()
    for node, nbytes in enumerate(held):
        loads.add(node, nbytes)
    return {
        rank: loads.give(range(len(held)), nbytes)
        for rank, nbytes in sorted(lost.items(), key=lambda one: (-one[1], one[0]))
    }


def missing_copies(
    having: Sequence[Collection[int]], nbytes: Sequence[int], domains: Sequence[str], copies: int
) -> list[tuple[int, int]]:
    """The segments that are to be copied, each with the node that gets it, so that there are `copies` beside one of each.

    having: of each segment, the nodes that have it. domains: of each node. A node in a domain that has none yet comes first, and
    among those the one that has least.
    """
    loads, found = Loads(), []
    for nodes, size in zip(having, nbytes, strict=True):
        for node in nodes:
            loads.add(node, size)
    for segment in sorted(range(len(having)), key=lambda segment: (-nbytes[segment], segment)):
        nodes = set(having[segment])
        while len(nodes) < min(copies + 1, len(domains)):
            others = [node for node in range(len(domains)) if node not in nodes]
            there = {domains[node] for node in nodes}
            elsewhere = [node for node in others if domains[node] not in there]
            node = loads.give(elsewhere or others, nbytes[segment])
            nodes.add(node)
            found.append((segment, node))
    return found
