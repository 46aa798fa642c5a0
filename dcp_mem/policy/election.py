"""Which checkpoint a load takes, from what the ranks and the storage report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_mem.policy.parity import Stripe, Term, rebuilding
from dcp_mem.policy.redundancy import Redundancy


@dataclass(frozen=True, slots=True)
class Finding:
    """A checkpoint that a rank's node, or the storage, has.

    save_id: "" for one that torch's own writer made. problem: why it can't be loaded from there ("" if it can).
    count: how many segments it has in all (0: not told). segments: the ranks whose segments lie there, None: all of them;
    lacking: why others don't. stripes: parity that lies there, with its file. sizes: bytes of the segments that it is of, and of
    empty ones.
    redundancy: what had been made of it.
    """

    name: str
    save_id: str
    created: float
    problem: str = ""
    count: int = 0
    segments: frozenset[int] | None = None
    lacking: str = ""
    stripes: tuple[tuple[str, Stripe], ...] = ()
    sizes: Mapping[int, int] = field(default_factory=dict)
    redundancy: Redundancy = field(default_factory=Redundancy)


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that can be loaded: from the memory of all nodes together (memory), from storage, or both.

    holders: for each segment, the ranks of this load whose node has it in memory; None: every rank's node has them all.
    teller: the rank that tells all others what the checkpoint consists of; None: each sees it by itself.
    lost: segments that no node has, and what each is the XOR of. parity: what the stripes among these are called, and the ranks
    whose nodes have them. redundancy: what had been made of it.
    """

    name: str
    save_id: str
    created: float
    memory: bool
    storage: bool
    holders: Mapping[int, tuple[int, ...]] | None = None
    teller: int | None = None
    lost: Mapping[int, tuple[Term, ...]] = field(default_factory=dict)
    parity: tuple[tuple[str, tuple[int, ...]], ...] = ()
    redundancy: Redundancy = field(default_factory=Redundancy)


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to try, newest first, and why other checkpoints were passed over."""

    choices: tuple[Choice, ...]
    reasons: tuple[str, ...]


def elect(inventories: Sequence[Sequence[Finding]], stored: Sequence[Finding]) -> RecoveryPlan:
    """Rank the checkpoints for whose every segment there is a source, newest first.

    inventories: what each rank finds in its node's memory. stored: what storage has.
    """
    in_memory = [{(one.name, one.save_id): one for one in inventory} for inventory in inventories]
    on_storage = {(one.name, one.save_id): one for one in stored}
    keys = set(on_storage).union(*in_memory)
    choices, reasons = [], []
    for key in keys:
        found = {rank: inventory[key] for rank, inventory in enumerate(in_memory) if key in inventory}
        there = on_storage.get(key)
        created = max(one.created for one in [*found.values(), *([there] if there is not None else [])])
        choice = _choice(key, created, found, len(in_memory), storage=there is not None and not there.problem)
        if choice.memory or choice.storage:
            choices.append(choice)
        else:
            save = f" (save {key[1]})" if key[1] else ""
            reasons.append((created, f"{key[0]}{save}: {_why(choice, found, len(in_memory), there)}"))
    choices.sort(key=lambda choice: (choice.created, choice.name, choice.save_id), reverse=True)
    return RecoveryPlan(tuple(choices), tuple(text for _, text in sorted(reasons, reverse=True)))


def _choice(key: tuple[str, str], created: float, found: Mapping[int, Finding], ranks: int, *, storage: bool) -> Choice:
    usable = {rank: one for rank, one in found.items() if not one.problem}
    known = {one.redundancy for one in usable.values()}
    redundancy = max(known, key=lambda one: (one.copies, one.parity), default=Redundancy())
    if len(usable) == ranks and all(one.segments is None for one in usable.values()):
        return Choice(*key, created, memory=True, storage=storage, redundancy=redundancy)
    count = max((one.count for one in usable.values()), default=0)
    lists: list[list[int]] = [[] for _ in range(count)]
    for rank, one in usable.items():
        for segment in range(count) if one.segments is None else one.segments:
            lists[segment].append(rank)
    holders = {segment: tuple(of_segment) for segment, of_segment in enumerate(lists) if of_segment}
    teller = min(usable) if holders and len(usable) < ranks else None
    lost, parity = _coming_back(usable, [segment for segment in range(count) if segment not in holders], holders)
    is_whole = bool(count) and len(holders) + len(lost) == count
    return Choice(*key, created, is_whole, storage, holders, teller, lost if is_whole else {}, parity, redundancy)


def _coming_back(
    found: Mapping[int, Finding], missing: Sequence[int], holders: Mapping[int, tuple[int, ...]]
) -> tuple[dict[int, tuple[Term, ...]], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Missing segments that parity brings back, and the parity that somebody has."""
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
    for segment in missing:
        known = list(stripes.values())
        terms = rebuilding(segment, sizes[segment], known, holders.keys()) if segment in sizes else None
        if terms is not None:
            lost[segment] = tuple(terms)
    return lost, tuple((file, tuple(ranks)) for file, ranks in keepers.items())


def in_common(plans: Sequence[RecoveryPlan]) -> RecoveryPlan:
    """What every rank can load, where each rank saved its own part alone (so save ids differ): matched by name."""
    everywhere = set.intersection(*({choice.name for choice in plan.choices} for plan in plans))
    newest: dict[str, Choice] = {}
    for choice in plans[0].choices:
        newest.setdefault(choice.name, choice)
    missing = [f"{name}: not every rank has its part" for name in newest if name not in everywhere]
    choices = [choice for name, choice in newest.items() if name in everywhere]
    return RecoveryPlan(tuple(choices), (*plans[0].reasons, *missing))


def _why(choice: Choice, found: Mapping[int, Finding], ranks: int, stored: Finding | None) -> str:
    problems = sorted({one.problem for one in found.values() if one.problem})
    lacking = sorted({one.lacking for one in found.values() if one.lacking})
    count = max((one.count for one in found.values()), default=0)
    there = {**(choice.holders or {}), **choice.lost}
    missing = [str(segment) for segment in range(count) if segment not in there]
    if problems:
        memory = f"memory: {problems[0]}"
    elif missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        why = f" ({lacking[0]})" if lacking else ""
        memory = f"memory: no node has the segments of ranks {', '.join(missing[:8])}{more}{why}"
    elif found:
        memory = f"memory: only {len(found)} of {ranks} ranks' nodes hold it"
    else:
        memory = "not in memory"
    return f"{memory}; " + (f"storage: {stored.problem}" if stored is not None else "not committed on storage")
