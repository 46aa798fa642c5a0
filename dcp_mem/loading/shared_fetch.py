"""Ranks that load together: what several need is read from storage once, and memory is shared.

1. The ranks of each node tell their first rank, the leader, what they need. It shares that out, and
   tells ranks of other nodes what to send (`policy.sharing`). Where nodes are to pass on what they
   have read from storage, the leaders agree on it before.
2. Every rank reads, sends, receives and gives on its share (`peers.py`), and reads what it alone
   needs.
3. All ranks learn whether any of them has failed.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

from dcp_mem.comm import Ranks
from dcp_mem.comm.addresses import listening_on_node, network_namespace
from dcp_mem.comm.greetings import Door
from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.loading.fetch import Fetcher, fetch_all
from dcp_mem.loading.peers import Agreed, Broken, DoorKey, LoadGroup, PeerTransfer
from dcp_mem.loading.pending import PendingItems
from dcp_mem.memory.root import node_id, open_root
from dcp_mem.policy.pieces import Extent, merged, with_large_apart
from dcp_mem.policy.sharing import (
    Extents,
    JointSpan,
    LoadShare,
    Nodes,
    Piece,
    dealt,
    join_nodes,
    joint,
    requests,
    share_out_on_node,
)

_Told = tuple[LoadShare, Mapping[int, DoorKey | None]]
"""What a leader tells a rank: its share, or a part of it; of its own ranks, also their doors."""


def fetch_together(
    prepare: Callable[[], tuple[Fetcher, PendingItems]],
    group: LoadGroup,
    alongside: Callable[[], None] = lambda: None,
) -> None:
    """Fetch what this rank needs, together with the other ranks, which all call this.

    Where another rank fails, this one returns normally, with some items missing: the caller must
    exchange how it went.

    `prepare`: returns what gets this rank's bytes, and the items that need them; it may raise.
    Raises Exception.
    """
    if group.ranks.size == 1:
        fetcher, pending = prepare()
        alongside()
        fetch_all(fetcher, pending, pending.extents())
        return
    failure, prepared = _OwnFailure(group.ranks), list[tuple[Fetcher, PendingItems]]()
    with failure.kept():
        prepared.append(prepare())
    with ThreadPoolExecutor(1, thread_name_prefix="dcp_mem-alongside") as pool:
        under_way = pool.submit(alongside)
        with ExitStack() as resources:
            door = _open_door(resources)
            agreed = _agree_on_shares(prepared[0] if prepared else None, group, door, failure)
            if agreed is not None:
                broken = list[Broken]()
                with failure.kept():
                    broken = PeerTransfer(group, agreed, door, *prepared[0]).run()
                # A connection that broke because the peer had failed is reported by the peer.
                if not failure.is_anywhere() and broken:
                    with failure.kept():
                        raise RankFailed("sharing what several ranks load", broken)
        with failure.kept():
            under_way.result()
    failure.raise_own()


class _OwnFailure:
    """The first error on this rank, kept until the other ranks know that there is one.

    Many steps may fail between two exchanges here, so this keeps an error where `agreement.attempt`
    would keep the result of one step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what is raised in this context, and go on behind it."""
        try:
            yield
        except Exception as error:  # the other ranks wait for this one: it must not leave now
            self._error = self._error or error

    @property
    def is_here(self) -> bool:
        """True if something has gone wrong on this rank."""
        return self._error is not None

    def is_anywhere(self) -> bool:
        """Return whether any rank has failed so far; one all-reduce, on all ranks together."""
        return self._ranks.all_reduce(self.is_here, operator.or_)

    def raise_own(self) -> None:
        """Raise what went wrong on this rank."""
        if self._error is not None:
            raise self._error


# -- sharing the work out --------------------------------------------------------------------------


def _open_door(resources: ExitStack) -> Door | None:
    """Return where the node's other ranks can connect; None where they can't."""
    try:
        return resources.enter_context(closing(Door(listening_on_node())))
    except OSError as error:
        log.info("loading without the neighbours: %s", error)
        return None


def _agree_on_shares(
    prepared: tuple[Fetcher, PendingItems] | None,
    group: LoadGroup,
    door: Door | None,
    failure: _OwnFailure,
) -> Agreed | None:
    """Return this rank's share, and whom it has it with; None where a rank can't take part.

    1. All ranks learn which ranks each node has; one all-reduce.
    2. A node's ranks tell their leader what they need.
    3. Where nodes pass on what they have read, the leaders agree on it (`_spans_in_common`).
    4. Each leader decides, and tells all ranks that have a share.
    5. All ranks learn whether every leader could decide; one all-reduce.
    """
    ranks = group.ranks
    node = _node_of(group, door)
    here: Nodes | None = {node: (ranks.rank,)} if prepared is not None else None
    nodes = ranks.all_reduce(here, join_nodes)
    if nodes is None or prepared is None:
        return None
    edges, leader = prepared[0].edges, nodes[node][0]
    own = (_needs(group, prepared[1]), None if door is None else (door.address, door.token))
    arrived = ranks.route({leader: own})
    needs = {rank: extents for rank, (extents, _) in arrived}
    doors: Mapping[int, DoorKey | None] = {rank: key for rank, (_, key) in arrived}
    by_leader = {of_node[0]: of_node for of_node in nodes.values()}
    spans, passed = list[JointSpan](), list[tuple[int, Piece]]()
    if group.across_nodes and not group.is_held:
        spans = _spans_in_common(needs, by_leader, group, failure)
    shares, share = dict[int, _Told](), LoadShare()
    with failure.kept():
        if leader == ranks.rank:
            passed = dealt(leader, by_leader, spans, edges)
            turn = sorted(by_leader).index(leader)
            found = share_out_on_node(needs, edges, holders=group.holding, turn=turn, passed=passed)
            shares = {rank: (one, doors if rank in needs else {}) for rank, one in found.items()}
    parts = ranks.route(shares)
    with failure.kept():
        share, doors = _joined(parts, leader)
    has_failed, token = ranks.all_reduce(
        (failure.is_here, uuid.uuid4().hex if ranks.rank == 0 else ""), _join_agreed
    )
    if has_failed:
        return None
    return Agreed(share=share, doors=doors, nodes=len(nodes), token=token)


def _node_of(group: LoadGroup, door: Door | None) -> str:
    """Return a name for the ranks that can give each other what they have read."""
    try:
        if door is not None:
            return f"{node_id(open_root(group.memory_root))} {network_namespace()}"
    except (DcpMemError, OSError) as error:
        log.info("loading without the neighbours: %s", error)
    return f"rank {group.ranks.rank}"


def _needs(group: LoadGroup, pending: PendingItems) -> Extents:
    return {
        file: with_large_apart(of_file) if group.holding(file) else merged(of_file)
        for file, of_file in pending.extents().items()
    }


def _joined(parts: Sequence[tuple[int, _Told]], leader: int) -> _Told:
    """Return this rank's share, and its node's doors, by what leaders have told it."""
    alone, pieces = dict[str, Sequence[Extent]](), list[Piece]()
    doors = dict[int, DoorKey | None]()
    # This node's own part first: it has what nodes pass on, which is first on the other node.
    for _, (share, of_node) in sorted(parts, key=lambda part: part[0] != leader):
        alone.update(share.alone)
        doors.update(of_node)
        pieces += share.pieces
    return LoadShare(alone, pieces), doors


def _join_agreed(one: tuple[bool, str], other: tuple[bool, str]) -> tuple[bool, str]:
    return one[0] or other[0], one[1] or other[1]


def _spans_in_common(
    needs: Mapping[int, Extents],
    by_leader: Mapping[int, Sequence[int]],
    group: LoadGroup,
    failure: _OwnFailure,
) -> list[JointSpan]:
    """Return what this rank's node needs of storage, and other nodes too; none but on leaders.

    1. Leaders ask homes who else needs what their nodes need.
    2. Homes tell them.

    `needs`: of the ranks of this node, on its leader; else none.
    """
    ranks = group.ranks
    asked, told = dict[int, dict[str, list[Extent]]](), dict[int, list[JointSpan]]()
    with failure.kept():
        of_storage = [
            {file: of_file for file, of_file in one.items() if not group.holding(file)}
            for one in needs.values()
        ]
        asked = requests(of_storage, sorted(by_leader))
    arrived = ranks.route(asked)
    with failure.kept():
        told = joint(dict(arrived))
    return [span for _, of_home in ranks.route(told) for span in of_home]
