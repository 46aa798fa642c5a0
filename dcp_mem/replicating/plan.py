"""Which rank sends which bytes to which rank, and which file they make there.

All functions are pure: every rank computes the same plans from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256

from dcp_mem.common.value_class import value_class
from dcp_mem.format import names
from dcp_mem.format.names import FROZEN
from dcp_mem.format.segments import Segments
from dcp_mem.policy.parity import Stripe, clipped, groups, steady_nbytes, stripes
from dcp_mem.policy.placement import Original, place
from dcp_mem.policy.redundancy import Redundancy


@value_class
class Copy:
    """One copy of one segment."""

    sender: int
    receiver: int
    nbytes: int


@value_class(kw_only=True)
class FilePart:
    """Bytes [start, stop) of a file on the sender's node, which go to `place` of another file."""

    sender: int
    file: str
    start: int
    stop: int
    place: int


@value_class(kw_only=True)
class FilePlan:
    """A file to assemble on the receiver: the XOR of its parts; bytes that none covers are zero."""

    receiver: int
    file: str
    nbytes: int
    slot_nbytes: int  # bytes of the slot that is set aside for the file
    parts: tuple[FilePart, ...]
    stripe: Stripe | None = None  # what the file is the parity of; None for a segment

    @property
    def is_copy(self) -> bool:
        """Whether the file is a plain copy of a file of one rank's node."""
        return len(self.parts) == 1 and self.stripe is None and self.parts[0].file == self.file

    @property
    def senders(self) -> Sequence[int]:
        """The ranks that send parts, each once."""
        return tuple(dict.fromkeys(part.sender for part in self.parts))

    @property
    def is_second(self) -> bool:
        """Whether the file is a rank's segment of frozen items, which checkpoints may share."""
        return self.stripe is None and names.rank_of(self.file) >= FROZEN

    def parts_from(self, sender: int) -> Sequence[FilePart]:
        """Return the parts that a rank sends."""
        return [part for part in self.parts if part.sender == sender]

    def checksums_from(self, sender: int) -> Sequence[str]:
        """Return the segments whose checksums a rank sends after its parts: those that parity is
        made of, or the one that is copied, or rebuilt from parity.
        """
        files = [part.file for part in self.parts_from(sender)]
        if self.stripe is not None:
            return list(dict.fromkeys(files))
        is_told = self.is_copy or any(map(names.PARITY.fullmatch, files))
        return [self.file] if files and is_told else []


