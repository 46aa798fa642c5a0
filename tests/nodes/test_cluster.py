"""Nodes made of namespaces are separate, can be killed, and leave nothing behind."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.support.checkpoints.jobs import Job, load_anew, save, wait_until
from tests.support.nodes.cluster import MEMORY, Cluster, job_on_nodes

_MIB = 1 << 20
_STARTED_SECONDS = 60.0


@pytest.mark.nodes(1)
def test_a_killed_node_takes_its_detached_processes_and_its_memory_along(cluster: Cluster) -> None:
    (node,) = cluster.nodes
    fill = f"head -c {_MIB} /dev/zero >{MEMORY}/filled; setsid sleep 1000 & sleep 0.1"
    subprocess.run(node.inside(["bash", "-c", fill]), check=True)
    processes = node.processes()
    assert "sleep" in [process.name() for process in processes[1:]]
    assert (node.root / f".{MEMORY}/filled").stat().st_size == _MIB
    assert _traces(node.name)
    node.kill()
    assert not [process for process in processes if process.is_running()]
    assert not node.is_alive
    assert cluster.nodes == []
    wait_until(lambda: not _traces(node.name), "the tmpfs is gone", timeout=10)
    with pytest.raises(RuntimeError, match="killed"):
        node.inside(["true"])


# -- nothing is left -------------------------------------------------------------------------------


def _traces(token: str) -> list[str]:
    """List what a cluster or a node has left outside of this process's memory.

    That is: processes that run in it or are told of it, mounts that any process sees, and links and
    namespaces with names.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            mounts = Path(f"/proc/{process.pid}/mountinfo").read_text()
            if token in mounts or any(token in text for text in process.cmdline()):
                found.append(f"process {process.pid}: {process.cmdline()}")
    for command in (["ip", "-o", "link"], ["ip", "netns"]):
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found += [line for line in listed.splitlines() if token in line]
    return found


_ABANDONED = """
import time
from tests.support.nodes.cluster import running_cluster
with running_cluster(2) as cluster:
    print(cluster.token, flush=True)
    time.sleep(1000)
"""


@pytest.mark.nodes(1)
def test_nothing_but_files_is_left_of_a_cluster_whose_test_process_was_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _ABANDONED]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            token = process.stdout.readline().strip()
            assert token
            assert _traces(token)
        finally:
            process.kill()
    wait_until(lambda: not _traces(token), "the namespaces are gone", timeout=10)
    assert [node.is_alive for node in cluster.nodes] == [True]


# -- dcp_mem ---------------------------------------------------------------------------------------


def _save_and_idle(job: Job, saved: Path) -> None:
    with job.writer() as writer:
        for number in (1, 2):
            save(writer, number)
        writer.wait("step-2", "durable" if job.url else "complete", timeout=60)
        dist.barrier()
        saved.touch()
        time.sleep(1000)


@pytest.mark.nodes(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        pytest.param((0, 1), id="as before", marks=pytest.mark.variant),
        pytest.param((1, 0), id="the other way round"),
    ],
)
def test_a_job_that_was_killed_on_two_nodes_puts_together_what_lies_in_their_memory(
    cluster: Cluster, tmp_path: Path, places: tuple[int, int]
) -> None:
    job = job_on_nodes()
    killed = cluster.launch(_save_and_idle, job, tmp_path / "saved")
    wait_until((tmp_path / "saved").exists, "two saves", _STARTED_SECONDS)
    killed.kill()
    for node in cluster.nodes:
        held = Path(f"{node.root}/{job.directory}/step-2")
        assert len(list(held.glob("__*.distcp"))) == 1
    nodes = [cluster.nodes[place] for place in places]
    assert cluster.launch(_load, job, nodes=nodes).results() == [(2, "memory and peers")] * 2


def _load(job: Job) -> tuple[int, str]:
    loaded = load_anew(job)
    return loaded.number, loaded.report.source
