"""Sharing out the work of a load as its ranks do it, in one process."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from dcp_mem.policy import passing
from dcp_mem.policy.needs import Edges, Extents, Need
from dcp_mem.policy.passing import JointPieces, JointSpan, LoadNode
from dcp_mem.policy.shares import Batches, LoadShare, LoadTotals, joined_share
from dcp_mem.policy.sharing import share_out_on_node


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
        across_nodes: Whether nodes pass on what they have fetched from storage.
    """
    passed = passed_on(needs, holders, edges) if across_nodes else {}
    parts: list[list[LoadShare]] = [[] for _ in needs]
    for turn, node in enumerate(dict.fromkeys(need.node for need in needs)):
        members = {rank: need for rank, need in enumerate(needs) if need.node == node}
        of_node = share_out_on_node(
            members, edges, holders=holders, turn=turn, passed=passed.get(min(members), ())
        )
        assert members.keys() <= of_node.keys()
        for rank, part in of_node.items():
            parts[rank].append(part)
    shares = [joined_share(of_rank) for of_rank in parts]
    totals = LoadTotals(0, passes_on=False, is_passing=False)
    for share in shares:
        totals = totals.join(share.totals)
    return [share.within(totals) for share in shares]


def passed_on(
    needs: Sequence[Need], holders: Callable[[str], Sequence[int]], edges: Edges
) -> Mapping[int, Batches]:
    """Return what each node fetches together with others, by the node's first rank."""
    nodes: dict[str, LoadNode] = {}
    for rank, need in enumerate(needs):
        node = LoadNode((rank,), need.window_nbytes)
        nodes[need.node] = nodes[need.node].join(node) if need.node in nodes else node
    passing_on = {node.ranks[0]: node for node in nodes.values() if node.passes_on}
    asked: dict[int, dict[int, Extents]] = defaultdict(dict)
    for leader, node in passing_on.items():
        of_ranks = [
            {file: of_file for file, of_file in needs[rank].extents.items() if not holders(file)}
            for rank in node.ranks
        ]
        for home, extents in passing.requests(of_ranks, sorted(passing_on)).items():
            asked[home][leader] = extents
    told: dict[int, list[JointSpan]] = defaultdict(list)
    for at_home in asked.values():
        for leader, spans in passing.joint(at_home).items():
            told[leader] += spans
    pieces = {leader: JointPieces(leader, passing_on, told[leader], edges) for leader in passing_on}
    fewest = max((one.fewest_batches for one in pieces.values()), default=0)
    for count in passing.batch_counts(fewest):
        if all(one.fits(count) for one in pieces.values()):
            return {leader: one.in_batches(count) for leader, one in pieces.items()}
    return {}
