"""Decide which checkpoint a load takes.

Decided from what each rank's node has in memory and what storage has. The rules:

1. A checkpoint can be loaded if storage has it whole, or if the nodes' memory together has every
   segment, where parity may stand in for lost ones.
2. Name and save id tell checkpoints apart: memory and storage of one save are one choice.
3. Newest first, by the job's order. Where one can't be opened after all, the next is tried.
4. What was rejected is passed over, wherever it lies, unless it is asked for by its name.
5. What can't be loaded is named, with the reason.
6. Memory stands for a checkpoint that got to storage only while storage has no other one under its
   name. Where storage has none at all, as after an `rm`, memory stands for it. One that hasn't got
   there stands unless another writer has saved under its name since, or the directory that its
   save has made is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.policy.order import UNNUMBERED, Place, SaveNumber, in_order, joined_place
from dcp_mem.policy.parity import Stripe, Term, rebuilding
from dcp_mem.policy.redundancy import Redundancy

_RANKS = 1 << 24
"""As `names.FROZEN`: a segment's number modulo this is its rank."""
_COPIES_AND_PARITY = attrgetter("copies", "parity")
_MOST_NAMED = 8
"""Missing segments that a reason lists by number."""


@sendable
@value_class(kw_only=True)
class FoundCheckpoint:
    """A checkpoint, or a part of it, as found on a rank's node or on storage."""

    name: str
    save_id: str  # "" for a checkpoint that torch's own writer made
    place: Place  # by which it gets its place in the order
    rejected: str = ""  # why it is not to be resumed from; "" if nobody has rejected it
    was_stored: bool = False  # in memory: whether it is known to have got to storage
    # in memory: identity of the `.metadata` that lay on storage when it was saved, "" for none;
    # None where nobody looked
    replaces: str | None = None
    metadata: str = ""
    is_renamed: bool = False  # on storage: copied or moved there from the name that it had
    problem: str = ""  # why it can't be loaded from there; "" if it can
    count: int = 0  # how many ranks' segments the whole checkpoint has; 0 where that isn't known
    second: tuple[int, ...] = ()  # numbers of the second segments that some ranks have
    segments: frozenset[int] | None = None  # ranks whose segments lie there; None for all of them
    lacking: str = ""
    stripes: tuple[tuple[str, Stripe], ...] = ()  # parity that lies there, each with its file
    # bytes of the segments that this parity is of, and of empty segments, by rank
    sizes: Mapping[int, int] = field(default_factory=dict)
    # what copies or parity had been made of the checkpoint
    redundancy: Redundancy = field(default_factory=Redundancy)


@sendable
@value_class(kw_only=True)
class ElectedCheckpoint:
    """A checkpoint that can be loaded, and from where."""

    name: str
    save_id: str  # "" for a checkpoint that torch's own writer made
    place: Place
    memory: bool  # the memory of all nodes together has it
    storage: bool
    # for each segment, the ranks of this load whose node has it in memory; None where every rank's
    # node has all segments
    holders: Mapping[int, tuple[int, ...]] | None = None
    # the rank that describes the checkpoint to all others; None where each rank reads the
    # description by itself
    teller: int | None = None
    # for each segment that no node has, the terms whose XOR it is
    lost: Mapping[int, tuple[Term, ...]] = field(default_factory=dict)
    # the files of the stripes among these terms, each with the ranks whose nodes have it
    parity: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # what copies or parity had been made of the checkpoint
    redundancy: Redundancy = field(default_factory=Redundancy)


@sendable
@value_class
class RecoveryPlan:
    """The candidates of a load, and the reasons against all other checkpoints."""

    choices: tuple[ElectedCheckpoint, ...]  # checkpoints that can be loaded, newest first
    reasons: tuple[str, ...]  # why each other checkpoint can't be, newest first
    # the greatest number of all checkpoints, also of those that can't be loaded
    newest: SaveNumber = UNNUMBERED


