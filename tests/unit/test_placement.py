"""Which nodes get copies of which segments, and what is then left of them when nodes are lost."""

import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.policy.placement import Original, place


@dataclass(frozen=True, slots=True)
class Cluster:
    """What `place` is asked, and what it answered."""

    originals: Sequence[Original]
    domains: Sequence[str]
    copies: int
    placed: Sequence[tuple[int, ...]]

    def loads(self) -> list[int]:
        """The bytes that each node gets."""
        loads = [0] * len(self.domains)
        for original, nodes in zip(self.originals, self.placed, strict=True):
            for node in nodes:
                loads[node] += original.nbytes
        return loads

    def survives(self, lost: Collection[int]) -> bool:
        """Whether something is left of every segment."""
        return all(
            not {original.node, *nodes} <= set(lost)
            for original, nodes in zip(self.originals, self.placed, strict=True)
        )


def _cluster(
    segments: Sequence[Sequence[Sequence[int]]], domains: Sequence[str], copies: int
) -> Cluster:
    """segments: by node and rank, the sizes of the segments."""
    ranks = [(node, sizes) for node, by_rank in enumerate(segments) for sizes in by_rank]
    originals = [
        Original(rank, node, nbytes) for rank, (node, sizes) in enumerate(ranks) for nbytes in sizes
    ]
    return Cluster(originals, domains, copies, place(originals, domains, copies))


def _alike(
    nodes: int, domains: Sequence[str], copies: int, sizes: Sequence[int] = (5, 5, 5)
) -> Cluster:
    """Nodes that make the same, one segment a rank."""
    return _cluster([[[nbytes] for nbytes in sizes]] * nodes, domains, copies)


def _is_allowed(nodes: Collection[int], own: int, domains: Sequence[str], copies: int) -> bool:
    if len(set(nodes)) != len(nodes) or own in nodes or len(nodes) != min(copies, len(domains) - 1):
        return False
    there = {domains[node] for node in nodes}
    if len(set(domains)) > copies:
        return len(there) == copies and domains[own] not in there
    return there | {domains[own]} == set(domains)


SIZES = st.sampled_from([0, 0, 1, 2, 3, 7, 100]) | st.integers(0, 1000)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.integers(1, 9))
    names = draw(st.sampled_from(["a", "ab", "aaaab", "abc", "aaabc", "abcdefghi"]))
    named = st.lists(st.sampled_from(names), min_size=nodes, max_size=nodes)
    domains = draw(named | st.just([f"node {node}" for node in range(nodes)]))
    of_rank = st.lists(SIZES, min_size=0, max_size=2) | st.lists(SIZES, min_size=1, max_size=1)
    by_node = st.lists(st.lists(of_rank, min_size=1, max_size=4), min_size=nodes, max_size=nodes)
    return _cluster(draw(by_node), domains, draw(st.integers(0, 4)))


@given(clusters())
def test_copies_lie_on_other_nodes_and_in_as_many_domains_as_can_be(cluster: Cluster) -> None:
    assert len(cluster.placed) == len(cluster.originals)
    for original, nodes in zip(cluster.originals, cluster.placed, strict=True):
        assert _is_allowed(nodes, original.node, cluster.domains, cluster.copies)


@given(clusters())
def test_no_node_could_leave_a_segment_to_another_that_gets_fewer_bytes_by_more_than_it_has(
    cluster: Cluster,
) -> None:
    loads = cluster.loads()
    for original, nodes in zip(cluster.originals, cluster.placed, strict=True):
        for node in nodes:
            for other in range(len(loads)):
                instead = [other if one == node else one for one in nodes]
                if _is_allowed(instead, original.node, cluster.domains, cluster.copies):
                    assert loads[node] - loads[other] <= original.nbytes


@given(clusters())
def test_what_is_asked_twice_is_answered_alike(cluster: Cluster) -> None:
    originals = [Original(one.rank, one.node, one.nbytes) for one in cluster.originals]
    renamed = [f"{name * 3} by another name" for name in cluster.domains]
    assert place(originals, renamed, cluster.copies) == cluster.placed


@given(clusters())
def test_as_many_lost_nodes_as_there_are_copies_take_no_segment_along(cluster: Cluster) -> None:
    nodes = range(len(cluster.domains))
    for number in range(min(cluster.copies, len(nodes) - 1) + 1):
        assert all(cluster.survives(lost) for lost in combinations(nodes, number))


