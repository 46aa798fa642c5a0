"""Memory has every save, storage every second one; after a loss the newest of both is loaded."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import dcp_mem
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.training import load_newest, save
from tests.support.nodes.cluster import Cluster, Node, job_on_nodes
from tests.support.variants import VARIANT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_STARTED_SECONDS = 90.0


def _save_and_idle(directory: Path, saves: Sequence[int], replicas: int) -> None:
    """Save these numbers, the first and every second one after it to storage.

    Touch `saved` when every checkpoint is in its places.
    """
    with job_on_nodes(directory / "storage").writer(
        persist=dcp_mem.every_n_saves(2), replicas=replicas
    ) as writer:
        for number in saves:
            name = save(writer, number)
            if replicas:
                writer.wait(name, "replicated", timeout=60)
        writer.wait(timeout=60)
        dist.barrier()
        (directory / "saved").touch()
        time.sleep(1000)


def _load(directory: Path) -> tuple[int, str]:
    number, report = load_newest(job_on_nodes(directory / "storage"), "fsdp")
    return number, report.source


def _have_saved(
    cluster: Cluster,
    directory: Path,
    saves: Sequence[int],
    nodes: Sequence[Node],
    replicas: int = 1,
) -> None:
    """Save on these nodes, until trainers and agents are killed."""
    saved = directory / "saved"
    saved.unlink(missing_ok=True)
    job = cluster.launch(_save_and_idle, directory, saves, replicas, nodes=nodes)
    wait_until(saved.exists, "all is saved", _STARTED_SECONDS)
    job.kill()


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        pytest.param(
            [2], (4, "memory and peers"), id="newest in memory wins over an older one on storage"
        ),
        # 4 lies in one node's memory alone, in part; so does 3, the rest of which is on storage.
        pytest.param(
            [0, 1], (3, "memory and peers and storage"), id="two nodes lost where one may be"
        ),
        pytest.param([0, 1, 2], (3, "storage"), id="all nodes lost", marks=VARIANT),
    ],
)
@pytest.mark.nodes(3)
def test_the_newest_checkpoint_for_whose_every_segment_there_is_a_place_is_loaded(
    cluster: Cluster, tmp_path: Path, lost: list[int], expected: tuple[int, str]
) -> None:
    _have_saved(cluster, tmp_path, [1, 2, 3, 4], cluster.nodes)
    for node in [cluster.nodes[number] for number in lost]:
        node.kill()
    for _ in lost:
        cluster.add()
    assert cluster.launch(_load, tmp_path).results() == [expected] * 3


@pytest.mark.nodes(3)
def test_a_newer_checkpoint_on_storage_wins_over_an_older_one_in_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two nodes sit out while a third one goes on, and is lost."""
    first, second, third = cluster.nodes
    _have_saved(cluster, tmp_path, [1, 2], [first, second])
    _have_saved(cluster, tmp_path, [3], [third], replicas=0)
    third.kill()
    assert cluster.launch(_load, tmp_path).results() == [(3, "storage")] * 2
