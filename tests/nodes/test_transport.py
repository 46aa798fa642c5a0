"""Copies between nodes go over the transport that the run of tests asks for."""

import gc
import os

import pytest

from dcp_mem.comm.channels import GlooChannel
from dcp_mem.comm.nixl_channel import NixlChannel
from tests.support.channels import UsedChannel
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.training import save
from tests.support.nodes.cluster import IS_ONE_MACHINE, Cluster, job_on_nodes


def _channels_of_a_copy(job: Job) -> set[str]:
    with job.writer(replicas=1, persist=False) as writer:
        writer.wait(save(writer, 1), "replicated", timeout=60)
        found = [one for one in gc.get_objects() if isinstance(one, (GlooChannel, NixlChannel))]
        return {type(one).__name__ for one in found}


@pytest.mark.nodes(2)
def test_copies_go_over_the_transport_that_this_run_asks_for(cluster: Cluster) -> None:
    """Else a whole matrix of losses could pass on the fallback."""
    may_use_nixl = IS_ONE_MACHINE or os.environ.get("DCP_MEM_NIXL_TCP") == "1"
    wanted = UsedChannel if may_use_nixl else GlooChannel
    results = cluster.launch(_channels_of_a_copy, job_on_nodes()).results()
    assert results == [{wanted.__name__}] * 2