def elect(
    inventories: Sequence[Sequence[FoundCheckpoint]],
    stored: Sequence[FoundCheckpoint],
    *,
    is_named: bool = False,
    removed: Collection[str] = (),
) -> RecoveryPlan:
    """Rank the checkpoints for whose every segment there is a source, newest first.

    `is_named`: whether these are the checkpoints of a name that was asked for. `removed`: names
    whose directories on storage were made by their saves, and are gone.
    """
    in_memory = [{(one.name, one.save_id): one for one in inventory} for inventory in inventories]
    on_storage = {(one.name, one.save_id): one for one in stored}
    choices, reasons = [], list[tuple[Place, str]]()
    for key in set(on_storage).union(*in_memory):
        found = {
            rank: inventory[key] for rank, inventory in enumerate(in_memory) if key in inventory
        }
        of_storage = on_storage.get(key)
        known = [*found.values(), *([of_storage] if of_storage is not None else [])]
        place = joined_place([one.place for one in known], key)
        is_stored = of_storage is not None and not of_storage.problem
        choice = _choice(key, place, found, len(in_memory), storage=is_stored)
        rejected = "" if is_named else next((one.rejected for one in known if one.rejected), "")
        stale = _stale(key, found.values(), stored, removed) if of_storage is None else ""
        save = f" (save {key[1]})" if key[1] else ""
        if stale:
            reasons.append((place, f"{key[0]}{save}: {stale}"))
        elif rejected:
            reasons.append((place, f"{key[0]}{save}: rejected: {rejected}"))
        elif choice.memory or choice.storage:
            choices.append(choice)
        else:
            why = _why(choice, found, len(in_memory), of_storage)
            reasons.append((place, f"{key[0]}{save}: {why}"))
    places = [choice.place for choice in choices] + [place for place, _ in reasons]
    # All are ordered together: a run's greatest generation may be known of one of them alone.
    ordered = {places[number].key: newer for newer, number in enumerate(in_order(places))}
    choices.sort(key=lambda choice: ordered[choice.place.key])
    saves = list(map(_save_of, choices))
    if len(set(saves)) < len(saves):
        # Of one save and its copies, which all have its number, the save itself goes first.
        copies = {(one.name, one.save_id) for one in stored if one.is_renamed}
        first = {save: number for number, save in reversed(list(enumerate(saves)))}
        choices.sort(
            key=lambda choice: (
                first[_save_of(choice)],
                not choice.memory,
                (choice.name, choice.save_id) in copies,
            )
        )
    reasons.sort(key=lambda reason: ordered[reason[0].key])
    return RecoveryPlan(
        tuple(choices),
        tuple(text for _, text in reasons),
        max((place.number for place in places), default=UNNUMBERED),
    )


def _save_of(choice: ElectedCheckpoint) -> tuple[str, SaveNumber]:
    return choice.save_id or f"/{choice.name}", choice.place.number


def _stale(
    key: tuple[str, str],
    found: Iterable[FoundCheckpoint],
    stored: Iterable[FoundCheckpoint],
    removed: Collection[str],
) -> str:
    """Return why memory doesn't stand for a checkpoint any more that storage lacks; "" if it does.

    A checkpoint without a save id is another writer's. It is newer than one in memory if it came
    after that was saved: then its `.metadata` is another one than lay there before.
    """
    others = [one for one in stored if one.name == key[0] and not one.problem]
    for one in found:
        if one.was_stored and others:
            return "it was on storage, where another checkpoint of that name is in its place now"
        foreign = {other.metadata for other in others if not other.save_id}
        if one.replaces is not None and foreign - {one.replaces}:
            return "another writer has saved a checkpoint of that name on storage since"
        if one.replaces is not None and not one.was_stored and key[0] in removed:
            return "its directory was removed before it got to storage"
    return ""


def in_common(plans: Sequence[RecoveryPlan]) -> RecoveryPlan:
    """Return what every rank can load, where each rank has saved its own part alone.

    The save ids of such parts differ, so checkpoints are matched by name.
    """
    everywhere = set.intersection(*({choice.name for choice in plan.choices} for plan in plans))
    newest: dict[str, ElectedCheckpoint] = {}
    for choice in plans[0].choices:
        newest.setdefault(choice.name, choice)
    missing = [f"{name}: not every rank has its part" for name in newest if name not in everywhere]
    choices = [choice for name, choice in newest.items() if name in everywhere]
    greatest = max(plan.newest for plan in plans)
    return RecoveryPlan(tuple(choices), (*plans[0].reasons, *missing), newest=greatest)