@given(clusters())
def test_as_many_lost_domains_as_there_are_copies_take_no_segment_along(cluster: Cluster) -> None:
    names = set(cluster.domains)
    for number in range(min(cluster.copies, len(names) - 1) + 1):
        for gone in combinations(names, number):
            assert cluster.survives(
                [node for node, name in enumerate(cluster.domains) if name in gone]
            )


def test_one_lost_node_more_than_there_are_copies_can_take_a_segment_along() -> None:
    cluster = _alike(5, "abcde", 2)
    assert not cluster.survives([0, 1, 2])
    assert cluster.survives([0, 2, 4])


# -- few to talk to --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5, 5, 5), (1, 0, 700), (0,), ()])
@pytest.mark.parametrize("copies", range(5))
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 17])
def test_nodes_that_make_the_same_send_it_to_the_next_ones_round_a_ring(
    nodes: int, copies: int, sizes: Sequence[int]
) -> None:
    cluster = _alike(nodes, [f"node {node}" for node in range(nodes)], copies, sizes)
    expected = [
        tuple((node + step) % nodes for step in range(1, 1 + min(copies, nodes - 1)))
        for node in range(nodes)
        for _ in sizes
    ]
    assert cluster.placed == expected


@pytest.mark.parametrize("copies", range(5))
@pytest.mark.parametrize("racks", [1, 2, 3, 6])
@pytest.mark.parametrize("in_rack", [1, 4, 5])
def test_a_ring_of_racks_of_one_size_goes_from_rack_to_rack(
    in_rack: int, racks: int, copies: int
) -> None:
    cluster = _alike(
        in_rack * racks, [f"rack {rack}" for rack in range(racks) for _ in range(in_rack)], copies
    )
    ring = [rack * in_rack + number for number in range(in_rack) for rack in range(racks)]
    for original, nodes in zip(cluster.originals, cluster.placed, strict=True):
        place_of_own = ring.index(original.node)
        next_ones = [*ring[place_of_own + 1 :], *ring[:place_of_own]]
        assert nodes == tuple(next_ones[:copies])


def test_a_ring_spreads_a_small_domain_over_its_whole_length() -> None:
    cluster = _alike(6, "aaaabb", 1)
    assert cluster.placed[: 4 * 3] == [(node,) for node in (4, 5, 5, 4) for _ in range(3)]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_small_differences_in_size_leave_every_node_with_few_to_talk_to(copies: int) -> None:
    sizes = random.Random(copies)
    segments = [[[1000 + sizes.randrange(10)] for _ in range(8)] for _ in range(40)]
    cluster = _cluster(segments, [str(node // 4) for node in range(40)], copies)
    for _, group in groupby(
        zip(cluster.originals, cluster.placed, strict=True), key=lambda pair: pair[0].node
    ):
        assert len({nodes for _, nodes in group}) == 1
    assert max(cluster.loads()) - min(cluster.loads()) <= copies * 8 * 10


def test_a_node_that_makes_more_than_others_has_only_what_is_too_much_carried_elsewhere() -> None:
    segments = [[[100]] * 6, *[[[100]] * 2] * 6]
    cluster = _cluster(segments, "abcdefg", 1)
    talks_to = [
        {
            nodes
            for one, nodes in zip(cluster.originals, cluster.placed, strict=True)
            if one.node == node
        }
        for node in range(7)
    ]
    assert (1,) in talks_to[0]
    assert talks_to[1:] == [{((node + 1) % 7,)} for node in range(1, 7)]
    assert set(cluster.loads()) <= {200, 300}


# -- loads -----------------------------------------------------------------------------------------


def test_uneven_ranks_give_even_loads() -> None:
    cluster = _cluster([[[10]] * ranks for ranks in (1, 8, 3, 8, 1, 2, 5)], "abcdefg", 2)
    assert Counter(cluster.loads()) == {80: 7}


def test_a_domain_that_has_one_node_gets_what_the_rest_may_put_nowhere_else() -> None:
    assert _alike(4, "aaab", 1).loads()[3] == 3 * 15


def test_thousands_of_nodes_are_placed_in_a_moment() -> None:
    sizes, nodes = random.Random(0), 2048
    segments = [
        [[sizes.randrange(1 << 30)] for _ in range(sizes.randrange(1, 16))] for _ in range(nodes)
    ]
    domains = [str(node // 4) for node in range(nodes)]
    begun = time.process_time()
    cluster = _cluster(segments, domains, 1)
    # This takes some 0.2 s; looking at all nodes for each segment would take minutes.
    assert time.process_time() - begun < 5
    assert max(cluster.loads()) - min(cluster.loads()) < 1 << 30
