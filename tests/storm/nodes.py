"""Nodes: lives of a job on three or four nodes, in which nodes are lost with their memory.

Asserted: what is restored is no older than the newest save that was told to be replicated (where
no more nodes are lost than the redundancy allows), to be complete (where none is), or to be durable
(where more are); it is one save's state, whole; ranks on nodes that live end by themselves.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import MemoryStorageWriter, NoRecoverableCheckpoint, ReplicationFailed, State
from tests.storm.lives import Notes
from tests.storm.storm import Play, Storm, Tally
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.roundtrip import assert_same, blank_of
from tests.support.checkpoints.training import state_of
from tests.support.nodes.cluster import MEMORY, Cluster, Node, running_cluster
from tests.support.nodes.inside import Program

_SAVES_OF_A_LIFE = 1000
_SAVES = 30
_PATIENCE = 10.0
_ENDED_SECONDS = 90.0
_STARTED_SECONDS = 60.0
_POLL_SECONDS = 0.005
_OUTPUT_CHARACTERS = 6000
_BASE = 320 << 10
"""Elements of each rank's base, which mostly stays as it is."""
_STAYS = 9
"""It changes with each so many-th save, past its counter of writes, frozen or not."""
_ENVIRONMENT = {"DCP_MEM_TIMEOUT": "10", "DCP_MEM_REPLICATION_TIMEOUT": "5"}


@dataclass(frozen=True)
class Redundancy:
    """Options of the writer, and how many nodes may be lost with them."""

    name: str
    options: Mapping[str, Any]
    losses: int = 1


_REDUNDANCIES = (
    Redundancy("replicas=1", {"replicas": 1}),
    Redundancy("replicas=2", {"replicas": 2}, losses=2),
    Redundancy("parity(2)", {"redundancy": dcp_mem.parity(2)}),
)


@dataclass(frozen=True, kw_only=True)
class NodeLife:
    """What a life does on each node.

    Attributes:
        frozen: What is declared frozen.
        waits: Of so many saves, each waits until it is replicated.
    """

    number: int
    job: Job
    directory: Path
    options: Mapping[str, Any]
    waits: int
    frozen: str | None


def _live(life: NodeLife) -> None:
    """Be one rank: restore and save on, until something ends that."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notes = Notes(life.directory, rank)
    store = dist.FileStore(str(life.directory / "store"), world)
    patience = timedelta(seconds=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    dist.barrier()
    notes.put("started", True)
    notes.put("restored", _restored(life.job))
    writer = life.job.writer(keep_memory=2, frozen=life.frozen, **life.options)
    base = _base(rank, 0)
    for index in range(1, _SAVES + 1):
        number = life.number * _SAVES_OF_A_LIFE + index
        notes.put("begun", number)
        if index == 1 or not number % _STAYS:
            base.data.copy_(_base(rank, number))
        name = f"step-{number}"
        state = {**state_of(number, "fsdp"), f"base.{rank}": base}
        dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
        notes.put("done", number)
        if index % life.waits == 0:
            with contextlib.suppress(ReplicationFailed):  # "skip" and "cancel" may leave one out
                writer.wait(name, State.REPLICATED, timeout=_STARTED_SECONDS)
                notes.put("replicated", number)
        notes.put("durable", _durable(writer))
    while True:  # until a node is lost
        dist.barrier()


def _restored(job: Job) -> int:
    """Load the newest; 0 where there is none."""
    rank = int(os.environ["RANK"])
    state = blank_of({**state_of(0, "fsdp"), f"base.{rank}": _base(rank, 0)})
    try:
        with job.reader() as reader:
            dcp_mem.load(state, storage_reader=reader)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if not isinstance(failure, NoRecoverableCheckpoint):
                raise
        print(error)
        return 0
    number = int(str(state["step"]).removeprefix("step "))
    assert_same({**state_of(number, "fsdp"), f"base.{rank}": _base(rank, number)}, state)
    return number


def _base(rank: int, number: int) -> torch.Tensor:
    """Return a rank's base as the save of that number has it."""
    return torch.arange(_BASE, dtype=torch.int32) * 3 + rank + number // _STAYS * 11


