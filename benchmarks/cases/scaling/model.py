"""A paper model of large jobs: seconds of replication, parity, recovery and planning, and limits.

Makes the tables of docs/scaling.md. Arithmetic only: measured figures stand below as constants. The
cases replication.throughput, replication.recovery, replication.deciding and core.opening measure
them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness.tables import Part, Section, Table
from dcp_mem.comm.relay import tree_of
from dcp_mem.replicating.plan import stripes_of

if TYPE_CHECKING:
    from benchmarks.harness.settings import Settings

TITLE = "Large jobs on paper"

GB = 1e9
RANKS_PER_NODE = 8
BYTES_PER_PARAMETER = 16
"""Mixed precision with Adam: bf16 and fp32 weights, two moments, at most bf16 gradients."""
CARD = 400e9 / 8
"""Bytes per second of a node's network, each way."""
PARITY = 4
KEEP = 1

# Measured: seconds per GB (two EPYC cores, veth cables, pages of 4 KiB). Of CPU, but for LOAD.
WIRE = 0.58
"""Plain gloo, by a process that sends a GB and receives a GB."""
REPLICATION = 0.66
"""dcp_mem, the same with checksums at both ends."""
COPY = 0.075
CRC = 0.028
XOR = 0.08
LOAD = 0.74
"""Of a rank whose node was lost, from the call to the restored state."""

# Measured: seconds of CPU by ranks of the job.
PLACING = {64: 0.00036, 1024: 0.0036, 16384: 0.073}
COPIES_OF_A_SAVE = {64: 0.00002, 1024: 0.00014, 16384: 0.0023}
ELECTING = {64: 0.00043, 1024: 0.0038, 16384: 0.080}
SHARING_ON_NODE = {64: 0.001, 1024: 0.0006, 16384: 0.0006}
"""The leader of a node whose eight ranks need the segments of eight others."""
PASSING_ON = {64: 0.0012, 1024: 0.002, 16384: 0.032}
"""Rank 0, where everything moves: what nodes ask of each other, through the tree."""
FETCHING_ONCE = {64: 0.0062, 1024: 0.0064, 16384: 0.0065}
"""A node's leader, where nodes pass on what they fetch from storage; 100 ranges a rank."""
FETCHING_ONCE_PASSED_ON = {64: 0.0004, 1024: 0.0017, 16384: 0.050}
"""Rank 0, of the same: what it passes on through the tree, requests and answers."""
OPENING = {64: 0.018, 1024: 0.020, 16384: 0.047}
"""Any rank, of 1,000 items a rank: catalog read and checked; what it reads itself, looked up."""
PLANNING = {64: 0.07, 1024: 0.09, 16384: 1.1}
"""Rank 0, a first plan of 1,000 items a rank, up to the catalog in its node's memory."""
SAVING_PER_RANK = 2e-6
"""Rank 0, a save by a settled plan; measured at 1,024 ranks."""

