"""Nodes are lost at named points of saves, replication, flushes and loads.

What DESIGN promises to be recoverable is then loaded.

Each case is a life of its own: a job saves step-1 and has it REPLICATED, then one node stops in the
middle of what happens to step-2, or of a load, and is lost. Those that live must end by themselves;
then the job starts again, in another shape, loads and goes on. A few cases are the gate's, all of
them run with `bash .ci/test --all`.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from tests.support.checkpoints.jobs import Job, wait_until
from tests.support.checkpoints.training import load_newest, save
from tests.support.nodes.cluster import Cluster, Node, job_on_nodes
from tests.support.nodes.inside import is_rank
from tests.support.processes import faults
from tests.support.variants import VARIANT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_STARTED_SECONDS = 90.0
_ENDED_SECONDS = 60.0
_PATIENCE = 10.0
"""Seconds that ranks wait for those that are lost."""
# torchrun's rendezvous is off the nodes, lest it end ranks when its host is lost; the store of the
# ranks is on the first node.
_ENVIRONMENT = {
    "DCP_MEM_TIMEOUT": "10",
    "DCP_MEM_REPLICATION_TIMEOUT": "5",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_POINT = "DCP_MEM_TEST_POINT"
_SLOW = "20mbit"

REDUNDANCIES: Mapping[str, Mapping[str, Any]] = {
    "replicas=1": {"replicas": 1},
    "replicas=2": {"replicas": 2},
    "parity(2)": {"redundancy": dcp_mem.parity(2)},
    "parity(4)": {"redundancy": dcp_mem.parity(4)},
}


@dataclass(frozen=True)
class Case:
    """One life.

    ranks: on each node. point: where a process of the node `lost` stops, the first time after
    step-1; "load " before it: in a load, after a restart. more: nodes that are lost with it. how:
    "killed", "unplugged" before that, or "throttled" all the time.
    back: in which shape the job starts again. keep: complete checkpoints that stay in memory.
    """

    redundancy: str
    point: str
    nodes: int = 3
    ranks: int = 1
    lost: int = -1
    more: int = 0
    how: str = "killed"
    back: str = "replaced"
    keep: int = 2

    @property
    def name(self) -> str:
        """What follows "load " in the point."""
        return self.point.removeprefix("load ")

    @property
    def is_in_load(self) -> bool:
        return self.point != self.name

    @property
    def newest(self) -> set[int]:
        """What may be the newest checkpoint afterwards, by what has been promised.

        A save's segments pass from a node only once it is complete everywhere. What isn't
        REPLICATED may be there nevertheless.
        """
        if self.is_in_load or self.name.startswith("flush.") or self.name == "replicate.recorded":
            return {2}
        return {1, 2} if self.name.startswith("replicate.") or self.name == "save.finished" else {1}

    def __str__(self) -> str:
        lost = f"node {self.lost % self.nodes} of {self.nodes}x{self.ranks}" + (
            f" and {self.more} more" * bool(self.more)
        )
        return f"{self.redundancy}-{lost} {self.how} at {self.point}-{self.back}"


BACK = ("replaced", "moved", "fewer", "more", "other ranks", "tp", "hsdp")
_COMMITTER_ONLY = {"flush.manifest", "flush.commit", "flush.committed"}
_IN_LOAD = (
    *("recover.surveyed", "recover.told", "load.batch", "mend.begun", "mend.done"),
    *("replicate.started", "replicate.received", "replicate.sealed"),
)
"""Points that a node passes that has come in the place of a lost one; it sends nothing."""
SHORT = [
    Case("replicas=1", "stage.copied", nodes=2, lost=0, how="unplugged", keep=1),
    Case("replicas=1", "replicate.chunk", how="throttled", back="moved"),
    Case("parity(2)", "replicate.received", how="unplugged", back="tp"),
    Case("replicas=2", "replicate.recorded", lost=0, more=1, back="other ranks"),
    Case("parity(2)", "load mend.done", back="more"),
    Case("replicas=1", "flush.commit", nodes=2, lost=0),
]
LONGER = [
    Case("parity(4)", "complete.manifest", nodes=2, ranks=2, back="fewer", keep=1),
    Case("replicas=1", "load load.batch", nodes=2, how="unplugged", back="hsdp"),
]


def _matrix() -> Iterator[Case]:
    """Every point with every redundancy; what else there is takes turns, each at its own pace."""
    sizes = {
        "replicas=1": (2, 3, 4),
        "replicas=2": (3, 4, 2),
        "parity(2)": (3, 4, 2),
        "parity(4)": (5, 2, 3),
    }
    points = [
        point
        for point in faults.POINTS
        if point.startswith(("save", "stage", "complete", "replicate", "flush"))
        and point != "replicate.reused"  # all of the state changes
    ]
    points += [f"load {point}" for point in _IN_LOAD]
    for number, (point, redundancy) in enumerate(itertools.product(points, REDUNDANCIES)):
        turn = number // len(REDUNDANCIES) + number
        nodes = sizes[redundancy][turn % 3]
        case = Case(
            redundancy,
            point,
            nodes,
            ranks=1 + (turn // 2 % 2 if nodes < 4 else 0),
            lost=0 if point in _COMMITTER_ONLY else (-1, 0, 1)[turn // 3 % 3],
            more=int(redundancy == "replicas=2" and nodes > 2 and turn % 2),
            how=("killed", "unplugged", "throttled", "unplugged")[turn % 4],
            back=BACK[turn % 7],
            keep=1 + turn % 2,
        )
        if point != "load mend.done" or redundancy.startswith("parity"):
            yield case


def _cases() -> Iterator[Any]:
    for case in SHORT:
        yield pytest.param(case, id=str(case), marks=pytest.mark.nodes(case.nodes))
    for case in LONGER:
        yield pytest.param(case, id=str(case), marks=[pytest.mark.nodes(case.nodes), VARIANT])
    for case in _matrix():
        yield pytest.param(
            case, id=f"matrix-{case}", marks=[pytest.mark.nodes(case.nodes), VARIANT]
        )


# -- what runs on the nodes ------------------------------------------------------------------------


@contextlib.contextmanager
def _ending(run: Path) -> Iterator[None]:
    """Write down how this rank ends: in an error, since nothing else ends it."""
    try:
        yield
        while True:
            dist.barrier()
    except (Exception, CheckpointException) as error:
        ended = Path(run, f"ended-{socket.gethostname()}-{os.environ['LOCAL_RANK']}")
        ended.write_text(f"{type(error).__name__}: {error}")


def _train(run: Path, job: Job, case: Case) -> None:
    """Save twice, and go on until a node is lost."""
    options = REDUNDANCIES[case.redundancy]
    with _ending(run):
        first = job.writer(keep_memory=case.keep, persist=False, **options)
        first.wait(save(first, 1), "replicated", timeout=60)
        dist.barrier()
        if dist.get_rank() == 0:
            Path(run, "safe").touch()
        wait_until(Path(run, "go").exists)
        faults.arm(os.environ.get(_POINT, ""))
        writer = job.writer(keep_memory=case.keep, **options)
        writer.wait(save(writer, 2), "replicated", timeout=60)
        Path(run, f"replicated-{dist.get_rank()}").touch()


def _load_until_lost(run: Path, job: Job) -> None:
    with _ending(run):
        number, _ = load_newest(job, "fsdp")
        assert number == 2


def _resume(job: Job, case: Case, sharding: str) -> tuple[int, str, bool]:
    """Load, and save on.

    Returns the number that was loaded, its sources, and whether the next save is REPLICATED.
    """
    number, report = load_newest(job, sharding)
    writer = job.writer(keep_memory=case.keep, persist=False, **REDUNDANCIES[case.redundancy])
    name = save(writer, number + 1, sharding)
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        writer.wait(name, "replicated", timeout=60)
    is_replicated = writer.status()[0].is_replicated
    writer.close()
    return number, report.source, is_replicated


# -- what happens to the nodes ---------------------------------------------------------------------


@pytest.mark.parametrize("case", list(_cases()))
def test_a_job_that_loses_nodes_loads_what_was_promised(
    cluster: Cluster, tmp_path: Path, case: Case
) -> None:
    job = job_on_nodes(tmp_path / "storage" if case.name.startswith("flush.") else None)
    store = cluster.serve_store()
    survivors = _lose_while_saving(cluster, tmp_path, job, case, store)
    if case.is_in_load:
        survivors = _lose_while_loading(cluster, tmp_path, job, case, store)
    fresh = [cluster.add() for _ in range(_wanted_on_return(case) - len(survivors))]
    nodes = [*fresh, *reversed(survivors)] if case.back == "moved" else [*survivors, *fresh]
    if case.how == "throttled":
        nodes[0].throttle(_SLOW)
    ranks = 3 - case.ranks if case.back == "other ranks" else case.ranks
    sharding = case.back if case.back in ("tp", "hsdp") else "fsdp"
    results = cluster.launch(
        _resume, job, case, sharding, nodes=nodes, ranks_per_node=ranks
    ).results()
    assert len(results) == len(nodes) * ranks
    assert len(set(results)) == 1
    number, source, is_replicated = results[0]
    assert number in case.newest
    assert is_replicated == (len(nodes) > 1)
    if len(nodes) == 1:
        assert source == "memory"
    elif fresh:
        assert source == "memory and peers"


def _wanted_on_return(case: Case) -> int:
    return case.nodes + {"fewer": -1 - case.more, "more": 1}.get(case.back, 0)


def _lose_while_saving(
    cluster: Cluster, directory: Path, job: Job, case: Case, store: str
) -> list[Node]:
    """Lose nodes in a save, and return those that are left of the ones that saved.

    Where the loss is to come in the load, all nodes are left, or all but one.
    """
    run = directory / "saving"
    run.mkdir()
    nodes, victim = cluster.nodes, cluster.nodes[case.lost]
    at_point = {} if case.is_in_load else {_variable(case): f"{case.name}:stop:1"}
    saving = cluster.launch(
        _train,
        run,
        job,
        case,
        ranks_per_node=case.ranks,
        env=_ENVIRONMENT,
        env_of={victim: at_point},
        store=store,
        patience=_PATIENCE,
    )
    wait_until((run / "safe").exists, "step-1 is safe", _STARTED_SECONDS)
    if case.how == "throttled":
        victim.throttle(_SLOW)
    (run / "go").touch()
    if case.is_in_load or case.name.startswith("flush."):
        everybody = len(nodes) * case.ranks
        wait_until(
            lambda: len(list(run.glob("replicated-*"))) == everybody,
            "step-2 is replicated",
            _STARTED_SECONDS,
        )
    if case.is_in_load:
        saving.kill()
        return nodes
    wait_until(victim.stopped, f"{case.point} is passed", _STARTED_SECONDS)
    others = [node for node in nodes if node is not victim]
    _lose([victim, *others[: case.more]], case)
    _await_end(run, others[case.more :], case)
    saving.kill()
    return others[case.more :]


def _lose_while_loading(
    cluster: Cluster, directory: Path, job: Job, case: Case, store: str
) -> list[Node]:
    """Lose a node and replace it; then lose a node in the load.

    That is the replacement or, where two nodes may be lost, another one.
    """
    run = directory / "loading"
    run.mkdir()
    lost = cluster.nodes[case.lost]
    _lose([lost], case)
    left, fresh = cluster.nodes, cluster.add()
    victim = left[0] if case.more else fresh
    if case.how == "throttled":
        victim.throttle(_SLOW)
    loading = cluster.launch(
        _load_until_lost,
        run,
        job,
        nodes=[fresh, *left] if case.lost == 0 else [*left, fresh],
        ranks_per_node=case.ranks,
        env=_ENVIRONMENT,
        store=store,
        env_of={victim: {"DCP_MEM_FAULTS": f"{case.name}:stop:1"}},
        patience=_PATIENCE,
    )
    wait_until(victim.stopped, f"{case.point} is passed", _STARTED_SECONDS)
    _lose([victim], case)
    survivors = [node for node in [*left, fresh] if node is not victim]
    _await_end(run, survivors, case)
    loading.kill()
    return survivors


def _variable(case: Case) -> str:
    """What arms a process of the lost node: the agent from its start, trainers after step-1."""
    return "DCP_MEM_FAULTS" if case.name.startswith("flush.") else _POINT


def _lose(nodes: Sequence[Node], case: Case) -> None:
    for node in nodes:
        if case.how == "unplugged":
            node.unplug()
    for node in nodes:
        node.kill()


def _await_end(run: Path, survivors: Sequence[Node], case: Case) -> None:
    """Ranks of nodes that live learn that others don't, and end: nobody hangs."""
    try:
        wait_until(
            lambda: all(
                len(list(run.glob(f"ended-{node.name}-*"))) == case.ranks for node in survivors
            ),
            "errors",
            _ENDED_SECONDS,
        )
    finally:
        for path in sorted(run.glob("ended-*")):
            print(f"{path.name}: {path.read_text()}")
    wait_until(
        lambda: not [one for node in survivors for one in _ranks_on(node)],
        "ranks end",
        _ENDED_SECONDS,
    )


def _ranks_on(node: Node) -> list[psutil.Process]:
    found = []
    for process in node.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_rank(process):
                found.append(process)
    return found
