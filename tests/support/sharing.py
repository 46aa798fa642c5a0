"""Sharing out the work of a load, in the two ways in which loads do it."""

from collections.abc import Callable, Sequence

from dcp_mem.policy.sharing import (
    LoadShare,
    LoadTotals,
    Need,
    joined_share,
    share_out,
    share_out_on_node,
)


def shared_out(
    needs: Sequence[Need],
    holders: Callable[[str], Sequence[int]] = lambda file: (),
    *,
    across_nodes: bool = False,
    by_node: bool = False,
) -> list[LoadShare]:
    """Return all ranks' shares, decided by one rank for all, or by each node for its own ranks.

    Args:
        needs: What each rank needs.
        holders: The ranks whose node has a segment.
        across_nodes: Whether nodes pass on what they have fetched from storage.
        by_node: Whether each node decides by itself.
    """
    if not by_node:
        return share_out(needs, lambda file: None, across_nodes=across_nodes, holders=holders)
    parts: list[list[LoadShare]] = [[] for _ in needs]
    for turn, node in enumerate(dict.fromkeys(need.node for need in needs)):
        members = {rank: need for rank, need in enumerate(needs) if need.node == node}
        of_node = share_out_on_node(members, lambda file: None, holders=holders, turn=turn)
        assert members.keys() <= of_node.keys()
        for rank, part in of_node.items():
            parts[rank].append(part)
    shares = [joined_share(of_rank) for of_rank in parts]
    totals = LoadTotals(0, passes_on=False, is_passing=False)
    for share in shares:
        totals = totals.join(share.totals)
    return [share.within(totals) for share in shares]
