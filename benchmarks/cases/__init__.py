"""The cases: what is measured, against which target. One module per question.

    core         a job on one node: saves, plans, restores, memory
    storage      uploads, reads and flushes, beside sockets, SDKs and other libraries
    replication  copies on other nodes: saves, throughput, recovery, memory, decisions
    scaling      large jobs on paper: a model, and published failures replayed

A case has a function `run(settings)` that returns a section of tables. Cases import the harness and
dcp_mem, not each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.settings import Settings
    from benchmarks.harness.tables import Section


@dataclass(frozen=True, slots=True)
class Case:
    """A case by its name ("core.save"); its module is imported when it is run.

    Attributes:
        says: What it measures, in one line.
    """

    name: str
    says: str

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    def run(self, settings: Settings) -> Section:
        found: Section = import_module(f"{__name__}.{self.name}").run(settings)
        return found


@dataclass(frozen=True, slots=True)
class Group:
    """What the cases of a group have in common.

    Attributes:
        repeats: Timed runs per process, unless the command line says otherwise.
        quick_repeats: The same of a quick run.
        how_to_read: What a reader of the group's tables has to know.
    """

    repeats: int
    quick_repeats: int
    how_to_read: str


GROUPS = {
    "core": Group(
        15,
        7,
        "Times are the median of the repeats, with the middle half in brackets; with several "
        "ranks, each repeat counts as long as its slowest rank. A ratio is the median of the "
        "ratios of neighbouring runs: floor and dcp_mem are measured in turn, in one process, "
        "with the same threads. Torch's writers and readers work on the same tmpfs, in the same "
        "run. The least that any writer could reach is the floor plus `dcp.save` through a "
        "writer that does nothing.",
    ),
    "storage": Group(
        5,
        3,
        "Every route runs in a fresh process, several times; figures are medians, with the "
        "middle half in brackets. CPU-s/GB is what the client's process spends, user and system "
        "time, per 10^9 bytes; ratios are of medians. The floor is presigned requests over "
        "plain sockets; the raw SDK is botocore or azure-storage-blob without anything around "
        "it.",
    ),
    "replication": Group(
        11,
        5,
        "Nodes are network namespaces on this machine, each with a tmpfs of its own; they share "
        "its cores, with one torch thread each. Times are the median of the repeats, with the "
        "middle half in brackets; each repeat counts as long as its slowest rank. A ratio is "
        "the median of the ratios of neighbouring runs: floor and dcp_mem are measured in turn, "
        "in the same processes. The floor of what goes over the network is plain gloo between "
        "the same nodes.",
    ),
    "scaling": Group(1, 1, "Arithmetic only, from constants that the other cases measure."),
}
CASES = (
    Case("core.save", "how long a warm save blocks, beside a bare copy and torch's savers"),
    Case("core.calls", "how long each call holds training up: dcp's, ours, torch's, others'"),
    Case("core.first", "what the first saves of a process cost, with and without prepare()"),
    Case("core.planning", "what the common plan costs rank 0 of many, beside torch's planner"),
    Case("core.opening", "what opening the catalog of a large job costs each rank that loads"),
    Case("core.steady", "what a later save sends between ranks, and rank 0's CPU in large jobs"),
    Case("core.restore", "how long a restore from memory takes, beside bare reads and torch"),
    Case("core.small", "what loads of many small tensors cost: memory, directory, S3, a peer"),
    Case(
        "core.restart",
        "from a lost rank or node to the first step after it, phase by phase, beside others",
    ),
    Case("core.slowdown", "how fast a training loop runs while 20,000 tensors are flushed to disk"),
    Case("core.training", "what a training loop loses that saves at every step, call by call"),
    Case("core.finetune", "what saves cost where most of the model is frozen, with real adapters"),
    Case("core.gpu", "copies from a CUDA device, beside cudaMemcpyAsync; none without a device"),
    Case("core.memory", "what saves cost in tmpfs, in the trainer and in the agent"),
    Case("storage.uploads", "what an upload costs, route by route, to a server that drops bodies"),
    Case("storage.hashes", "what an upload costs that hashes its parts, and has nothing to reuse"),
    Case("storage.reads", "what reads into existing memory cost, route by route"),
    Case("storage.servers", "the same routes against Azurite, moto and radosgw"),
    Case("storage.replicated", "what a restore fetches when all ranks need the whole checkpoint"),
    Case("storage.trainer", "how much longer training steps take beside a flush"),
    Case("replication.blocking", "how long a save blocks that is copied to another node"),
    Case("replication.throughput", "how fast checkpoints are copied, beside plain gloo"),
    Case("replication.recovery", "how long a load takes after a node was lost"),
    Case("replication.memory", "how much tmpfs a node needs, by kind of redundancy"),
    Case("replication.deciding", "how long decisions of jobs of up to 16,384 ranks take"),
    Case("replication.connections", "sockets, connecting and agreement of up to 128 processes"),
    Case("replication.many", "saves, copies and recoveries of up to 192 processes, a node lost"),
    Case("replication.transports", "CPU of moving bytes by TCP, NIXL and plain gloo"),
    Case("scaling.model", "the tables of docs/scaling.md"),
    Case("scaling.failures", "published failure rates replayed: the tables of docs/failures.md"),
)


def chosen(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names or groups, in the order of `CASES`; all where none is named.

    Raises:
        KeyError: There is no case and no group of that name.
    """
    for name in names:
        if name not in GROUPS and name not in {case.name for case in CASES}:
            raise KeyError(name)
    return [case for case in CASES if not names or case.name in names or case.group in names]
