"""Ranks that load together: what several need is fetched from storage once; memory is shared.

1. The ranks of each node tell their first rank what they need. It shares that out, and tells ranks
   of other nodes what to send; two all-reduces, and values routed along the tree twice. Where nodes
   are to pass on what they have fetched from storage, these first ranks agree on it before: values
   are routed twice more, and a few all-reduces.
2. What one rank alone needs of storage it fetches by itself.
3. What one rank of a node alone needs of other nodes' memory is sent to that rank (`peers.py`).
4. The rest comes batch by batch into a window of tmpfs on each node: from storage, from a node that
   has it in memory, and with `across_nodes` from another node's window. One half of the window is
   filled while the ranks take from the other.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_mem.comm import Ranks
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_parallel
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import DcpMemError, MemoryUnavailable, RankFailed
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.fetch import Fetcher, fetch_all
from dcp_mem.loading.peers import peer_transfer
from dcp_mem.loading.pending import PendingItems
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.memory.root import node_id
from dcp_mem.memory.views import view_of
from dcp_mem.memory.window import Window, make_window, remove_window, room_for_window, window_path
from dcp_mem.policy.needs import Edges, Extents, Need
from dcp_mem.policy.passing import (
    JointPieces,
    JointSpan,
    LoadNode,
    batch_counts,
    join_nodes,
    joint,
    requests,
)
from dcp_mem.policy.pieces import Extent, merged, with_large_apart
from dcp_mem.policy.shares import Batches, LoadShare, LoadTotals, SharedPiece, joined_share
from dcp_mem.policy.sharing import NoRoom, share_out_on_node

_SummedBytes = tuple[memoryview, int]
"""Bytes to send, and their CRC32C."""
_CRC_NBYTES = 4
WINDOW = 256 << 20
"""Bytes of a half of a node's window, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGroup:
    """The ranks that load a checkpoint together."""

    ranks: Ranks
    memory_root: str
    across_nodes: bool = False  # whether nodes send each other what they have fetched from storage
    is_held: bool = False  # whether some node has each segment in memory; the same on all ranks
    # what this rank's node has of the checkpoint, for itself and others
    memory: MemorySource | None = None
    # for each segment, the ranks whose nodes have it in memory
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # what moves bytes that one rank alone needs of another node
    transport: str = "gloo"

    def holding(self, file: str) -> Sequence[int]:
        """Return the ranks whose nodes have the segment in memory."""
        return self.holders.get(names.rank_of(file), ())


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
        agreed = _agree_on_shares(prepared[0] if prepared else None, group, failure)
        if agreed is not None and prepared:
            _take_part(*prepared[0], group, *agreed, failure)
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


def _agree_on_shares(
    prepared: tuple[Fetcher, PendingItems] | None, group: LoadGroup, failure: _OwnFailure
) -> tuple[LoadShare, str] | None:
    """Return this rank's share, and a token of this load; None where a rank can't take part.

    The first rank of each node shares out what its node needs:

    1. All ranks learn which ranks each node has; one all-reduce.
    2. A node's ranks tell their first rank their needs.
    3. Where nodes pass on what they have fetched, these ranks agree on it (`_passed`).
    4. Each of them decides, and tells all ranks that have a share.
    5. All ranks learn whether every node could decide, and what they go through together; one
       all-reduce.
    """
    ranks = group.ranks
    need = _need(group, prepared[1]) if prepared is not None else None
    own = {need.node: LoadNode((ranks.rank,), need.window_nbytes)} if need is not None else None
    nodes = ranks.all_reduce(own, join_nodes)
    if nodes is None or need is None or prepared is None:
        return None
    edges = prepared[0].edges
    leader = nodes[need.node].ranks[0]
    needs, shares = dict(ranks.route({leader: need})), dict[int, LoadShare]()
    passed: Batches | None = []
    if group.across_nodes and not group.is_held:
        passed = _passed(needs, nodes, edges, group, failure)
    if passed is None:
        return None
    with failure.kept(), _no_room_named(group):
        if leader == ranks.rank:
            leaders = sorted(node.ranks[0] for node in nodes.values())
            shares = share_out_on_node(
                needs,
                edges,
                holders=group.holding,
                turn=leaders.index(leader),
                passed=passed,
            )
    share, parts = LoadShare(), ranks.route(shares)
    with failure.kept():
        share = joined_share([part for _, part in parts])
    token = uuid.uuid4().hex if ranks.rank == 0 else ""
    agreed = ranks.all_reduce(_Agreed(failure.is_here, token, share.totals), _Agreed.join)
    return None if agreed.failed else (share.within(agreed.totals), agreed.token)


