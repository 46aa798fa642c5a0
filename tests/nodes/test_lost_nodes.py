"""Nodes are lost, with their memory; the copies are loaded from the nodes that are left."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_mem
from tests.support.checkpoints.jobs import load_anew, save, wait_until
from tests.support.nodes.cluster import Cluster, Node, job_on_nodes
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


def _save_until_lost() -> None:
    with JOB.writer(replicas=1) as writer:
        save(writer, 1)
        writer.wait("step-1", "replicated", timeout=60)
        save(writer, 2)
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


def _lose(nodes: Collection[Node]) -> None:
    for node in nodes:
        node.kill()


@pytest.mark.parametrize(
    ("lost", "redundancy", "new", "ranks_per_node"),
    [
        pytest.param([1], COPIES, 1, 1, id="one of three", marks=VARIANT),
        pytest.param([0], COPIES, 1, 1, id="the coordinator's"),
        pytest.param(
            [1, 2], {"replicas": 2}, 2, 1, id="two of three with two replicas", marks=VARIANT
        ),
        pytest.param([2], COPIES, 0, 1, id="one of three and none in its place", marks=VARIANT),
        pytest.param([1], PARITY, 1, 1, id="one of three with parity", marks=VARIANT),
        pytest.param(
            [0],
            PARITY,
            1,
            2,
            id="the coordinator's with parity and two ranks on a node",
            marks=VARIANT,
        ),
        pytest.param([2], PARITY, 0, 1, id="one of three with parity and none in its place"),
    ],
)
@pytest.mark.nodes(3)
def test_a_job_loads_the_newest_checkpoint_from_the_nodes_that_are_left(
    cluster: Cluster,
    tmp_path: Path,
    lost: list[int],
    redundancy: Redundancy,
    new: int,
    ranks_per_node: int,
) -> None:
    killed = cluster.launch(
        _save_and_idle, tmp_path / "saved", redundancy, ranks_per_node=ranks_per_node
    )
    wait_until((tmp_path / "saved").exists, killed.output(), _STARTED_SECONDS)
    _lose([cluster.nodes[number] for number in lost])
    killed.kill()
    for _ in range(new):
        cluster.add()
    loaded = cluster.launch(_load, ranks_per_node=ranks_per_node).results()
    assert [number for number, _ in loaded] == [2] * (3 - len(lost) + new) * ranks_per_node
    assert {source for _, source in loaded} == {"memory and peers"}


@pytest.mark.parametrize(
    "redundancy",
    [pytest.param(COPIES, id="copies"), pytest.param(PARITY, id="parity", marks=VARIANT)],
)
@pytest.mark.nodes(3)
def test_a_load_makes_redundant_again_what_it_has_found(
    cluster: Cluster, tmp_path: Path, redundancy: Redundancy
) -> None:
    """One node after the other is lost and replaced, until all nodes are new."""
    killed = cluster.launch(_save_and_idle, tmp_path / "saved", redundancy)
    wait_until((tmp_path / "saved").exists, killed.output(), _STARTED_SECONDS)
    for _ in range(3):
        _lose(cluster.nodes[:1])
        killed.kill()
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
    killed = cluster.launch(_save_and_idle, tmp_path / "saved", redundancy, ranks_per_node=2)
    wait_until((tmp_path / "saved").exists, killed.output(), _STARTED_SECONDS)
    _lose([cluster.nodes[1]])
    killed.kill()
    loaded = cluster.launch(_load, ranks_per_node=1).results()
    assert [number for number, _ in loaded] == [2] * 2


@pytest.mark.nodes(2)
def test_a_node_that_takes_a_lost_ones_place_has_copies_again_with_the_next_save(
    cluster: Cluster, tmp_path: Path
) -> None:
    killed = cluster.launch(_save_and_idle, tmp_path / "saved", COPIES)
    wait_until((tmp_path / "saved").exists, killed.output(), _STARTED_SECONDS)
    _lose([cluster.nodes[1]])
    killed.kill()
    cluster.add()
    assert cluster.launch(_load_and_save_on).results() == [(2, 1)] * 2
    _lose([cluster.nodes[0]])
    cluster.add()
    assert [number for number, _ in cluster.launch(_load).results()] == [3] * 2


@pytest.mark.parametrize(
    ("point", "loadable"),
    [
        pytest.param("stage.copied:stop:2", {1}, id="staging", marks=VARIANT),
        # The node that is left may have received all of it by then, though nobody has promised
        # that.
        pytest.param("replicate.chunk:stop:2", {1, 2}, id="sending", marks=VARIANT),
        pytest.param("replicate.received:stop:2", {1, 2}, id="receiving"),
    ],
)
@pytest.mark.nodes(2)
def test_a_node_lost_in_the_middle_of_a_save_or_of_its_copies_costs_at_most_that_save(
    cluster: Cluster, point: str, loadable: set[int]
) -> None:
    lost = cluster.nodes[1]
    environment = {"DCP_MEM_REPLICATION_TIMEOUT": "5"}
    saving = cluster.launch(
        _save_until_lost, env=environment, env_of={lost: {"DCP_MEM_FAULTS": point}}
    )
    wait_until(lost.stopped, saving.output(), _STARTED_SECONDS)
    lost.kill()
    saving.kill()
    cluster.add()
    loaded = cluster.launch(_load).results()
    assert len(loaded) == 2
    assert len({number for number, _ in loaded}) == 1
    assert {number for number, _ in loaded} <= loadable


@pytest.mark.nodes(3)
def test_a_copy_that_has_rotted_is_passed_over_for_the_next_older_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    killed = cluster.launch(_save_and_idle, tmp_path / "saved", COPIES)
    wait_until((tmp_path / "saved").exists, killed.output(), _STARTED_SECONDS)
    _lose([cluster.nodes[0]])
    killed.kill()
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
