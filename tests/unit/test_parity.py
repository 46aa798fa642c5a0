"""Parity groups: which ranks keep the parity of which bytes, and that it restores a lost node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.policy.parity import (
    Piece,
    Stripe,
    groups,
    parity_nbytes,
    piece,
    pieces_for,
    rebuilding,
    stripes,
)

Bytes = npt.NDArray[np.uint8]

DOMAINS = st.sampled_from(["a", "ab", "aaaab", "abcd", "abcdefghijkl"]).flatmap(
    lambda names: st.lists(st.sampled_from(names), min_size=1, max_size=24)
) | st.integers(1, 24).map(lambda nodes: [f"node {node}" for node in range(nodes)])
SIZES = st.sampled_from([0, 0, 1, 2, 3, 64]) | st.integers(0, 300)
GROUPS = st.dictionaries(st.integers(0, 99), SIZES, min_size=2, max_size=7)


@given(DOMAINS, st.integers(1, 8))
def test_every_node_is_in_one_group_of_nearly_the_size_of_the_others(
    domains: list[str], k: int
) -> None:
    found = groups(domains, k)
    assert sorted(node for group in found for node in group) == list(range(len(domains)))
    sizes = [len(group) for group in found]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(2, len(domains))
    if k == 1:
        assert sizes.count(3) == (len(domains) % 2 if len(domains) > 1 else 0)
        assert max(sizes) <= 3
    else:
        assert max(sizes) <= k + 1


@given(DOMAINS, st.integers(2, 8))
def test_there_are_no_more_groups_than_it_takes(domains: list[str], k: int) -> None:
    assert (len(groups(domains, k)) - 1) * (k + 1) < len(domains)


@given(DOMAINS, st.integers(1, 8))
def test_a_domain_is_spread_over_the_groups_alike(domains: list[str], k: int) -> None:
    found = groups(domains, k)
    for name, nodes in Counter(domains).items():
        members = [sum(domains[node] == name for node in group) for group in found]
        assert max(members) - min(members) <= 1
        assert max(members) == -(-nodes // len(found))


@given(DOMAINS, st.integers(1, 8))
def test_groups_depend_on_who_shares_a_domain_not_on_its_name(domains: list[str], k: int) -> None:
    assert groups([f"{name * 3} by another name" for name in domains], k) == groups(domains, k)


@dataclass(frozen=True)
class Made:
    """A group of nodes: the bytes of each rank's segment by node, and the ranks with parity."""

    segments: dict[int, dict[int, Bytes]]
    stripes: list[Stripe]
    kept: list[Bytes]

    def node_of(self, rank: int) -> int:
        return next(node for node, ranks in self.segments.items() if rank in ranks)


@st.composite
def made_groups(draw: st.DrawFn) -> Made:
    """Nodes of one to three ranks each, with the parity that they keep."""
    sizes = draw(st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=2, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    segments: dict[int, dict[int, Bytes]] = {}
    for node, of_node in enumerate(sizes):
        first = sum(map(len, segments.values()))
        segments[node] = {
            first + i: random.integers(0, 256, nbytes, np.uint8) for i, nbytes in enumerate(of_node)
        }
    group = {node: sum(map(len, ranks.values())) for node, ranks in segments.items()}
    lengths = {
        node: {rank: len(data) for rank, data in ranks.items()} for node, ranks in segments.items()
    }
    found = stripes(group, lengths, {node: list(ranks) for node, ranks in segments.items()})
    everything = {rank: data for ranks in segments.values() for rank, data in ranks.items()}
    return Made(segments, found, [_parity(stripe, everything) for stripe in found])


def _parity(stripe: Stripe, segments: Mapping[int, Bytes]) -> Bytes:
    total = np.zeros(stripe.nbytes, np.uint8)
    for one in stripe.shares:
        assert 0 <= one.place <= stripe.nbytes - (one.stop - one.start)
        total[one.place : one.place + one.stop - one.start] ^= segments[one.rank][
            one.start : one.stop
        ]
    return total


@given(made_groups())
def test_any_one_lost_node_comes_back_from_the_others(made: Made) -> None:
    for lost in made.segments:
        left = {
            rank: data
            for node, ranks in made.segments.items()
            if node != lost
            for rank, data in ranks.items()
        }
        numbers = [
            number
            for number, stripe in enumerate(made.stripes)
            if made.node_of(stripe.keeper) != lost
        ]
        for rank, data in made.segments[lost].items():
            terms = rebuilding(
                rank, len(data), [made.stripes[number] for number in numbers], left.keys()
            )
            assert terms is not None
            back = np.zeros(len(data), np.uint8)
            for term in terms:
                source = made.kept[numbers[term.of]] if term.is_stripe else left[term.of]
                back[term.place : term.place + term.stop - term.start] ^= source[
                    term.start : term.stop
                ]
            assert np.array_equal(back, data)


@given(made_groups(), st.data())
def test_a_segment_comes_back_or_is_known_not_to(made: Made, data: st.DataObject) -> None:
    """Whatever else is lost: nothing is said to come back that doesn't."""
    ranks = [rank for of_node in made.segments.values() for rank in of_node]
    lost = set(data.draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True)))
    there = (
        data.draw(st.lists(st.sampled_from(range(len(made.stripes))), unique=True))
        if made.stripes
        else []
    )
    everything = {rank: one for of_node in made.segments.values() for rank, one in of_node.items()}
    for rank in lost:
        found = [made.stripes[number] for number in there]
        terms = rebuilding(rank, len(everything[rank]), found, everything.keys() - lost)
        if terms is None:
            continue
        assert not any(not term.is_stripe and term.of in lost for term in terms)
        back = np.zeros(len(everything[rank]), np.uint8)
        for term in terms:
            source = made.kept[there[term.of]] if term.is_stripe else everything[term.of]
            back[term.place : term.place + term.stop - term.start] ^= source[term.start : term.stop]
        assert np.array_equal(back, everything[rank])


@given(made_groups())
def test_no_rank_keeps_parity_of_its_own_node(made: Made) -> None:
    for stripe in made.stripes:
        assert all(made.node_of(one.rank) != made.node_of(stripe.keeper) for one in stripe.shares)


@given(GROUPS)
def test_parity_takes_a_share_of_the_most_that_a_node_makes(group: dict[int, int]) -> None:
    others = len(group) - 1
    for holder in group:
        assert parity_nbytes(group, holder) <= -(-max(group.values()) // others)
        assert all(
            group[one.node] // others <= one.nbytes <= -(-group[one.node] // others)
            for one in pieces_for(group, holder)
        )


@pytest.mark.parametrize(
    ("domains", "k", "expected"),
    [
        ("a", 4, [(0,)]),
        ("abc", 1, [(0, 1, 2)]),
        ("abcde", 1, [(0, 2, 4), (1, 3)]),
        ("abcdef", 4, [(0, 2, 4), (1, 3, 5)]),
        ("aabbccdd", 3, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("aaaabb", 2, [(0, 2, 4), (1, 3, 5)]),
    ],
)
def test_groups_of_small_clusters(domains: str, k: int, expected: list[tuple[int, ...]]) -> None:
    assert groups(domains, k) == expected


def test_a_pair_keeps_copies_of_each_other() -> None:
    group = {3: 10, 5: 7}
    assert piece(group, 3, 5) == Piece(3, 0, 10)
    assert (parity_nbytes(group, 3), parity_nbytes(group, 5)) == (7, 10)


def test_a_node_alone_keeps_nothing() -> None:
    assert (pieces_for({0: 10}, 0), parity_nbytes({0: 10}, 0)) == ((), 0)
    assert rebuilding(0, 10, [], []) is None