# Assumed.
HOP = 100e-6
"""A small message from one node to another, Python at both ends."""
SURVEY = 4096
"""Bytes that a node's memory is described by: its checkpoints."""
UNPICKLING = 100e6
"""Bytes per second that rank 0 unpickles of surveys."""
FAN_OUT = 8
CHANNEL_SOCKETS = 2
"""Of a channel: one that listens, and the connection."""
STORE_SOCKETS = 2
"""Of a rank to the job's store: torch's, and one that copies meet by."""
MEASURED, COMPUTED = "measured", "computed"
"""In one process that plays the other ranks; by this model."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A job.

    Attributes:
        parameters: Of its model.
    """

    gpus: int
    parameters: float

    @property
    def name(self) -> str:
        return f"{self.gpus:,} GPUs, {self.parameters / 1e9:.0f}B"

    @property
    def nodes(self) -> int:
        return self.gpus // RANKS_PER_NODE

    @property
    def state(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER

    @property
    def of_rank(self) -> float:
        return self.state / self.gpus

    @property
    def of_node(self) -> float:
        return self.state / self.nodes

    @property
    def levels(self) -> int:
        """Levels of the tree along which ranks agree: leaders of nodes, and their neighbours."""
        reached, width, found = 1, 1, 1
        while reached < self.nodes:
            width *= FAN_OUT
            reached += width
            found += 1
        return found


CLUSTERS = (Cluster(64, 8e9), Cluster(1024, 70e9), Cluster(16384, 405e9))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of each of several things that happen at the same time."""

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.parts.values())

    @property
    def text(self) -> str:
        return f"{_duration(self.seconds)}, {max(self.parts, key=lambda name: self.parts[name])}"


def replication(cluster: Cluster) -> Estimate:
    """Copies of everything on one more node.

    Each rank has a channel out and a channel in, with an I/O thread each.
    """
    per_channel = cluster.of_rank / GB
    return Estimate(
        {
            "the card": cluster.of_node / CARD,
            "the I/O thread of a channel": per_channel * WIRE / 2,
            "the thread that sums": per_channel * CRC,
        }
    )


def parity(cluster: Cluster) -> Estimate:
    """Every node sends a k-th of its bytes to each node of its group, which XORs what it gets."""
    per_channel = cluster.of_rank / PARITY / GB
    return Estimate(
        {
            "the card": cluster.of_node / CARD,
            "the I/O thread of a channel": per_channel * WIRE / 2,
            "the thread that XORs and sums": cluster.of_rank / GB * (XOR + 2 * CRC),
        }
    )


def recovery(cluster: Cluster) -> Estimate:
    """The bytes of a lost node, from the node with their copies: one sender for each rank."""
    return Estimate(
        {"the card": cluster.of_node / CARD, "a rank's steps": cluster.of_rank / GB * LOAD}
    )


def recovery_at_best(cluster: Cluster) -> Estimate:
    """The bytes of a lost node, only received and copied."""
    return Estimate(
        {
            "the card": cluster.of_node / CARD,
            "a rank's threads": cluster.of_rank / GB * (WIRE / 2 + COPY),
        }
    )


def recovery_from_parity(cluster: Cluster) -> Estimate:
    """The bytes of a lost node from k nodes, whose pieces the new node XORs: k times the bytes."""
    inward = PARITY * cluster.of_rank / GB
    return Estimate(
        {
            "the card": PARITY * cluster.of_node / CARD,
            "a rank's threads": inward * (WIRE / 2 + XOR + CRC),
        }
    )


def resharding(cluster: Cluster) -> Estimate:
    """Every rank gets its bytes from another node and sends as many, once all know what."""
    told = SHARING_ON_NODE[cluster.gpus] + PASSING_ON[cluster.gpus] + 3 * agreement(cluster)
    return Estimate(
        {
            "the card": told + cluster.of_node / CARD,
            "a rank's steps": told + cluster.of_rank / GB * LOAD,
        }
    )


def sockets(cluster: Cluster) -> int:
    """Of a leader that has most of them, where nodes keep parity of each other's segments."""
    nodes = [str(rank // RANKS_PER_NODE) for rank in range(cluster.gpus)]
    flat = [str(rank) for rank in range(cluster.gpus)]  # loads don't know the nodes
    sizes = [int(cluster.of_rank)] * cluster.gpus
    leaders = range(0, min(cluster.gpus, 4 * RANKS_PER_NODE), RANKS_PER_NODE)
    return STORE_SOCKETS + max(
        2 * _tree_sockets(nodes, rank)  # saves, copies
        + _tree_sockets(flat, rank)
        + CHANNEL_SOCKETS * _channels(nodes, sizes, rank)
        for rank in leaders
    )


def _tree_sockets(nodes: list[str], rank: int) -> int:
    """To a rank's parent and its children, and one that listens."""
    tree = tree_of(nodes, rank)
    return 1 + len(tree.children) + (tree.parent is not None)


def _channels(nodes: list[str], sizes: list[int], rank: int) -> int:
    """Of a rank, to and from those that keep parity of the same bytes."""
    pairs = {
        (share.rank, stripe.keeper)
        for stripe in stripes_of(nodes, nodes, sizes, PARITY, nodes[rank])
        for share in stripe.shares
        if share.rank != stripe.keeper
    }
    return sum(rank in pair for pair in pairs)


def survey(cluster: Cluster) -> float:
    """What each node has, up the tree to rank 0."""
    return cluster.levels * HOP + cluster.nodes * SURVEY * (1 / UNPICKLING + 1 / CARD)


def agreement(cluster: Cluster) -> float:
    """Up the tree and down again."""
    return 2 * cluster.levels * HOP


def run(_settings: Settings) -> Section:
    return Section(TITLE, [Part([], title="estimates", tables=tables())])


def tables() -> list[Table]:
    names = [cluster.name for cluster in CLUSTERS]

    def line(what: str, *cells: str) -> tuple[str, ...]:
        return (what, *cells)

    sizes = Table(
        ("job", *names),
        [
            line("nodes", *(f"{cluster.nodes:,}" for cluster in CLUSTERS)),
            line("state", *(f"{cluster.state / 1e12:.2f} TB" for cluster in CLUSTERS)),
            line(
                "of a GPU, of a node",
                *(f"{c.of_rank / GB:.2f} GB, {c.of_node / GB:.1f} GB" for c in CLUSTERS),
            ),
            line(
                f"tmpfs of a node, keep={KEEP}: no copies, parity({PARITY}), replicas=1",
                *(
                    ", ".join(
                        f"{c.of_node / GB * (KEEP + 1) * times:.0f} GB"
                        for times in (1, 1 + 1 / PARITY, 2)
                    )
                    for c in CLUSTERS
                ),
            ),
        ],
    )
    bytes_moved = Table(
        ("bytes: seconds, what bounds them", *names),
        [
            line("replication, replicas=1", *(replication(cluster).text for cluster in CLUSTERS)),
            line(
                "CPU of a node for it", *(_duration(c.of_node / GB * REPLICATION) for c in CLUSTERS)
            ),
            line("parity(4)", *(parity(cluster).text for cluster in CLUSTERS)),
            line(
                "a lost node's bytes, from copies, as measured",
                *(recovery(cluster).text for cluster in CLUSTERS),
            ),
            line(
                "the same, received and copied only",
                *(recovery_at_best(cluster).text for cluster in CLUSTERS),
            ),
            line(
                "a lost node's bytes, from parity(4)",
                *(recovery_from_parity(cluster).text for cluster in CLUSTERS),
            ),
            line(
                "everything moves to other nodes",
                *(resharding(cluster).text for cluster in CLUSTERS),
            ),
        ],
    )
    decisions = Table(
        ("decisions: seconds", "how", *names),
        [
            line(
                f"sockets of a rank, at most, with parity({PARITY})",
                COMPUTED,
                *(f"{sockets(c)}" for c in CLUSTERS),
            ),
            line(
                "keys that a set puts into the job's store, and look-ups",
                COMPUTED,
                *(f"{c.nodes:,} and {c.gpus - 1:,}" for c in CLUSTERS),
            ),
            line("survey, up the tree", COMPUTED, *(_duration(survey(c)) for c in CLUSTERS)),
            line(
                "all-reduce along the tree", COMPUTED, *(_duration(agreement(c)) for c in CLUSTERS)
            ),
            *(
                line(what, MEASURED, *(_duration(seconds[c.gpus]) for c in CLUSTERS))
                for what, seconds in {
                    "placing copies, once": PLACING,
                    "looking them up, each time": COPIES_OF_A_SAVE,
                    "electing, rank 0": ELECTING,
                    "opening a catalog, each rank": OPENING,
                    "sharing out what a node needs, its leader": SHARING_ON_NODE,
                    "what nodes ask of each other, rank 0": PASSING_ON,
                    "fetching once in all (`broadcast=True`), a node's leader": FETCHING_ONCE,
                    "the same, rank 0": FETCHING_ONCE_PASSED_ON,
                    "a first plan, rank 0": PLANNING,
                }.items()
            ),
            line(
                "a later save, rank 0",
                "measured at 1,024",
                *(_duration(SAVING_PER_RANK * c.gpus) for c in CLUSTERS),
            ),
        ],
    )
    return [sizes, bytes_moved, decisions]


def _duration(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"
