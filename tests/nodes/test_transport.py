"""Copies between nodes go over the transport that the run of tests asks for."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from tests.support.channels import UsedChannel
from tests.support.checkpoints.jobs import Job
from tests.support.nodes.cluster import IS_ONE_MACHINE, Cluster, Node, job_on_nodes

_NBYTES = 16 << 20


def _copies(job: Job) -> tuple[set[str], int]:
    """Which channels a copy takes, and what it sends over the node's cable meanwhile."""
    before = _sent_nbytes()
    state = {f"of {dist.get_rank()}": torch.ones(_NBYTES // 4)}
    with job.writer(replicas=1, persist=False) as writer:
        dcp_mem.save(state, checkpoint_id="1", storage_writer=writer)
        writer.wait("1", "replicated", timeout=60)
        found = {type(one).__name__ for one in gc.get_objects()} & {"TcpChannel", "NixlChannel"}
        return found, _sent_nbytes() - before


def _sent_nbytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(f"{Node.interface}:"))
    return int(line.partition(":")[2].split()[8])


@pytest.mark.nodes(2)
def test_copies_go_over_the_transport_that_this_run_asks_for(cluster: Cluster) -> None:
    """Else a whole matrix of losses could pass on the fallback."""
    may_use_nixl = IS_ONE_MACHINE or os.environ.get("DCP_MEM_NIXL_TCP") == "1"
    wanted = UsedChannel.__name__ if may_use_nixl else "TcpChannel"
    by_memory = IS_ONE_MACHINE and wanted == "NixlChannel"
    for channels, sent_nbytes in cluster.launch(_copies, job_on_nodes()).results():
        assert channels == {wanted}
        assert (sent_nbytes < _NBYTES // 2) == by_memory
