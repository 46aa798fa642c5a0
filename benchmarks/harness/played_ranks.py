"""The other ranks of a large job, played in one process without a network.

They run eight on a node, and send what ranks send that have shards of the same tensors.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dcp_mem.comm import relay
from dcp_mem.comm.relay import Tree, tree_of
from dcp_mem.common.sendable import encoded
from dcp_mem.common.values import Segment
from dcp_mem.format.names import segment_file
from dcp_mem.planning.joint_plan import Holders, JointPlan
from dcp_mem.planning.plan_catalog import WrittenItems
from dcp_mem.planning.plan_columns import ItemKind
from dcp_mem.runtime.topology import Home
from dcp_mem.saving.values import Ballot, RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dcp_mem.comm.collectives import Channel, Join, Share

T = TypeVar("T")
RANKS_PER_NODE = 8


def nodes_of(ranks: int, first: str = "node-0") -> list[str]:
    """Return the node of each rank.

    Args:
        first: Rank 0's node.
    """
    return [
        first if rank < RANKS_PER_NODE else f"node-{rank // RANKS_PER_NODE}"
        for rank in range(ranks)
    ]


class PlayedWire:
    """Replaces the network: messages of other ranks are made beforehand, messages to them kept."""

    def __init__(self) -> None:
        self.ready: defaultdict[int, deque[Any]] = defaultdict(deque)
        self.sent: defaultdict[int, list[Any]] = defaultdict(list)

    def arrive(self, rank: int, data: Any) -> None:
        """Let a rank send these bytes to this one."""
        self.ready[rank].append(data)

    def sent_bytes(self) -> dict[int, int]:
        """Return the bytes sent so far, by receiver."""
        return {rank: sum(len(data) for data in sent) for rank, sent in self.sent.items()}

    # -- the methods of a wire ------------------------------------------------------------------

    def send(self, ranks: Sequence[int], data: Any) -> None:
        for rank in ranks:
            self.sent[rank].append(data)

    def receive(self, ranks: Sequence[int]) -> list[Any]:
        # A rank that has nothing to send says that it has come to the call.
        return [self.ready[rank].popleft() if self.ready[rank] else b"" for rank in ranks]


class Place:
    """One rank's place in the tree of ranks."""

    def __init__(self, nodes: Sequence[str], rank: int) -> None:
        self.tree: Tree = tree_of(nodes, rank)
        self.wire = PlayedWire()


@dataclass
class ManyRanks:
    """Rank 0 of a job, as `comm.collectives.Ranks`; the other ranks answer as rank 0 asks.

    Joined values are encoded and go through the tree as messages; calls that only a first save
    makes are answered right away.

    Attributes:
        size: Ranks of the job.
        calls: How often each method was called.
        played: Seconds of CPU that playing the other ranks has taken.
    """

    size: int
    rank: int = 0
    is_connected: bool = True
    cache: dict[str, Any] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    played: float = 0.0

    def __post_init__(self) -> None:
        self.key = f"{self.size} ranks"
        self.set_nodes(nodes_of(self.size))

    def leave(self, why: str) -> None:
        raise AssertionError(f"rank 0 has left the job: {why}")

    def set_nodes(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._place = Place(nodes, self.rank)

    def exchange(self, value: T) -> list[T]:
        self.calls["exchange"] += 1
        return [value, *(self._of_rank(value, rank) for rank in range(1, self.size))]

    def gather(self, value: T, share: Share[T] = list) -> list[T]:
        self.calls["gather"] += 1
        return list(share([value, *(self._of_rank(value, rank) for rank in range(1, self.size))]))

    def reduce(self, value: T, join: Join[T]) -> T | None:
        self.calls["reduce"] += 1
        others: list[T] = [self._of_rank(value, rank) for rank in range(1, self.size)]
        return join([value, *others]) if others else value

    def all_reduce(self, value: T, join: Callable[[T, T], T]) -> T:
        self.calls["all_reduce"] += 1
        start = time.thread_time()
        place = self._place
        for ranks in place.tree.below:
            place.wire.arrive(ranks[0], encoded(self._joined(value, ranks, join)))
        place.wire.sent.clear()
        self.played += time.thread_time() - start
        return relay.all_reduce(place.wire, place.tree, value, join)

    def broadcast(self, value: T) -> T:
        self.calls["broadcast"] += 1
        return relay.broadcast(self._place.wire, self._place.tree, value)

    def scatter(self, values: Sequence[T]) -> T:
        self.calls["scatter"] += 1
        return relay.scatter(self._place.wire, self._place.tree, values)

    def look(self) -> None:
        return

    def route(self, values: Mapping[int, T]) -> list[tuple[int, T]]:
        raise NotImplementedError("nothing is loaded here")

    def tell_leaders(self, data: bytes) -> Any:
        self.calls["tell_leaders"] += 1
        return relay.tell_leaders(self._place.wire, self._place.tree, data)

    def dedicated(self, purpose: str, seconds: float, variable: str, call: str = "") -> ManyRanks:
        raise NotImplementedError("nothing is replicated here")

    def channel(
        self, sender: int, receiver: int, once: str = "", transport: str = "tcp"
    ) -> Channel:
        raise NotImplementedError("nothing is replicated here")

    def _joined(self, value: Any, ranks: Sequence[int], join: Callable[[Any, Any], Any]) -> Any:
        """Return what a rank sends for itself and the ranks below it."""
        if isinstance(value, dict):  # a first save's segments, by rank
            return {rank: self._of_rank(value[self.rank], rank) for rank in ranks}
        one = self._of_rank(value, ranks[0])
        return one if len(ranks) == 1 else join(one, one)  # two ranks are joined as any number are

    def _of_rank(self, value: Any, rank: int) -> Any:
        """Return what another rank sends where rank 0 sends this."""
        if isinstance(value, Home):
            return value if rank < RANKS_PER_NODE else Home(*[f"node-{rank // RANKS_PER_NODE}"] * 2)
        if isinstance(value, Ballot):
            return value._replace(proposal=None)
        if isinstance(value, RankReport):
            return replace(value, proposal=None, node=None if rank % RANKS_PER_NODE else value.node)
        if isinstance(value, JointPlan):
            return _plan_of_rank(value, rank)
        if isinstance(value, Segment):
            save_id = value.file.rpartition("-")[2].partition(".")[0]
            return replace(
                value, rank=rank, node=self._nodes[rank], file=segment_file(rank, save_id)
            )
        if isinstance(value, WrittenItems):
            return WrittenItems(rank, value.rows, value.layout)
        return value  # receipts, publication: nothing to report


def _plan_of_rank(plan: JointPlan, rank: int) -> JointPlan:
    """Return another rank's plan, where this is rank 0's: its shards lie behind each other."""
    bases = plan.bases.astype(np.int64)
    bases[:, 1] += rank * bases[:, 1 + plan.width] * (plan.kind == ItemKind.SHARD)
    first = rank << 32
    return replace(
        plan,
        ranks=plan.ranks + rank,
        named=plan.named + first,
        tabled=plan.tabled + first,
        bases=bases,
        groups=(Holders(np.array([rank]), plan.groups[0].columns),),
    )