# -- what nodes pass on to each other --------------------------------------------------------------


def _passed(
    needs: Mapping[int, Need],
    nodes: Mapping[str, LoadNode],
    edges: Edges,
    group: LoadGroup,
    failure: _OwnFailure,
) -> Batches | None:
    """Return what this rank's node fetches together with others; None where a rank has failed.

    All ranks call this; what the first ranks of nodes return counts.

    1. Leaders ask homes who else needs what their nodes need.
    2. Homes tell them.
    3. All ranks try numbers of batches until every node has room for each batch; an all-reduce each
       time.

    `needs`: of the ranks of this node, on its first rank; else none. `edges`: where segments may be
    cut.
    """
    ranks = group.ranks
    passing = {node.ranks[0]: node for node in nodes.values() if node.passes_on}
    asked, told = dict[int, dict[str, list[Extent]]](), dict[int, list[JointSpan]]()
    pieces: JointPieces | None = None
    with failure.kept():
        if ranks.rank in passing:
            asked = requests(
                [_of_storage(need.extents, group) for need in needs.values()], sorted(passing)
            )
    arrived = ranks.route(asked)
    with failure.kept():
        told = joint(dict(arrived))
    arrived_spans = [span for _, spans in ranks.route(told) for span in spans]
    with failure.kept():
        if ranks.rank in passing:
            pieces = JointPieces(ranks.rank, passing, arrived_spans, edges)
    if failure.is_anywhere():
        return None
    passed, count = list[list[SharedPiece]](), _number_of_batches(pieces, ranks, failure)
    with failure.kept():
        if pieces is not None:
            passed += pieces.in_batches(count)
    return passed


def _number_of_batches(pieces: JointPieces | None, ranks: Ranks, failure: _OwnFailure) -> int:
    """Return in how many batches every node has room for its pieces; 0 where none were found."""
    fewest = ranks.all_reduce(pieces.fewest_batches if pieces is not None else 0, max)
    for count in batch_counts(fewest):
        fits = True
        with failure.kept():  # all learn of a failure here once they agree on the shares
            fits = pieces is None or pieces.fits(count)
        if ranks.all_reduce(fits, operator.and_):
            return count
    if ranks.rank == 0:
        log.warning(
            "nodes don't pass on what they fetch from storage: their windows are too small for it, "
            "in %s batches or in more; each of them fetches for itself",
            fewest,
        )
    return 0


def _of_storage(extents: Extents, group: LoadGroup) -> Extents:
    return {file: of_file for file, of_file in extents.items() if not group.holding(file)}


@sendable
class _Agreed(NamedTuple):
    """What all ranks agree on; a plain tuple, as it is sent to all ranks."""

    failed: bool  # whether some node couldn't share out what it needs
    token: str
    totals: LoadTotals

    def join(self, other: _Agreed) -> _Agreed:
        return _Agreed(
            self.failed or other.failed,
            self.token or other.token,
            self.totals.join(other.totals),
        )


@contextmanager
def _no_room_named(group: LoadGroup) -> Iterator[None]:
    """Raise NoRoom as an error for people."""
    try:
        yield
    except NoRoom as error:
        why = (
            f"node {error.node} has no room for {error.nbytes} bytes on their way from other nodes"
        )
        raise MemoryUnavailable(group.memory_root, why) from None