def _durable(writer: MemoryStorageWriter) -> int:
    names = [one.name for one in writer.status() if one.state is State.DURABLE]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


class Nodes(Storm):
    """Each series is a cluster and a job; each round a life of it, and a loss."""

    rounds_in_series = 20

    @contextlib.contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """A cluster; nodes that are lost are replaced."""
        with (
            tempfile.TemporaryDirectory(prefix="dcp_mem-storm-") as directory,
            # It ends first: its agents write into the directory.
            running_cluster(chance.choice([3, 3, 4]), memory_bytes=64 << 20) as cluster,
        ):
            yield _Losses(cluster, Path(directory), self.tally, chance).play


@dataclass
class _Promises:
    """The newest saves that may not be lost, by number."""

    complete: int = 0
    replicated: int = 0
    durable: int = 0
    begun: int = 0
    held: int = 0
    """What has to be restored next."""
    alone: set[str] = field(default_factory=set)
    """Nodes that hold what is replicated since others were lost; unless it is made redundant again,
    none of them may be lost."""


class _Losses:
    """The lives of a job on the nodes of a cluster."""

    def __init__(self, cluster: Cluster, directory: Path, tally: Tally, chance: Random) -> None:
        self._cluster, self._directory, self._tally = cluster, directory, tally
        self._redundancy = chance.choice(_REDUNDANCIES)
        url = str(directory / "storage") if chance.random() < 0.4 else None
        self._job = Job(url, str(MEMORY / "dcp_mem"))
        self._promises = _Promises()
        self._lives = 0

    def play(self, chance: Random) -> str:
        """One life, a loss, and new nodes in the place of lost ones."""
        self._lives += 1
        nodes = self._cluster.nodes
        directory = self._directory / f"life{self._lives}"
        directory.mkdir()
        life = NodeLife(
            number=self._lives,
            job=self._job,
            directory=directory,
            options={
                **self._redundancy.options,
                "persist": self._job.url is not None,
                "on_replication": chance.choice(["wait", "wait", "cancel", "skip"]),
            },
            waits=chance.choice([1, 1, 2]),
            frozen=chance.choice([None, "base.*"]),
        )
        how = chance.choices(["killed", "unplugged", "job"], [75, 8, 17])[0]
        many = self._redundancy.losses > 1 and chance.random() < 0.4
        victims = chance.sample(nodes, 2 if many else 1)
        print(f"life {self._lives}: {life}, {how}: {[one.name for one in victims]}")
        print(self._promises)
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(_running(life, rank, node, len(nodes)))
                for rank, node in enumerate(nodes)
            ]
            self._await_moment(life, ranks, chance)
            lost = [] if how == "job" else victims
            noted = self._noted(life, len(nodes))
            if how == "job":
                for one in ranks:
                    one.kill()
            _lose(lost, how)
            self._await_end([one for one in ranks if one.node not in lost], how)
        self._judge(life, len(nodes))
        self._take_in(life, noted, nodes, lost)
        for _ in lost:
            self._cluster.add()
        self._tally[f"{how}, {self._redundancy.name}"] += 1
        self._tally["nodes lost"] += len(lost)
        return f"{len(nodes)} nodes, {self._redundancy.name}, {how}"

    def _await_moment(self, life: NodeLife, ranks: "Sequence[_Rank]", chance: Random) -> None:
        """Wait for some save to begin, or to be replicated; or for the restore, or the last save.

        The last saves may stay without copies, by `on_replication`.
        """
        what = chance.choice(["started", "begun", "replicated", "replicated"])
        after = chance.choice([1, 2, 3, 5])
        notes = Notes(life.directory, chance.randrange(len(ranks)))
        deadline = time.monotonic() + _STARTED_SECONDS
        while not (_has_come(notes.get(what), after) or _has_come(notes.get("done"), _SAVES)):
            assert time.monotonic() < deadline, f"{what} {after} has not come"
            assert all(one.program.poll() is None for one in ranks), "a rank has ended by itself"
            time.sleep(_POLL_SECONDS)
        time.sleep(chance.uniform(0.0, chance.choice([0.0, 0.02, 0.1])))

    def _await_end(self, ranks: "Sequence[_Rank]", how: str) -> None:
        deadline = time.monotonic() + _ENDED_SECONDS
        started = time.monotonic()
        while running := [one.node.name for one in ranks if one.program.poll() is None]:
            assert time.monotonic() < deadline, f"ranks on {running} don't end"
            time.sleep(_POLL_SECONDS)
        if how != "job":
            self._tally["ranks that ended since a node was lost"] += len(ranks)
            print(f"all ended {time.monotonic() - started:.1f} s after the loss")

    def _noted(self, life: NodeLife, ranks: int) -> dict[str, int]:
        """What any rank was told before the loss."""
        notes = [Notes(life.directory, rank) for rank in range(ranks)]
        return {
            what: max(one.get(what) or 0 for one in notes)
            for what in ("done", "replicated", "durable")
        }

    def _judge(self, life: NodeLife, ranks: int) -> None:
        """What ranks have restored: one save, as new as was promised."""
        notes = [Notes(life.directory, rank) for rank in range(ranks)]
        found = {one.get("restored") for one in notes} - {None}
        begun = max(one.get("begun") or 0 for one in notes)
        self._tally["saves"] += max(0, begun - life.number * _SAVES_OF_A_LIFE)
        if found:
            assert len(found) == 1, f"ranks restored different saves: {found}"
            (number,) = found
            assert self._promises.held <= number <= self._promises.begun, (number, self._promises)
            self._tally["loads"] += 1
            self._promises.held = number
            self._promises.complete = number
            if not number:
                self._tally["nothing left, as more was lost than redundancy allows"] += 1
        self._promises.begun = max(self._promises.begun, begun)

    def _take_in(
        self, life: NodeLife, noted: Mapping[str, int], nodes: Sequence[Node], lost: Sequence[Node]
    ) -> None:
        """Set what the next life has to restore."""
        promises = self._promises
        promises.complete = max(promises.complete, noted["done"])
        promises.durable = max(promises.durable, noted["durable"])
        if noted["replicated"]:
            promises.replicated, promises.alone = noted["replicated"], set()
        if not lost:
            promises.held = promises.complete
            return
        gone = {node.name for node in lost}
        if len(gone) > self._redundancy.losses or gone & promises.alone:
            promises.replicated, promises.alone = 0, set()
        elif not promises.alone:
            promises.alone = {node.name for node in nodes} - gone
        promises.held = promises.complete = max(promises.durable, promises.replicated)


@dataclass(frozen=True)
class _Rank:
    """A rank that runs on a node."""

    node: Node
    program: Program
    output: Path

    def kill(self) -> None:
        """Kill it, as the job's launcher does; the node lives on."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.program.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.program.kill()


@contextlib.contextmanager
def _running(life: NodeLife, rank: int, node: Node, world: int) -> Iterator[_Rank]:
    output = life.directory / f"output{rank}"
    output.touch()
    environment = {
        **os.environ,
        **_ENVIRONMENT,
        "DCP_MEM_ROOT": life.job.memory,
        "GLOO_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": f"life{life.number}",
    }
    one = _Rank(node, Program(node.holder, output, environment, _live, life), output)
    try:
        yield one
    finally:
        one.kill()
        one.program.wait()
        print(f"--- {node.name}\n{output.read_text(errors='replace')[-_OUTPUT_CHARACTERS:]}")


def _lose(nodes: Sequence[Node], how: str) -> None:
    for node in nodes:
        if how == "unplugged":
            node.unplug()
    for node in nodes:
        node.kill()


def _has_come(value: object, after: int) -> bool:
    return value is True or (isinstance(value, int) and value % _SAVES_OF_A_LIFE >= after)
