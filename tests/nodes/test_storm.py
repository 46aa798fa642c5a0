"""A storm of lost nodes runs, so that it doesn't rot; `python -m tests.storm nodes` is it."""

from collections import Counter

import pytest

from tests.storm.nodes import Nodes
from tests.storm.storm import run
from tests.support.nodes.cluster import Cluster


@pytest.mark.nodes(1)
@pytest.mark.variant
def test_a_storm_of_lost_nodes_runs(cluster: Cluster) -> None:
    assert cluster.nodes  # there can be some here
    failures = run(Nodes(Counter()), "nodes", seed=1, start=0, rounds=1)
    assert not failures, failures[0].reason
