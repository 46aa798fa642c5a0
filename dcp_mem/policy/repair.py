"""Decide what is made again after a loss of nodes: lost segments and missing copies.

Decided from what each node has, and its failure domain. The rules:

1. Large segments first; each goes to the node that has the fewest bytes by then.
2. A copy goes to a failure domain that has none yet, if there is such a domain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class Loads:
    """The bytes that each taker has got; more goes to the one that has least, or to the first."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}

    def add(self, one: int, nbytes: int) -> None:
        """Count bytes that a taker has got.

        `nbytes`: the bytes, besides those counted before.
        """
        self._taken[one] = self._taken.get(one, 0) + nbytes

    def give(self, among: Collection[int], nbytes: int) -> int:
        """Return the taker that takes so many bytes more."""
        one = min(among, key=lambda one: (self._taken.get(one, 0), one))
        self.add(one, nbytes)
        return one


def homes(lost: Mapping[int, int], held: Sequence[int]) -> dict[int, int]:
    """Return the node on which each lost segment comes back."""
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
    """Choose which segments are copied to which nodes, as (segment, node).

    `copies`: how many copies each segment has in the end, beside one original.
    """
    loads, found = Loads(), []
    for nodes, size in zip(having, nbytes, strict=True):
        for node in nodes:
            loads.add(node, size)
    for segment in sorted(range(len(having)), key=lambda segment: (-nbytes[segment], segment)):
        nodes = set(having[segment])
        while len(nodes) < min(copies + 1, len(domains)):
            free = [node for node in range(len(domains)) if node not in nodes]
            used = {domains[node] for node in nodes}
            in_new_domains = [node for node in free if domains[node] not in used]
            node = loads.give(in_new_domains or free, nbytes[segment])
            nodes.add(node)
            found.append((segment, node))
    return found
