"""Parity groups: who keeps the parity of which bytes, and that any one lost node comes back from it."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.policy.parity import Group, Piece, groups, parity_nbytes, piece, pieces_for, rebuilding

Bytes = npt.NDArray[np.uint8]

DOMAINS = st.sampled_from(["a", "ab", "aaaab", "abcd", "abcdefghijkl"]).flatmap(
    lambda names: st.lists(st.sampled_from(names), min_size=1, max_size=24)
) | st.integers(1, 24).map(lambda nodes: [f"node {node}" for node in range(nodes)])
SIZES = st.sampled_from([0, 0, 1, 2, 3, 64]) | st.integers(0, 300)
GROUPS = st.dictionaries(st.integers(0, 99), SIZES, min_size=2, max_size=7)


def _xor(parts: Sequence[Bytes], nbytes: int) -> Bytes:
    total = np.zeros(nbytes, np.uint8)
    for part in parts:
        total[: len(part)] ^= part[:nbytes]
    return total


def _made(group: Group, seed: int) -> dict[int, Bytes]:
    """Random bytes, as many as each node makes."""
    random = np.random.default_rng(seed)
    return {node: random.integers(0, 256, nbytes, np.uint8) for node, nbytes in group.items()}


def _read(made: Mapping[int, Bytes], pieces: Collection[Piece]) -> list[Bytes]:
    return [made[one.node][one.start : one.stop] for one in pieces]


@given(DOMAINS, st.integers(1, 8))
def test_every_node_is_in_one_group_of_nearly_the_size_of_the_others(domains: list[str], k: int) -> None:
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


@given(GROUPS, st.integers(0, 99))
def test_any_one_lost_node_comes_back_from_the_others(group: dict[int, int], seed: int) -> None:
    made = _made(group, seed)
    kept = {holder: _xor(_read(made, pieces_for(group, holder)), parity_nbytes(group, holder)) for holder in group}
    for lost in group:
        survivors = {node: data for node, data in made.items() if node != lost}
        back = np.zeros(0, np.uint8)
        for step in rebuilding(group, lost):
            assert step.holder != lost
            assert step.lost.node == lost
            assert step.lost.start == len(back)
            part = _xor([kept[step.holder], *_read(survivors, step.pieces)], parity_nbytes(group, step.holder))
            back = np.concatenate([back, part[: step.lost.nbytes]])
        assert np.array_equal(back, made[lost])


@given(GROUPS)
def test_parity_takes_a_share_of_the_most_that_a_node_makes(group: dict[int, int]) -> None:
    others = len(group) - 1
    for holder in group:
        assert parity_nbytes(group, holder) <= -(-max(group.values()) // others)
        assert all(
            group[one.node] // others <= one.nbytes <= -(-group[one.node] // others)
            for one in pieces_for(group, holder)
        )


@given(GROUPS)
def test_survivors_read_alike_to_bring_a_node_back(group: dict[int, int]) -> None:
    for lost in group:
        steps = rebuilding(group, lost)
        assert sorted(step.holder for step in steps) == sorted(group.keys() - {lost})
        read = Counter(one.node for step in steps for one in step.pieces)
        assert all(read[node] == len(group) - 2 for node in group if node != lost)


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
    assert rebuilding(group, 3)[0].pieces == ()
    assert (parity_nbytes(group, 3), parity_nbytes(group, 5)) == (7, 10)


def test_a_node_alone_keeps_nothing() -> None:
    assert (pieces_for({0: 10}, 0), parity_nbytes({0: 10}, 0), rebuilding({0: 10}, 0)) == ((), 0, [])