def _choice(
    key: tuple[str, str],
    place: Place,
    found: Mapping[int, FoundCheckpoint],
    ranks: int,
    *,
    storage: bool,
) -> ElectedCheckpoint:
    """Put together what the ranks have found of one checkpoint."""
    usable = {rank: one for rank, one in found.items() if not one.problem}
    known = [one.redundancy for one in usable.values()]
    choice = ElectedCheckpoint(
        name=key[0],
        save_id=key[1],
        place=place,
        memory=True,
        storage=storage,
        redundancy=max(known, key=_COPIES_AND_PARITY, default=Redundancy()),
    )
    whole = [one for one in usable.values() if one.segments is None]
    if len(whole) == ranks:
        return choice
    numbers = _numbers(usable)
    holders = _holders(usable, numbers)
    missing = [segment for segment in numbers if segment not in holders]
    lost, parity = _rebuilt(usable, missing, holders)
    is_whole = bool(numbers) and len(holders) + len(lost) == len(numbers)
    return replace(
        choice,
        memory=is_whole,
        holders=holders,
        teller=min(usable) if holders and len(usable) < ranks else None,
        lost=lost if is_whole else {},
        parity=parity,
    )


def _numbers(found: Mapping[int, FoundCheckpoint]) -> list[int]:
    """Return the numbers of a checkpoint's segments."""
    count = max((one.count for one in found.values()), default=0)
    return [*range(count), *max((one.second for one in found.values()), key=len, default=())]


def _holders(
    found: Mapping[int, FoundCheckpoint], numbers: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Return the ranks whose nodes have it, for each segment that any node has."""
    ranks: dict[int, list[int]] = {number: [] for number in numbers}
    for rank, one in found.items():
        for segment in numbers if one.segments is None else one.segments:
            ranks[segment].append(rank)
    return {segment: tuple(of_segment) for segment, of_segment in ranks.items() if of_segment}


def _rebuilt(
    found: Mapping[int, FoundCheckpoint],
    missing: Sequence[int],
    holders: Mapping[int, tuple[int, ...]],
) -> tuple[dict[int, tuple[Term, ...]], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the missing segments that parity brings back, and the parity that any node has."""
    if not missing:
        return {}, ()
    stripes: dict[str, Stripe] = {}
    keepers: dict[str, list[int]] = {}
    sizes: dict[int, int] = {}
    for rank, one in found.items():
        sizes.update(one.sizes)
        for file, stripe in one.stripes:
            stripes[file] = stripe
            keepers.setdefault(file, []).append(rank)
    lost = {}
    for segment in (segment for segment in missing if segment in sizes):
        known = list(stripes.values())
        terms = rebuilding(segment, sizes[segment], known, holders.keys())
        if terms is not None:
            lost[segment] = tuple(terms)
    return lost, tuple((file, tuple(ranks)) for file, ranks in keepers.items())


def _why(
    choice: ElectedCheckpoint,
    found: Mapping[int, FoundCheckpoint],
    ranks: int,
    stored: FoundCheckpoint | None,
) -> str:
    """Say why a checkpoint can't be loaded from memory, and why not from storage."""
    problems = sorted({one.problem for one in found.values() if one.problem})
    lacking = sorted({one.lacking for one in found.values() if one.lacking})
    known = {**(choice.holders or {}), **choice.lost}
    missing = [str(number % _RANKS) for number in _numbers(found) if number not in known]
    if problems:
        memory = f"memory: {problems[0]}"
    elif missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        why = f" ({lacking[0]})" if lacking else ""
        listed = ", ".join(missing[:_MOST_NAMED])
        memory = f"memory: no node has the segments of ranks {listed}{more}{why}"
    elif found:
        memory = f"memory: only {len(found)} of {ranks} ranks' nodes hold it"
    else:
        memory = "not in memory"
    return f"{memory}; " + (
        f"storage: {stored.problem}" if stored is not None else "not committed on storage"
    )
