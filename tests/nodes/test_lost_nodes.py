"""Nodes are lost, with their memory; the copies are loaded from the nodes that are left."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_mem
from tests.support.checkpoints.jobs import load_anew, save, wait_until
from tests.support.nodes.cluster import Cluster, job_on_nodes
from tests.support.variants import VARIANT

pytestmark = [pytest.mark.slow]

_STARTED_SECONDS = 60.0
JOB = job_on_nodes()
Redundancy = Mapping[str, Any]
"""Arguments of the writer."""
COPIES: Redundancy = {"replicas": 1}
PARITY: Redundancy = {"redundancy": dcp_mem.parity(2)}


def _save_and_idle(saved: Path, redundancy: Redundancy) -> None:
    with JOB.writer(**redundancy) as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", "replicated", timeout=60)
        dist.barrier()
        saved.touch()
        time.sleep(1000)


def _load() -> tuple[int, str]:
    loaded = load_anew(JOB)
    return loaded.number, loaded.report.source


def _load_and_save_on() -> tuple[int, int]:
    """The number that a load brings, and the replicas of the next checkpoint."""
    number = load_anew(JOB).number
    with JOB.writer(replicas=1) as writer:
        save(writer, number + 1)
        writer.wait(f"step-{number + 1}", "replicated", timeout=60)
        (status,) = (one for one in writer.status() if one.name == f"step-{number + 1}")
        return number, status.replicas


def _saved_and_lost(
    cluster: Cluster, directory: Path, redundancy: Redundancy, lost: int, ranks_per_node: int = 1
) -> None:
    """Save twice with copies; then a node is lost, and the ranks on the others are killed."""
    saved = directory / "saved"
    job = cluster.launch(_save_and_idle, saved, redundancy, ranks_per_node=ranks_per_node)
    wait_until(saved.exists, job.output(), _STARTED_SECONDS)
    cluster.nodes[lost].kill()
    job.kill()


@pytest.mark.parametrize(
    "redundancy",
    [pytest.param(COPIES, id="copies"), pytest.param(PARITY, id="parity", marks=VARIANT)],
)
@pytest.mark.nodes(3)
def test_a_load_makes_redundant_again_what_it_has_found(
    cluster: Cluster, tmp_path: Path, redundancy: Redundancy
) -> None:
    """One node after the other is lost and replaced, until all nodes are new."""
    _saved_and_lost(cluster, tmp_path, redundancy, 0)
    for number in range(3):
        if number:
            cluster.nodes[0].kill()
        cluster.add()
        loaded = cluster.launch(_load).results()
        assert [number for number, _ in loaded] == [2] * 3
        assert {source for _, source in loaded} == {"memory and peers"}


@pytest.mark.parametrize(
    "redundancy",
    [pytest.param(COPIES, id="copies", marks=VARIANT), pytest.param(PARITY, id="parity")],
)
@pytest.mark.nodes(3)
def test_what_is_left_of_three_nodes_is_loaded_by_fewer_ranks(
    cluster: Cluster, tmp_path: Path, redundancy: Redundancy
) -> None:
    """Other ranks, and so another sharding, than have saved it."""
    _saved_and_lost(cluster, tmp_path, redundancy, 1, ranks_per_node=2)
    loaded = cluster.launch(_load, ranks_per_node=1).results()
    assert [number for number, _ in loaded] == [2] * 2


@pytest.mark.nodes(2)
def test_a_node_that_takes_a_lost_ones_place_has_copies_again_with_the_next_save(
    cluster: Cluster, tmp_path: Path
) -> None:
    _saved_and_lost(cluster, tmp_path, COPIES, 1)
    cluster.add()
    assert cluster.launch(_load_and_save_on).results() == [(2, 1)] * 2
    cluster.nodes[0].kill()
    cluster.add()
    assert [number for number, _ in cluster.launch(_load).results()] == [3] * 2


@pytest.mark.nodes(3)
def test_a_copy_that_has_rotted_is_passed_over_for_the_next_older_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    _saved_and_lost(cluster, tmp_path, COPIES, 0)
    (copy,) = (
        path
        for node in cluster.nodes
        for path in Path(f"{node.root}/{JOB.directory}/step-2").glob("__0_0-*.distcp")
    )
    data = bytearray(copy.read_bytes())
    for place in range(0, 16 << 10, 64):
        data[place] ^= 1
    copy.write_bytes(data)
    cluster.add()
    assert {number for number, _ in cluster.launch(_load).results()} == {1}
