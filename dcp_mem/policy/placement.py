"""Decide which nodes get copies of which segments.

Decided from the nodes' failure domains and the sizes of the segments. The rules:

1. A segment and its copies lie on different nodes, and in as many failure domains as can be.
2. The nodes form a ring, nodes of one domain as far apart as can be; the copies of a node's
   segments go to the next nodes in it. So a node talks to few others, and few sets of nodes have
   all copies of a segment.
3. Where nodes make unequal numbers of bytes, segments move from fuller nodes to emptier ones, until
   no move makes the loads more even.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import islice

from dcp_mem.common.value_class import value_class


@value_class
class Original:
    """A segment on the node whose rank has saved it."""

    rank: int
    node: int  # nodes are numbered in the order of their first ranks
    nbytes: int


def place(
    originals: Sequence[Original], domains: Sequence[str], copies: int
) -> list[tuple[int, ...]]:
    """Return, for each segment, the nodes that get a copy of it.

    No node gets more bytes than another by more than a segment that it could leave to that node.

    `copies`: how many nodes get a copy; all others where there are fewer.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(domains))}
    rules = _Rules([numbers[name] for name in domains], copies)
    ring = _ring(rules.domains)
    nearest = {
        node: rules.first_of([*ring[place + 1 :], *ring[:place]], node)
        for place, node in enumerate(ring)
    }
    placed = [list(nearest[one.node]) for one in originals]
    _even_out(originals, placed, rules)
    return [tuple(nodes) for nodes in placed]


def _ring(domains: Sequence[int]) -> list[int]:
    """Return the nodes in an order that has those of a domain as far from each other as can be."""
    members = defaultdict[int, list[int]](list)
    for node, domain in enumerate(domains):
        members[domain].append(node)
    spots = [
        (number / len(nodes), domain, node)
        for domain, nodes in members.items()
        for number, node in enumerate(nodes)
    ]
    return [node for _, _, node in sorted(spots)]


class _Rules:
    """The failure-domain rules for a segment's copies; the nodes' loads play no part."""

    def __init__(self, domains: Sequence[int], copies: int) -> None:
        self.domains = domains
        self._copies = copies
        self._spread = min(len(set(domains)), copies + 1)

    def first_of(self, candidates: Sequence[int], own: int) -> list[int]:
        """Return the first candidates for copies of what a node makes, new domains first."""
        used, fresh = {self.domains[own]}, list[int]()
        for node in candidates:
            if len(used) == self._spread:
                break
            if self.domains[node] not in used:
                used.add(self.domains[node])
                fresh.append(node)
        rest = (node for node in candidates if node not in fresh)
        return [*fresh, *islice(rest, self._copies - len(fresh))]

    def closed_domains(self, having: Collection[int]) -> Collection[int]:
        """Return the domains from which no further node may join those that have the segment."""
        used = {self.domains[node] for node in having}
        return used if len(used) < self._spread else ()


def _even_out(originals: Sequence[Original], placed: Sequence[list[int]], rules: _Rules) -> None:
    """Move segments to emptier nodes until no move makes the loads more even.

    This ends: a move of bytes makes the sum of the squares of the loads smaller; a move of a
    segment without bytes leaves the loads as they are, and goes to a smaller load.
    """
    held: list[list[int]] = [[] for _ in rules.domains]
    for number, nodes in enumerate(placed):
        for node in nodes:
            held[node].append(number)
    loads = _Loads(
        [sum(originals[number].nbytes for number in numbers) for numbers in held], rules.domains
    )
    moved = True
    while moved:
        moved = False
        for node in sorted(range(len(held)), key=lambda node: (-loads.of[node], node)):
            for number in list(held[node]):
                nbytes = originals[number].nbytes
                # The common case, decided without a look at the domains.
                if loads.of[node] - loads.least() <= nbytes:
                    continue
                staying = [one for one in placed[number] if one != node]
                having = [originals[number].node, *staying]
                to = loads.emptiest([*having, node], rules.closed_domains(having))
                if to is not None and loads.of[node] - loads.of[to] > nbytes:
                    loads.change(node, -nbytes)
                    loads.change(to, nbytes)
                    held[node].remove(number)
                    held[to].append(number)
                    placed[number][placed[number].index(node)] = to
                    moved = True


class _Loads:
    """The bytes that each node gets, kept in order.

    To find the emptiest node must not take longer the more nodes there are.
    """

    def __init__(self, loads: Sequence[int], domains: Sequence[int]) -> None:
        self.of = list(loads)
        self._domains = domains
        self._members: list[list[tuple[int, int]]] = [[] for _ in set(domains)]
        for entry in sorted((nbytes, node) for node, nbytes in enumerate(loads)):
            self._members[domains[entry[1]]].append(entry)
        self._fewest = sorted(
            (members[0][0], domain) for domain, members in enumerate(self._members)
        )

    def least(self) -> int:
        return self._fewest[0][0]

    def emptiest(self, without: Collection[int], closed: Collection[int]) -> int | None:
        """Return the node with the fewest bytes, of those that may take more.

        `without`: nodes that may not. `closed`: domains whose nodes may not.
        """
        best: tuple[int, int] | None = None
        for fewest, domain in self._fewest:
            if best is not None and best[0] <= fewest:
                break
            if domain not in closed:
                entry = next(
                    (entry for entry in self._members[domain] if entry[1] not in without), None
                )
                best = entry if best is None else min(best, entry or best)
        return None if best is None else best[1]

    def change(self, node: int, nbytes: int) -> None:
        domain = self._domains[node]
        members = self._members[domain]
        before = members[0][0]
        del members[bisect_left(members, (self.of[node], node))]
        self.of[node] += nbytes
        insort(members, (self.of[node], node))
        if members[0][0] != before:
            del self._fewest[bisect_left(self._fewest, (before, domain))]
            insort(self._fewest, (members[0][0], domain))
