"""Nodes are lost before their part of a checkpoint is flushed: holders of copies finish it."""

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from dcp_mem import CheckpointStatus, State, parity
from tests.support.checkpoints.jobs import load_anew, load_as_torch, save, wait_until
from tests.support.nodes.cluster import Cluster, Node, job_on_nodes
from tests.support.nodes.inside import is_rank, is_torchrun
from tests.support.processes.forks import forked
from tests.support.variants import VARIANT

pytestmark = [pytest.mark.slow, pytest.mark.nodes(3)]

_STARTED_SECONDS = 60.0
Redundancy = Mapping[str, Any]
"""Arguments of the writer."""


def _save_and_idle(directory: Path, redundancy: Redundancy) -> None:
    writer = job_on_nodes(directory / "ckpts").writer(**redundancy)
    save(writer, 1)
    writer.wait("step-1", "replicated", timeout=60)
    dist.barrier()
    (directory / "replicated").touch()
    time.sleep(1000)


def _go_on(directory: Path, redundancy: Redundancy) -> tuple[int, CheckpointStatus | None]:
    """Load, save without storage, and close.

    Returns the number that was loaded, and the status of the old checkpoint.
    """
    job = job_on_nodes(directory / "ckpts")
    number = load_anew(job).number
    with job.writer(**redundancy, persist=False) as writer:
        save(writer, 2)
        save(writer, 3)
        if any(one.name == "step-1" for one in writer.status()):
            writer.wait("step-1", "durable", timeout=60)
        writer.close()
        return number, next((one for one in writer.status() if one.name == "step-1"), None)


def _save_with_copies(
    cluster: Cluster, directory: Path, redundancy: Redundancy, stopped: Collection[Node], point: str
) -> None:
    """Run a job until its checkpoint has its copies and these nodes' agents have stopped.

    The agents stop before they have done their part of the flush.
    """
    env_of = {node: {"DCP_MEM_FAULTS": point} for node in stopped}
    run = cluster.launch(_save_and_idle, directory, redundancy, env_of=env_of)
    wait_until((directory / "replicated").exists, run.output(), _STARTED_SECONDS)
    for node in stopped:
        wait_until(node.stopped)
    assert not (directory / "ckpts" / "step-1" / ".metadata").exists()


def _lose(cluster: Cluster, lost: Sequence[Node]) -> None:
    """Lose these nodes; on the others the trainers end, and the agents live on."""
    for node in lost:
        node.kill()
    killed: list[psutil.Process] = []
    # torchrun goes first: it would else kill what is left when a rank dies, agents included.
    for is_program in (
        is_torchrun,
        is_rank,
    ):
        for node in cluster.nodes:
            for process in node.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if is_program(process):
                        process.kill()
                        killed.append(process)
    assert len(killed) == 2 * len(cluster.nodes)
    # Wait for the end of all, because the next job listens on the same port.
    _, alive = psutil.wait_procs(killed, timeout=_STARTED_SECONDS)
    assert not alive


@pytest.mark.parametrize(
    ("lost", "redundancy", "point"),
    [
        pytest.param(
            [1], {"replicas": 1}, "flush.started:stop:1", id="one of three", marks=VARIANT
        ),
        pytest.param(
            [2],
            {"replicas": 1},
            "flush.segments:stop:1",
            id="one of three whose segments are up",
            marks=VARIANT,
        ),
        pytest.param([0], {"replicas": 1}, "flush.started:stop:1", id="the one that commits"),
        pytest.param(
            [0, 1],
            {"replicas": 2},
            "flush.started:stop:1",
            id="two of three with two replicas",
            marks=VARIANT,
        ),
        pytest.param(
            [1], {"redundancy": parity(2)}, "flush.started:stop:1", id="one of three with parity"
        ),
    ],
)
def test_a_job_that_goes_on_elsewhere_has_what_its_lost_nodes_left_made_durable(
    cluster: Cluster, tmp_path: Path, lost: list[int], redundancy: Redundancy, point: str
) -> None:
    nodes = [cluster.nodes[number] for number in lost]
    _save_with_copies(cluster, tmp_path, redundancy, nodes, point)
    _lose(cluster, nodes)
    for _ in lost:
        cluster.add()
    found = cluster.launch(_go_on, tmp_path, redundancy).results()
    assert [number for number, _ in found] == [1] * 3
    told = [status for _, status in found if status is not None]
    assert {status.state for status in told} == {State.DURABLE}
    assert len(told) >= 3 - len(lost)
    assert forked(load_as_torch, tmp_path / "ckpts" / "step-1") == 1


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=VARIANT)])
def test_agents_without_trainers_finish_by_themselves(
    cluster: Cluster, tmp_path: Path, lost: int
) -> None:
    node = cluster.nodes[lost]
    _save_with_copies(cluster, tmp_path, {"replicas": 1}, [node], "flush.started:stop:1")
    _lose(cluster, [node])
    metadata = tmp_path / "ckpts" / "step-1" / ".metadata"
    wait_until(metadata.exists, "the agents to take the owner for lost", 90.0)
    assert forked(load_as_torch, tmp_path / "ckpts" / "step-1") == 1
