"""The other ranks of a large job, played in one process: a rank does all that it does in a save, but for the wire.

They run eight on a node, and say what a rank says that has shards of the same tensors.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dcp_mem.format.names import segment_file
from dcp_mem.planning.columns import Kind, LocalPlan
from dcp_mem.planning.describe import Written
from dcp_mem.ranks import passing
from dcp_mem.ranks.base import Message
from dcp_mem.ranks.gloo import _GlooWire
from dcp_mem.ranks.passing import dumped
from dcp_mem.ranks.tree import Tree, tree_of
from dcp_mem.saving.agree import _Ballot, _Survey
from dcp_mem.session import Home
from dcp_mem.values import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcp_mem.ranks.base import Line, Share

T = TypeVar("T")
RANKS_PER_NODE = 8


def nodes_of(ranks: int, first: str = "node-0") -> list[str]:
    """The node of each rank. first: what rank 0 calls its own."""
    return [first if rank < RANKS_PER_NODE else f"node-{rank // RANKS_PER_NODE}" for rank in range(ranks)]


class Group:
    """In place of a gloo group: what others send lies ready, and what is sent to them is kept."""

    def __init__(self) -> None:
        self.ready: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)
        self.sent: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def arrive(self, rank: int, data: Any) -> None:
        """Let a rank send these bytes, as its own wire does it."""
        its = Group()
        _GlooWire(its).send([0], data)
        self.ready[rank].extend(its.sent[0])

    def sent_bytes(self) -> dict[int, int]:
        """So far, by the rank that it was sent to."""
        return {rank: sum(part.nbytes for part in parts) for rank, parts in self.sent.items()}

    # -- what is used of a group -------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Group:
        self.sent[rank].extend(tensors)
        return self

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Group:
        tensors[0].copy_(self.ready[rank].popleft())
        return self

    def wait(self) -> None:
        return


class Place:
    """One rank's place among others."""

    def __init__(self, nodes: Sequence[str], rank: int) -> None:
        self.tree: Tree = tree_of(nodes, rank)
        self.group = Group()
        self.wire = _GlooWire(self.group)


@dataclass
class ManyRanks:
    """Rank 0 of so many, as `dcp_mem.ranks.base.Ranks`: what the others send is made of what rank 0 has just said.

    A joined value passes through the wire, bytes and all; what only a first save asks for is answered right away. calls: what
    was asked, by name. played: seconds of CPU that playing the others has taken.
    """

    size: int
    rank: int = 0
    is_connected: bool = True
    notes: dict[str, Any] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    played: float = 0.0

    def __post_init__(self) -> None:
        self.key = f"{self.size} ranks"
        self.arrange(nodes_of(self.size))

    def leave(self, why: str) -> None:
        raise AssertionError(f"rank 0 has left the others: {why}")

    def arrange(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._place = Place(nodes, self.rank)

    def exchange(self, value: T) -> list[T]:
        self.calls["exchange"] += 1
        return [value, *(self._theirs(value, rank) for rank in range(1, self.size))]

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        self.calls["gather"] += 1
        return list(share([value, *(self._theirs(value, rank) for rank in range(1, self.size))]))

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        self.calls["all_reduce"] += 1
        start = time.thread_time()
        place = self._place
        for ranks in place.tree.below:
            place.group.arrive(ranks[0], dumped(self._joined(value, ranks, join)))
        place.group.sent.clear()
        self.played += time.thread_time() - start
        return passing.all_reduce(place.wire, place.tree, value, join)

    def broadcast(self, value: T) -> T:
        self.calls["broadcast"] += 1
        return passing.broadcast(self._place.wire, self._place.tree, value)

    def scatter(self, values: Sequence[T]) -> T:
        self.calls["scatter"] += 1
        return passing.scatter(self._place.wire, self._place.tree, values)

    def swap(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        assert not outgoing
        assert not incoming

    def tell_leaders(self, data: bytes) -> Any:
        self.calls["tell_leaders"] += 1
        return passing.tell_leaders(self._place.wire, self._place.tree, data)

    def apart(self, purpose: str, seconds: float, variable: str) -> ManyRanks:
        raise NotImplementedError("nothing is replicated here")

    def line(self, sender: int, receiver: int, once: str = "") -> Line:
        raise NotImplementedError("nothing is replicated here")

    def _joined(self, value: Any, ranks: Sequence[int], join: Callable[[Any, Any], Any]) -> Any:
        """What a rank says for all those that it speaks for."""
        if isinstance(value, dict):  # a first save's segments, by rank
            return {rank: self._theirs(value[self.rank], rank) for rank in ranks}
        theirs = self._theirs(value, ranks[0])
        return theirs if len(ranks) == 1 else join(theirs, theirs)  # two say what any number of them say

    def _theirs(self, value: Any, rank: int) -> Any:
        """What another rank says where rank 0 says this."""
        if isinstance(value, Home):
            return value if rank < RANKS_PER_NODE else Home(*[f"node-{rank // RANKS_PER_NODE}"] * 2)
        if isinstance(value, _Ballot):
            return value._replace(proposal=None)
        if isinstance(value, _Survey):
            return replace(value, proposal=None, node=None if rank % RANKS_PER_NODE else value.node)
        if isinstance(value, LocalPlan):
            step = (value.kind == Kind.SHARD) * value.extent[:, 0]
            offset = value.offset.copy()
            offset[:, 0] += rank * step
            return replace(value, offset=offset)
        if isinstance(value, Segment):
            save_id = value.file.rpartition("-")[2].partition(".")[0]
            return replace(value, rank=rank, node=self._nodes[rank], file=segment_file(rank, save_id))
        if isinstance(value, Written):
            return Written(rank, value.rows, value.layout)
        return value  # receipts, publication: nothing to report