def _need(group: LoadGroup, pending: PendingItems) -> Need:
    """Return what this rank needs, and how large a window its node has room for."""
    extents = {
        file: with_large_apart(of_file) if group.holding(file) else merged(of_file)
        for file, of_file in pending.extents().items()
    }
    try:
        room = room_for_window(group.memory_root)
        return Need(node_id(group.memory_root), extents, min(WINDOW, room // 2))
    except (DcpMemError, OSError) as error:
        log.info("loading without the neighbours: %s", error)
        return Need(f"rank {group.ranks.rank}", extents, 0)


# -- one rank's share ------------------------------------------------------------------------------


def _take_part(
    fetcher: Fetcher,
    pending: PendingItems,
    group: LoadGroup,
    share: LoadShare,
    token: str,
    failure: _OwnFailure,
) -> None:
    """Do this rank's share: what it needs alone, transfers with peers, and the batches."""
    with peer_transfer(
        group.ranks, token, share, group.memory, pending, transport=group.transport
    ) as transfer:
        with failure.kept():
            fetch_all(fetcher, pending, share.alone)
        if share.batches:
            with _window(share, group.memory_root, token, failure) as window:
                if not failure.is_anywhere():
                    _Batches(fetcher, pending, group, share, window, failure).run()
            group.ranks.end_swaps()
    with failure.kept():
        transfer.raise_own()
    # A channel that broke because the peer had failed is reported by the peer.
    if share.is_passing and not failure.is_anywhere():
        with failure.kept():
            transfer.raise_broken()


@contextmanager
def _window(
    share: LoadShare, root: str, token: str, failure: _OwnFailure
) -> Iterator[Window | None]:
    """Open the node's window; yield None where it needs none, or a rank has failed.

    Its name is removed as soon as all ranks have opened it. The next load on the node removes it
    after a kill before that.
    """
    window: Window | None = None
    lease: int | None = None
    try:
        with failure.kept():
            if share.makes_window:
                lease = make_window(root, token, 2 * share.window_nbytes)
        if not failure.is_anywhere() and share.window_nbytes:
            with failure.kept():
                window = Window(window_path(root, token), 2 * share.window_nbytes)
        failure.is_anywhere()  # all ranks have opened it when this returns
    finally:
        if lease is not None:
            remove_window(root, token, lease)
    try:
        yield window
    finally:
        if window is not None:
            window.close()


class _Batches:
    """The batches of one load, on one rank."""

    def __init__(
        self,
        fetcher: Fetcher,
        pending: PendingItems,
        group: LoadGroup,
        share: LoadShare,
        window: Window | None,
        failure: _OwnFailure,
    ) -> None:
        self._fetcher, self._pending = fetcher, pending
        self._ranks, self._memory = group.ranks, group.memory
        self._share, self._window, self._failure = share, window, failure

    def run(self) -> None:
        """Bring all batches into the windows, and take what this rank needs, until a rank fails.

        Of each batch:

        1. Pieces from storage are fetched into the window; pieces of this node's memory that
           go to other nodes are checked. Both were begun during the batch before.
        2. Nodes swap pieces, where they have any for each other; an all-reduce before and after.
        3. Every rank takes what it needs, while the next batch is fetched.

        A half of a window is filled again only when all ranks have taken what was in it: before a
        rank says how a batch went, it has taken the batch before.
        """
        count = len(self._share.batches)
        with ThreadPoolExecutor(3, thread_name_prefix="dcp_mem-batch") as pool:
            fetching, checking = pool.submit(self._fetch, 0), pool.submit(self._checked_local, 0)
            taking: Future[None] | None = None
            for number in range(count):
                checked: Mapping[SharedPiece, _SummedBytes] = {}
                with self._failure.kept():
                    fetching.result()
                    checked = checking.result()
                if not self._share.passes_on:
                    self._wait_for(taking)
                if self._failure.is_anywhere():
                    return
                if number + 1 < count:
                    checking = pool.submit(self._checked_local, number + 1)
                if self._share.passes_on:
                    self._swap(number, checked)
                    self._wait_for(taking)
                    if self._failure.is_anywhere():
                        return
                faults.point("load.batch")
                if number + 1 < count:
                    fetching = pool.submit(self._fetch, number + 1)
                taking = pool.submit(self._take, number)
            self._wait_for(taking)

    def _wait_for(self, taking: Future[None] | None) -> None:
        with self._failure.kept():
            if taking is not None:
                taking.result()

    def _own_pieces(self, number: int) -> list[SharedPiece]:
        """Return the pieces of a batch that this rank brings."""
        return [piece for piece in self._share.batches[number] if piece.by == self._ranks.rank]

    # -- fetching and checking ---------------------------------------------------------------------

    def _fetch(self, number: int) -> None:
        """Fetch this rank's pieces of a batch from storage into the window."""
        pieces = [
            piece for piece in self._own_pieces(number) if piece.origin is None and piece.comes_in
        ]
        for _ in in_parallel(
            lambda piece: self._fetcher.fetch(piece.file, piece.start, [self._view(number, piece)]),
            pieces,
        ):
            pass

    def _checked_local(self, number: int) -> Mapping[SharedPiece, _SummedBytes]:
        """Return what this rank sends of its node's memory, held against checksums there."""
        pieces = [piece for piece in self._own_pieces(number) if not piece.comes_in]
        return dict(in_parallel(self._checked, pieces))

    def _checked(self, piece: SharedPiece) -> tuple[SharedPiece, _SummedBytes]:
        assert self._memory is not None
        return piece, self._memory.checked(piece.file, piece.start, piece.stop)

    # -- between nodes -----------------------------------------------------------------------------

    def _swap(self, number: int, checked: Mapping[SharedPiece, _SummedBytes]) -> None:
        """Send this rank's pieces to other nodes, and receive those that it brings from there.

        The CRC32C follows each piece, in four bytes: what lies in memory has no other checksum that
        all ranks know.
        """
        own = self._own_pieces(number)
        outgoing = [
            (piece, *(checked.get(piece) or self._summed(number, piece)))
            for piece in own
            if piece.to
        ]
        sent = [
            (rank, data)
            for piece, view, crc in outgoing
            for rank in piece.to
            for data in (view, memoryview(bytearray(crc.to_bytes(_CRC_NBYTES, "little"))))
        ]
        incoming = [
            (piece, self._view(number, piece), bytearray(_CRC_NBYTES))
            for piece in own
            if piece.origin is not None
        ]
        received = [
            (piece.origin, data)
            for piece, view, crc in incoming
            for data in (view, memoryview(crc))
            if piece.origin is not None
        ]
        self._ranks.swap(sent, received)
        with self._failure.kept():
            for _ in in_parallel(self._check_received, incoming):
                pass

    def _summed(self, number: int, piece: SharedPiece) -> _SummedBytes:
        view = self._view(number, piece)
        return view, checksum(view)

    def _check_received(self, received: tuple[SharedPiece, memoryview, bytearray]) -> None:
        piece, view, crc = received
        if checksum(view) != int.from_bytes(crc, "little"):
            changed = "its bytes changed on their way between nodes"
            raise RankFailed(f"sending {piece.file}", [(piece.origin or 0, changed)])
        if not piece.is_held:
            self._fetcher.check(piece.file, piece.start, [view])

    # -- taking ------------------------------------------------------------------------------------

    def _take(self, number: int) -> None:
        """Copy what this rank needs of a batch out of the window."""
        for piece in self._share.batches[number]:
            if piece.comes_in:
                address = self._address(number, piece)
                self._pending.take(piece.file, piece.start, piece.stop, address)

    def _address(self, number: int, piece: SharedPiece) -> int:
        assert self._window is not None
        return self._window.address + number % 2 * self._share.window_nbytes + piece.place

    def _view(self, number: int, piece: SharedPiece) -> memoryview:
        return view_of(self._address(number, piece), piece.stop - piece.start)