@lru_cache(maxsize=8)
def incoming(
    nodes: tuple[str, ...],
    domains: tuple[str, ...],
    nbytes: tuple[int, ...],
    redundancy: Redundancy,
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the bytes of every slot that it sets aside for copies or parity."""
    found: list[list[int]] = [[] for _ in nodes]
    if redundancy.parity:
        for stripe in stripes_of(nodes, domains, nbytes, redundancy.parity):
            found[stripe.keeper].append(stripe.nbytes)
    else:
        for copy in copies_of(nodes, domains, nbytes, redundancy.copies):
            found[copy.receiver].append(copy.nbytes)
    return tuple(map(tuple, found))


def incoming_seconds(
    nodes: tuple[str, ...],
    domains: tuple[str, ...],
    seconds_nbytes: tuple[int, ...],
    redundancy: Redundancy,
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the bytes of every slot for copies of segments of frozen items, by what
    the slot of every rank's such segment takes; 0 for none.
    """
    if not any(seconds_nbytes) or not redundancy.copies:
        return tuple(() for _ in nodes)
    sizes = incoming(nodes, domains, seconds_nbytes, redundancy)
    return tuple(tuple(nbytes for nbytes in of_rank if nbytes) for of_rank in sizes)


def file_plans(
    rank: int,
    nodes: tuple[str, ...],
    domains: tuple[str, ...],
    slots_nbytes: tuple[int, ...],
    redundancy: Redundancy,
    segments: Segments,
    seconds_nbytes: tuple[int, ...] = (),
) -> Sequence[FilePlan]:
    """Return the plans of a save that a rank, or with parity one of its group, has a part in."""
    if not redundancy.parity:
        firsts = copies_of(nodes, domains, slots_nbytes, redundancy.copies)
        seconds: tuple[Copy, ...] = ()
        if any(seconds_nbytes):
            seconds = copies_of(nodes, domains, seconds_nbytes, redundancy.copies)
        return [
            copy_plan(
                segments,
                copy.sender + number,
                sender=copy.sender,
                receiver=copy.receiver,
                slot_nbytes=copy.nbytes,
            )
            for copies, number in ((firsts, 0), (seconds, FROZEN))
            for copy in copies
            if rank in (copy.sender, copy.receiver) and (not number or copy.nbytes)
        ]
    set_aside = incoming(nodes, domains, slots_nbytes, redundancy)
    found = stripes_of(nodes, domains, segments.nbytes, redundancy.parity, nodes[rank])
    return [parity_plan(stripe, sum(set_aside[stripe.keeper]), segments, {}) for stripe in found]


def copy_plan(
    segments: Segments, segment: int, *, sender: int, receiver: int, slot_nbytes: int
) -> FilePlan:
    """Return the plan of a copy of one segment."""
    found = segments.numbered(segment)
    file, nbytes = found.file, found.nbytes
    part = FilePart(sender=sender, file=file, start=0, stop=nbytes, place=0)
    return FilePlan(
        receiver=receiver, file=file, nbytes=nbytes, slot_nbytes=slot_nbytes, parts=(part,)
    )


def parity_plan(
    stripe: Stripe, slot_nbytes: int, segments: Segments, senders: Mapping[int, int]
) -> FilePlan:
    """Return the plan of the parity of a stripe, of which at least so many bytes were set aside.
    `senders`: the rank that sends of a segment, where that isn't the segment's own rank.
    """
    parts = tuple(
        FilePart(
            sender=senders.get(share.rank, share.rank),
            file=segments[share.rank].file,
            start=share.start,
            stop=share.stop,
            place=share.place,
        )
        for share in stripe.shares
    )
    return FilePlan(
        receiver=stripe.keeper,
        file=names.parity_file(stripe.keeper, _key(stripe), segments.save_id),
        nbytes=stripe.nbytes,
        slot_nbytes=max(slot_nbytes, stripe.nbytes),
        parts=parts,
        stripe=stripe,
    )


def _key(stripe: Stripe) -> str:
    """Return a short text that tells the stripes of a checkpoint apart by their shares."""
    return sha256(repr((stripe.nbytes, stripe.shares)).encode()).hexdigest()[:8]


def stripes_of(
    nodes: Sequence[str],
    domains: Sequence[str],
    nbytes: Sequence[int],
    k: int,
    node: str | None = None,
) -> list[Stripe]:
    """Return the stripes that ranks keep where each has its own segment, of all groups or one
    node's.
    """
    members = members_of(nodes)
    segments = [{rank: steady_nbytes(nbytes[rank]) for rank in ranks} for ranks in members.values()]
    domain_of = [domains[ranks[0]] for ranks in members.values()]
    only = None if node is None else list(members).index(node)
    found = stripes_over(segments, list(members.values()), domain_of, k, only)
    return [clipped(stripe, nbytes) for stripe in found]


def stripes_over(
    segments: Sequence[Mapping[int, int]],
    keepers: Sequence[Sequence[int]],
    domains: Sequence[str],
    k: int,
    only: int | None = None,
) -> list[Stripe]:
    """Return the stripes over nodes that have segments of these lengths, by rank, of all groups or
    of the group of node `only`.
    """
    found = []
    for group in groups(domains, k) if len(segments) > 1 else ():
        if only is None or only in group:
            sizes = {node: sum(segments[node].values()) for node in group}
            found += stripes(
                sizes,
                {node: segments[node] for node in group},
                {node: keepers[node] for node in group},
            )
    return found


def members_of(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks on each node, nodes in the order of their first ranks."""
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return members


@lru_cache(maxsize=8)
def copies_of(
    nodes: tuple[str, ...], domains: tuple[str, ...], nbytes: tuple[int, ...], replicas: int
) -> tuple[Copy, ...]:
    """Return all copies of a checkpoint's segments, by sender; a node's are spread over its ranks.
    There are fewer of each segment where there are too few nodes.
    """
    members = members_of(nodes)
    numbers = {node: number for number, node in enumerate(members)}
    originals = [Original(rank, numbers[node], nbytes[rank]) for rank, node in enumerate(nodes)]
    placed = place(
        originals,
        [domains[ranks[0]] for ranks in members.values()],
        min(replicas, len(members) - 1),
    )
    senders_to: list[list[int]] = [[] for _ in members]
    for rank, targets in enumerate(placed):
        for target in targets:
            senders_to[target].append(rank)
    found = []
    for ranks, senders in zip(members.values(), senders_to, strict=True):
        found += _spread(ranks, senders, nbytes)
    return tuple(sorted(found, key=lambda copy: (copy.sender, copy.receiver)))


def _spread(ranks: Sequence[int], senders: Sequence[int], nbytes: Sequence[int]) -> list[Copy]:
    """Assign a node's copies to its ranks: the largest first, to the rank with the least so far."""
    loads = dict.fromkeys(ranks, (0, 0))
    found = []
    for sender in sorted(senders, key=lambda sender: (-nbytes[sender], sender)):
        receiver = min(ranks, key=lambda rank: (loads[rank], rank))
        assigned_nbytes, count = loads[receiver]
        loads[receiver] = assigned_nbytes + nbytes[sender], count + 1
        found.append(Copy(sender, receiver, nbytes[sender]))
    return found
