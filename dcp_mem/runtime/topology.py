"""Which ranks share a node, and which nodes fail together."""

from __future__ import annotations

import operator
from functools import cached_property
from typing import NamedTuple

from dcp_mem.comm import Ranks, world_size
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class


@sendable
class Home(NamedTuple):
    """The node and failure domain of a rank. A plain tuple, because it is sent to all ranks."""

    node: str
    domain: str


@value_class(frozen=True, slots=False)
class Topology:
    """The nodes and failure domains of the ranks of one save or load."""

    nodes: tuple[str, ...]
    domains: tuple[str, ...]
    rank: int

    @cached_property
    def is_leader(self) -> bool:
        """Whether this rank is the first one on its node, which acts for the node."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank

    @cached_property
    def node_count(self) -> int:
        """The number of nodes."""
        return len(set(self.nodes))

    def neighbours(self, node: str) -> list[int]:
        """Return the ranks on a node."""
        return [rank for rank, other in enumerate(self.nodes) if other == node]


class JobNodes:
    """The nodes on which the job's ranks run, as far as saves have told.

    `topology` talks to the ranks, so a save calls it in its turn; any thread may read
    `of_all_ranks`.
    """

    def __init__(self, node: str) -> None:
        """Start with nothing known."""
        self._node = node
        self._of_all_ranks: frozenset[str] | None = None
        self._seen: tuple[str, ...] = ()  # what these were made of, by rank

    @property
    def of_all_ranks(self) -> frozenset[str] | None:
        """The nodes of all the job's ranks; None before a save of all of them."""
        return self._of_all_ranks

    def topology(self, ranks: Ranks, failure_domain: str = "") -> Topology:
        """Return where these ranks run; the first time, in an exchange of all of them."""
        known = ranks.cache.get(self._node)
        if known is None:
            domain = f"domain {failure_domain}" if failure_domain else f"node {self._node}"
            homes = ranks.all_reduce({ranks.rank: Home(self._node, domain)}, operator.or_)
            nodes, domains = zip(*(homes[rank] for rank in range(ranks.size)), strict=True)
            known = ranks.cache[self._node] = Topology(nodes, domains, ranks.rank)
            ranks.set_nodes(nodes)
        if known.nodes is not self._seen and ranks.size == world_size():
            self._seen, self._of_all_ranks = known.nodes, frozenset(known.nodes)
        return known
