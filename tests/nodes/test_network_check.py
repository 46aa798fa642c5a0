"""`dcp-mem doctor --peers` between two nodes."""

import os
import subprocess
import sys

import pytest

from tests.support.nodes.cluster import Cluster

_PORT = "29411"


@pytest.mark.nodes(2)
def test_doctor_measures_the_network_between_nodes(cluster: Cluster) -> None:
    script = "from dcp_mem.cli.main import main; main()"
    processes = [
        subprocess.Popen(
            node.inside([sys.executable, "-c", script, "doctor", "--peers", "--transport", "tcp"]),
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": cluster.nodes[0].address,
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": node.interface,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(cluster.nodes)
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], (first, second)
    assert "eth0 on 2 nodes, 2 processes" in first
    assert "GB/s out and as much in" in first
    assert "tcp between all nodes, bytes as they were sent" in first
    assert "CPU-seconds per GB" in first
    assert "GB/s" not in second
