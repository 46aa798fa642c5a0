"""Sharing out the work of a load as its ranks do it, in one process."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dcp_mem.policy.sharing import (
    Edges,
    Extents,
    JointSpan,
    LoadShare,
    Piece,
    dealt,
    joint,
    requests,
    share_out_on_node,
)


class Need(NamedTuple):
    """What a rank needs, and its node."""

    node: str
    extents: Extents


def shared_out(
    needs: Sequence[Need],
    holders: Callable[[str], Sequence[int]] = lambda file: (),
    edges: Edges = lambda file: None,
    *,
    across_nodes: bool = False,
) -> list[LoadShare]:
    """Return all ranks' shares.

    Args:
        needs: What each rank needs.
        holders: The ranks whose node has a segment.
        edges: Where a segment may be cut.
        across_nodes: Whether nodes pass on what they have read from storage.
    """
    nodes: dict[str, list[int]] = {}
    for rank, need in enumerate(needs):
        nodes.setdefault(need.node, []).append(rank)
    by_leader = {ranks[0]: ranks for ranks in nodes.values()}
    passed = _passed_on(needs, by_leader, holders, edges) if across_nodes else {}
    alone: list[Extents] = [{} for _ in needs]
    pieces: list[list[Piece]] = [[] for _ in needs]
    for turn, (leader, ranks) in enumerate(by_leader.items()):
        of_node = share_out_on_node(
            {rank: needs[rank].extents for rank in ranks},
            edges,
            holders=holders,
            turn=turn,
            passed=passed.get(leader, ()),
        )
        assert of_node.keys() >= set(ranks)
        for rank, part in of_node.items():
            alone[rank] = {**alone[rank], **part.alone}
            pieces[rank] = (
                [*part.pieces, *pieces[rank]]
                if rank in ranks
                else [
                    *pieces[rank],
                    *part.pieces,
                ]
            )
    return list(map(LoadShare, alone, pieces))


def _passed_on(
    needs: Sequence[Need],
    nodes: Mapping[int, Sequence[int]],
    holders: Callable[[str], Sequence[int]],
    edges: Edges,
) -> Mapping[int, Sequence[tuple[int, Piece]]]:
    """Return what each node gets together with others, by its leader."""
    asked: dict[int, dict[int, Extents]] = defaultdict(dict)
    for leader, ranks in nodes.items():
        of_ranks = [
            {file: of_file for file, of_file in needs[rank].extents.items() if not holders(file)}
            for rank in ranks
        ]
        for home, extents in requests(of_ranks, sorted(nodes)).items():
            asked[home][leader] = extents
    told: dict[int, list[JointSpan]] = defaultdict(list)
    for at_home in asked.values():
        for leader, spans in joint(at_home).items():
            told[leader] += spans
    return {leader: dealt(leader, nodes, told[leader], edges) for leader in nodes}
