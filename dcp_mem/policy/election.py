"""Which checkpoint a load takes, from what the ranks and the storage report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A checkpoint that a rank's node, or the storage, has.

    save_id: "" for one that torch's own writer made. problem: why it can't be loaded from there ("" if it can).
    """

    name: str
    save_id: str
    created: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint that can be loaded: from the memory of every node (memory), from storage, or both."""

    name: str
    save_id: str
    created: float
    memory: bool
    storage: bool


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What to try, newest first, and why other checkpoints were passed over."""

    choices: tuple[Choice, ...]
    reasons: tuple[str, ...]


def elect(inventories: Sequence[Sequence[Finding]], stored: Sequence[Finding]) -> RecoveryPlan:
    """Rank the checkpoints for which every rank has a source, newest first.

    inventories: what each rank finds in its node's memory. stored: what storage has.
    """
    in_memory = [{(one.name, one.save_id): one for one in inventory} for inventory in inventories]
    on_storage = {(one.name, one.save_id): one for one in stored}
    keys = set(on_storage).union(*in_memory)
    choices, reasons = [], []
    for key in keys:
        everyone = [found[key] for found in in_memory if key in found]
        memory = len(everyone) == len(in_memory) and not any(one.problem for one in everyone)
        storage = key in on_storage and not on_storage[key].problem
        created = max(one.created for one in [*everyone, *([on_storage[key]] if key in on_storage else [])])
        if memory or storage:
            choices.append(Choice(*key, created, memory, storage))
        else:
            reasons.append(
                (
                    created,
                    f"{key[0]}{key[1] and f' (save {key[1]})'}: {_why(everyone, len(in_memory), on_storage.get(key))}",
                )
            )
    choices.sort(key=lambda choice: (choice.created, choice.name, choice.save_id), reverse=True)
    return RecoveryPlan(tuple(choices), tuple(text for _, text in sorted(reasons, reverse=True)))


def in_common(plans: Sequence[RecoveryPlan]) -> RecoveryPlan:
    """What every rank can load, where each rank saved its own part alone (so save ids differ): matched by name."""
    everywhere = set.intersection(*({choice.name for choice in plan.choices} for plan in plans))
    newest: dict[str, Choice] = {}
    for choice in plans[0].choices:
        newest.setdefault(choice.name, choice)
    missing = [f"{name}: not every rank has its part" for name in newest if name not in everywhere]
    choices = [choice for name, choice in newest.items() if name in everywhere]
    return RecoveryPlan(tuple(choices), (*plans[0].reasons, *missing))


def _why(in_memory: Sequence[Finding], ranks: int, stored: Finding | None) -> str:
    problems = sorted({one.problem for one in in_memory if one.problem})
    if problems:
        memory = f"memory: {problems[0]}"
    elif in_memory:
        memory = f"memory: only {len(in_memory)} of {ranks} ranks' nodes hold it"
    else:
        memory = "not in memory"
    return f"{memory}; " + (f"storage: {stored.problem}" if stored is not None else "not committed on storage")
