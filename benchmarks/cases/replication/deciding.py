"""How long the decisions of large jobs take: placement of copies, election, sharing out.

Pure functions, on one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness.clock import seconds
from benchmarks.harness.played_ranks import RANKS_PER_NODE, PlayedWire, nodes_of
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample
from benchmarks.harness.settings import MIB
from benchmarks.harness.tables import RATE, UNIT_IN_COLUMN, Figure, Part, Section, Table, attempt
from dcp_mem.comm import relay
from dcp_mem.comm.relay import tree_of
from dcp_mem.common.sendable import decoded, encoded
from dcp_mem.format.checksums import checksum
from dcp_mem.format.names import rank_of, segment_file
from dcp_mem.policy.election import FoundCheckpoint, elect
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.parity import groups
from dcp_mem.policy.sharing import (
    JointSpan,
    LoadShare,
    Nodes,
    dealt,
    join_nodes,
    joint,
    requests,
    share_out_on_node,
)
from dcp_mem.policy.slots import capacity_for
from dcp_mem.replicating.plan import copies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings
    from dcp_mem.policy.pieces import Extent
    from dcp_mem.policy.sharing import Extents

TITLE = "Decisions of large jobs"
SIZES = (64, 1024, 4096, 16384)
SEGMENT = 512 * MIB
ITEM = MIB // 2
CHECKPOINTS = 2
PARITY = 4
SAVE_ID = "0" * 8
ONE_SECOND = 1.0
BYTES = 128 * MIB
LARGE_PARTS = 100
"""Parts of a segment that a receiver reads each to where it belongs: at most about so many."""
REPLICAS = 32
"""Of each shard, with `broadcast=True`; fewer where the job has fewer nodes."""
GAP = 2 * MIB
"""Bytes between parts that are requests of their own."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Spec:
    sizes: Sequence[int]
    repeats: int


@dataclass(frozen=True, slots=True)
class Decided:
    """What decisions take, by the size of the job and by decision.

    Attributes:
        seconds: Of CPU.
        nbytes: Of the messages that carry a decision.
    """

    seconds: Mapping[int, Mapping[str, float]]
    nbytes: Mapping[int, Mapping[str, int]]


def run(settings: Settings) -> Section:
    sizes = SIZES[:2] if settings.quick else SIZES
    return Section(
        TITLE,
        [
            attempt("deciding", "eight ranks on a node", partial(_part, Spec(sizes, 3))),
            attempt(
                "deciding",
                f"what a thread does with {BYTES // MIB} MiB",
                partial(_bytes_part, settings.repeats),
            ),
        ],
    )


def _part(spec: Spec) -> Part:
    (found,) = in_fresh_processes(_measure, spec)
    columns = ("what", *(f"{size:,} ranks" for size in spec.sizes))
    times = [
        (what, *(_duration(found.seconds[size][what]) for size in spec.sizes))
        for what in found.seconds[spec.sizes[0]]
    ]
    sizes = [
        (what, *(f"{found.nbytes[size][what]:,} B" for size in spec.sizes))
        for what in found.nbytes[spec.sizes[0]]
    ]
    notes = [
        (
            f"seconds of CPU, least of {spec.repeats}; {SEGMENT // MIB} MiB a rank, {CHECKPOINTS} "
            "checkpoints in memory, replicas=1; a node was lost, or every rank needs another "
            "node's bytes"
        ),
    ]
    return Part(
        [],
        notes,
        tables=[
            Table(columns, times),
            Table(("message", *columns[1:]), sizes),
        ],
    )


def _duration(took: float) -> str:
    return f"{took:.2f} s" if took >= ONE_SECOND else f"{took * 1e3:.2f} ms"


def _measure(_rank: Rank, spec: Spec) -> Decided:
    took: dict[int, dict[str, float]] = {}
    nbytes: dict[int, dict[str, int]] = {}
    for size in spec.sizes:
        job = _Job(size)
        took[size] = {what: _least(act, spec.repeats) for what, act in job.decisions().items()}
        nbytes[size] = {what: len(encoded(value)) for what, value in job.messages().items()}
    return Decided(took, nbytes)


