"""Which rank sends what to whom, and what comes of it there. Pure, and the same on every rank: it follows from what all know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from dcp_mem.format import names
from dcp_mem.format.segments import Segments
from dcp_mem.policy.parity import Stripe, groups, stripes
from dcp_mem.policy.placement import Original, place
from dcp_mem.policy.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of one segment: the rank that has made it, the one that gets it, on another node, and what that sets aside."""

    sender: int
    receiver: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, stop) of a file that the sender's node has, for a file that comes about elsewhere, from `place` on."""

    sender: int
    file: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True, slots=True)
class Making:
    """A file that comes about in the receiver's memory: the XOR of the parts, zero where none of them reaches.

    room: bytes that its slot sets aside. stripe: what it is the parity of; None for a segment.
    """

    receiver: int
    file: str
    nbytes: int
    room: int
    parts: tuple[Part, ...]
    stripe: Stripe | None = None

    @property
    def is_copy(self) -> bool:
        """Whether it is what one rank has as it is."""
        return len(self.parts) == 1 and self.stripe is None and self.parts[0].file == self.file

    @property
    def senders(self) -> Sequence[int]:
        return tuple(dict.fromkeys(part.sender for part in self.parts))


@lru_cache(maxsize=8)
def incoming(
    nodes: tuple[str, ...], domains: tuple[str, ...], nbytes: tuple[int, ...], redundancy: Redundancy
) -> tuple[tuple[int, ...], ...]:
    """Of each rank, the bytes of every slot that it sets aside for others' segments or parity, next to its own of `nbytes`.

    Kept for as long as sizes stay as they are, which those of slots do, as a rule.
    """
    found: list[list[int]] = [[] for _ in nodes]
    if redundancy.parity:
        for stripe in stripes_of(nodes, domains, nbytes, redundancy.parity):
            found[stripe.keeper].append(stripe.nbytes)
    else:
        for copy in copies_of(nodes, domains, nbytes, redundancy.copies):
            found[copy.receiver].append(copy.nbytes)
    return tuple(map(tuple, found))


def makings_of(
    rank: int,
    nodes: tuple[str, ...],
    domains: tuple[str, ...],
    rooms: tuple[int, ...],
    redundancy: Redundancy,
    segments: Segments,
) -> Sequence[Making]:
    """What comes about behind a save with a rank's help. rooms: of each rank, what the slot of its segment takes."""
    if not redundancy.parity:
        return [
            Making(copy.receiver, one.file, one.nbytes, copy.nbytes, (Part(copy.sender, one.file, 0, one.nbytes, 0),))
            for copy in copies_of(nodes, domains, rooms, redundancy.copies)
            if rank in (copy.sender, copy.receiver)
            for one in (segments[copy.sender],)
        ]
    room = incoming(nodes, domains, rooms, redundancy)
    found = stripes_of(nodes, domains, segments.nbytes, redundancy.parity, nodes[rank])
    return [making_of(stripe, sum(room[stripe.keeper]), segments, {}) for stripe in found]


def making_of(stripe: Stripe, room: int, segments: Segments, senders: Mapping[int, int]) -> Making:
    """How a stripe comes about. senders: who sends of a rank's segment, where that isn't the rank itself."""
    parts = tuple(
        Part(senders.get(one.rank, one.rank), segments[one.rank].file, one.start, one.stop, one.place)
        for one in stripe.shares
    )
    file = names.parity_file(stripe.keeper, _key(stripe), segments.save_id)
    return Making(stripe.keeper, file, stripe.nbytes, max(room, stripe.nbytes), parts, stripe)


def _key(stripe: Stripe) -> str:
    """Tells stripes of a checkpoint apart by what they are the parity of."""
    return sha256(repr((stripe.nbytes, stripe.shares)).encode()).hexdigest()[:8]


def stripes_of(
    nodes: Sequence[str], domains: Sequence[str], nbytes: Sequence[int], k: int, node: str | None = None
) -> list[Stripe]:
    """The parity that ranks keep, each of which has made a segment of so many bytes. node: of its group alone."""
    members = members_of(nodes)
    segments = [{rank: nbytes[rank] for rank in ranks} for ranks in members.values()]
    domain_of = [domains[ranks[0]] for ranks in members.values()]
    only = None if node is None else list(members).index(node)
    return stripes_over(segments, list(members.values()), domain_of, k, only)


def stripes_over(
    segments: Sequence[Mapping[int, int]],
    keepers: Sequence[Sequence[int]],
    domains: Sequence[str],
    k: int,
    only: int | None = None,
) -> list[Stripe]:
    """Parity over nodes that have these segments. keepers: of each node, its ranks. only: of this node's group alone."""
    found = []
    for group in groups(domains, k) if len(segments) > 1 else ():
        if only is None or only in group:
            sizes = {node: sum(segments[node].values()) for node in group}
            found += stripes(sizes, {node: segments[node] for node in group}, {node: keepers[node] for node in group})
    return found


def members_of(nodes: Sequence[str]) -> dict[str, list[int]]:
    """The ranks on each node, nodes in the order of their first ranks."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members


@lru_cache(maxsize=8)
def copies_of(
    nodes: tuple[str, ...], domains: tuple[str, ...], nbytes: tuple[int, ...], replicas: int
) -> tuple[Copy, ...]:
    """All copies, by sender; each node's are spread over its ranks.

    Of every rank: its node, that node's failure domain, and what its segment takes.
    """
    members = members_of(nodes)
    numbers = {node: number for number, node in enumerate(members)}
    originals = [Original(rank, numbers[node], nbytes[rank]) for rank, node in enumerate(nodes)]
    placed = place(originals, [domains[ranks[0]] for ranks in members.values()], min(replicas, len(members) - 1))
    incoming: list[list[int]] = [[] for _ in members]
    for rank, targets in enumerate(placed):
        for target in targets:
            incoming[target].append(rank)
    found = []
    for ranks, senders in zip(members.values(), incoming, strict=True):
        found += _spread(ranks, senders, nbytes)
    return tuple(sorted(found, key=lambda copy: (copy.sender, copy.receiver)))


def _spread(ranks: Sequence[int], senders: Sequence[int], nbytes: Sequence[int]) -> list[Copy]:
    """Share what comes to a node out among its ranks, the largest first, each to whoever has least by then."""
    loads = dict.fromkeys(ranks, (0, 0))
    found = []
    for sender in sorted(senders, key=lambda sender: (-nbytes[sender], sender)):
        receiver = min(ranks, key=lambda rank: (loads[rank], rank))
        taken, count = loads[receiver]
        loads[receiver] = taken + nbytes[sender], count + 1
        found.append(Copy(sender, receiver, nbytes[sender]))
    return found