def _least(act: Callable[[], object], repeats: int) -> float:
    """Return the least seconds of CPU of several runs; one run is enough where it takes long."""
    found: list[float] = []
    while len(found) < repeats and sum(found) < ONE_SECOND:
        start = time.thread_time()
        act()
        found.append(time.thread_time() - start)
    return min(found)


class _Job:
    """A job with a copy of each node's segments on one more node; node 1 was lost and is empty."""

    def __init__(self, size: int) -> None:
        self.nodes = tuple(nodes_of(size))
        self.domains = ("",) * size
        self.sizes = (SEGMENT,) * size
        self.files = [segment_file(rank, SAVE_ID) for rank in range(size)]
        self.copies = copies_of(self.nodes, self.nodes, self.sizes, 1)
        of_node: dict[str, set[int]] = {}
        for rank, node in enumerate(self.nodes):
            of_node.setdefault(node, set()).add(rank)
        for copy in self.copies:
            of_node[self.nodes[copy.receiver]].add(copy.sender)
        self.lost = self.nodes[RANKS_PER_NODE]
        self.has = {
            node: frozenset() if node == self.lost else frozenset(ranks)
            for node, ranks in of_node.items()
        }
        members: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            members.setdefault(node, []).append(rank)
        holders: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for node, segments in self.has.items():
            for segment in segments:
                holders[segment] += members[node]
        self.holders = holders
        self.edges = range(0, SEGMENT + 1, ITEM)

    def decisions(self) -> Mapping[str, Callable[[], object]]:
        inventories = self.inventories()
        lost, moved = self.needs_of_the_lost(), self.needs_of_all()
        parted = self.needs_of_all(LARGE_PARTS)
        domains = list(dict.fromkeys(self.nodes))
        return {
            "who gets whose copies, at first (copies_of)": lambda: copies_of.__wrapped__(
                self.nodes, self.nodes, self.sizes, 1
            ),
            "the same in each later save, and the copies for this node": self.copies_of_a_save,
            "who shares parity with whom (groups)": lambda: groups(domains, PARITY),
            "who speaks to whom (tree_of)": lambda: tree_of(self.nodes, 0),
            "which checkpoint (elect)": lambda: elect(inventories, []),
            "the election's result, encoded and decoded": lambda: decoded(
                encoded(elect(inventories, []))
            ),
            "which ranks each node has (all_reduce), rank 0": self.joining_nodes(),
            "who sends what to an empty node: its leader (share_out_on_node)": (
                lambda: self.shared_out_on_node(lost, RANKS_PER_NODE)
            ),
            "who sends what where everything moves: a leader": (
                lambda: self.shared_out_on_node(moved, 0)
            ),
            "the same: rank 0 passes on what nodes ask of each other (route)": self.routing(moved),
            f"the same, {LARGE_PARTS} parts of each segment: a leader": (
                lambda: self.shared_out_on_node(parted, 0)
            ),
            f"the same, {LARGE_PARTS} parts of each segment: rank 0 (route)": self.routing(parted),
            **_Replicated(self.nodes, 1).decisions(""),
            **_Replicated(self.nodes, LARGE_PARTS).decisions(f", {LARGE_PARTS} parts of each"),
        }

    def messages(self) -> Mapping[str, object]:
        inventories = self.inventories()
        return {
            "a rank's findings, to all ranks (exchange)": inventories[0],
            "the recovery plan, from rank 0 to all (broadcast)": elect(inventories, []),
            "what an empty node's rank needs, to its leader (route)": self.needs_of_the_lost()[
                RANKS_PER_NODE
            ],
            "all shares for an empty node, from its leader (route)": self.shared_out_on_node(
                self.needs_of_the_lost(), RANKS_PER_NODE
            ),
        }

    def copies_of_a_save(self) -> object:
        """Find the copies as `dcp_mem.saving.pipeline` does, several times in each save."""
        sizes = tuple(capacity_for(nbytes) for nbytes in self.sizes)
        found = copies_of(self.nodes, self.nodes, sizes, 1)
        return [copy for copy in found if self.nodes[copy.receiver] == self.nodes[0]]

    def inventories(self) -> list[list[FoundCheckpoint]]:
        return [
            [
                FoundCheckpoint(
                    name=f"step-{number}",
                    save_id=SAVE_ID,
                    place=Place(number=SaveNumber(1, number)),
                    count=len(self.nodes),
                    segments=self.has[node],
                )
                for number in range(CHECKPOINTS)
                if self.has[node]
            ]
            for node in self.nodes
        ]

    def needs_of_the_lost(self) -> list[Extents]:
        return [
            {self.files[rank]: [(0, SEGMENT)]} if node == self.lost else {}
            for rank, node in enumerate(self.nodes)
        ]

    def needs_of_all(self, parts: int = 1) -> list[Extents]:
        """Every rank needs what a rank half the job away has saved, whole or in so many parts."""
        size, part = len(self.nodes), SEGMENT // parts
        extents = [(number * part, (number + 1) * part) for number in range(parts)]
        return [{self.files[(rank + size // 2) % size]: extents} for rank in range(size)]

    def shared_out_on_node(self, needs: Sequence[Extents], leader: int) -> Mapping[int, LoadShare]:
        """Share out what the ranks of one node need, as their leader does."""
        members = {rank: needs[rank] for rank in range(leader, leader + RANKS_PER_NODE)}
        return share_out_on_node(
            members,
            lambda file: self.edges,
            holders=self.holding,
            turn=leader // RANKS_PER_NODE,
        )

    def joining_nodes(self) -> Callable[[], object]:
        """Return what rank 0 does when all ranks learn which ranks each node has."""
        tree = tree_of([str(rank) for rank in range(len(self.nodes))], 0)

        def of(ranks: Sequence[int]) -> Nodes | None:
            own: list[Nodes | None] = [{self.nodes[rank]: (rank,)} for rank in ranks]
            return reduce(join_nodes, own)

        messages = [encoded(of(ranks)) for ranks in tree.below]

        def join() -> object:
            wire = PlayedWire()
            for child, message in zip(tree.children, messages, strict=True):
                wire.arrive(child, message)
            return relay.all_reduce(wire, tree, of([0]), join_nodes)

        return join

    def holding(self, file: str) -> Sequence[int]:
        return self.holders[rank_of(file)]

    def routing(self, needs: Sequence[Extents]) -> Callable[[], object]:
        """Return what rank 0 does when all leaders tell ranks of other nodes what to send."""
        return routed_by_rank_0(
            len(self.nodes), lambda leader: self.shared_out_on_node(needs, leader)
        )


def routed_by_rank_0(
    size: int, told: Callable[[int], Mapping[int, object]]
) -> Callable[[], object]:
    """Return what rank 0 does when all leaders route values.

    Loads go along a tree in which each rank is a node of its own.

    Args:
        size: Ranks of the job.
        told: Returns what a leader has for which ranks.
    """
    tree = tree_of([str(rank) for rank in range(size)], 0)

    def from_below(ranks: Sequence[int]) -> object:
        among, found = set(ranks), dict[int, list[tuple[int, bytes]]]()
        for leader in ranks:
            if leader % RANKS_PER_NODE == 0:
                for rank, value in told(leader).items():
                    if rank not in among:
                        found.setdefault(rank, []).append((leader, encoded(value)))
        return encoded(found)

    messages = [from_below(ranks) for ranks in tree.below]

    def route() -> object:
        wire = PlayedWire()
        for child, message in zip(tree.children, messages, strict=True):
            wire.arrive(child, message)
        return relay.route(wire, tree, told(0))

    return route


class _Replicated:
    """A load from storage with `broadcast=True`: several nodes need the same shards.

    Args:
        nodes: Of each rank.
        parts: Requests of each rank.
    """

    def __init__(self, nodes: Sequence[str], parts: int) -> None:
        self._size = len(nodes)
        self._leaders = range(0, self._size, RANKS_PER_NODE)
        shards = self._size // min(REPLICAS, len(self._leaders))
        part = SEGMENT // parts
        extents = [(number * part, (number + 1) * part - GAP) for number in range(parts)]
        self._needs = {
            rank: {segment_file(rank % shards, SAVE_ID): extents} for rank in range(self._size)
        }
        self._nodes = {leader: range(leader, leader + RANKS_PER_NODE) for leader in self._leaders}
        self._requests = {leader: self._requested(leader) for leader in self._leaders}
        self._asked: dict[int, dict[int, Mapping[str, list[Extent]]]] = {}
        for leader, of_homes in self._requests.items():
            for home, extents_by_file in of_homes.items():
                self._asked.setdefault(home, {})[leader] = extents_by_file
        self._told = {home: joint(asked) for home, asked in self._asked.items()}

    def decisions(self, how: str) -> Mapping[str, Callable[[], object]]:
        """Return what ranks do, by what it is.

        Args:
            how: What is needed, as words for the table.
        """
        busiest = max(self._asked, key=lambda home: sum(map(len, self._told[home].values())))
        told: dict[int, dict[int, list[JointSpan]]] = {}
        for home, by_leader in self._told.items():
            for leader, spans in by_leader.items():
                told.setdefault(leader, {})[home] = spans
        of_first = [span for spans in told[0].values() for span in spans]
        what = f"what nodes fetch once in all{how}"
        return {
            f"{what}: the busiest home (joint)": lambda: joint(self._asked[busiest]),
            f"{what}: a leader (dealt)": lambda: self._shared_out(of_first),
            f"{what}: rank 0 passes on requests (route)": routed_by_rank_0(
                self._size, lambda leader: self._requests[leader]
            ),
            f"{what}: rank 0 passes on answers (route)": routed_by_rank_0(
                self._size, lambda leader: self._told.get(leader, {})
            ),
        }

    def _requested(self, leader: int) -> Mapping[int, Mapping[str, list[Extent]]]:
        ranks = self._nodes[leader]
        return requests([self._needs[rank] for rank in ranks], self._leaders)

    def _shared_out(self, told: Sequence[JointSpan]) -> object:
        """Ask, deal what homes have told, and share out; of the first leader."""
        self._requested(0)
        edges = range(0, SEGMENT + 1, ITEM)
        return share_out_on_node(
            {rank: self._needs[rank] for rank in self._nodes[0]},
            lambda file: edges,
            passed=dealt(0, self._nodes, told, lambda file: edges),
        )


def _bytes_part(repeats: int) -> Part:
    (found,) = in_fresh_processes(_measure_bytes, repeats)
    lines = [
        (
            what,
            Figure.of(Sample(tuple(BYTES / value / GB for value in sample.values)), UNIT_IN_COLUMN),
        )
        for what, sample in found.items()
    ]
    return Part([], tables=[Table(("what", RATE), lines)])


def _measure_bytes(rank: Rank, repeats: int) -> dict[str, Sample]:
    one, other = (np.random.default_rng(seed).integers(0, 255, BYTES, np.uint8) for seed in (1, 2))
    wide = one.view(np.uint64), other.view(np.uint64)
    return rank.in_turn(
        {
            "copy": lambda: seconds(lambda: np.copyto(other, one)),
            "CRC32C": lambda: seconds(lambda: checksum(memoryview(one.data))),
            "XOR into one of two": lambda: seconds(lambda: np.bitwise_xor(*wide, out=wide[1])),
        },
        repeats=repeats,
        warm_ups=1,
    )
