"""Decide which checkpoints a follower may take next.

The rules:

1. Only what is newer, by the job's order, than the last one that was taken.
2. Nothing that turned out to be damaged where it lies.
3. Nothing that would first have to be rebuilt or copied: a follower leaves the job's memory as it
   is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.policy.order import Place, newest_first
from dcp_mem.policy.redundancy import Redundancy

Identity = tuple[str, str, bool]
"""Name and save id of a checkpoint, and whether storage has it."""


def identity(choice: ElectedCheckpoint) -> Identity:
    """Return what a checkpoint that is damaged is remembered by.

    One that was damaged in memory may come to storage later, and be whole there.
    """
    return choice.name, choice.save_id, choice.storage


def unseen(
    choices: Sequence[ElectedCheckpoint],
    last: Place | None,
    damaged: Collection[Identity] = (),
    *,
    only_durable: bool = False,
) -> list[ElectedCheckpoint]:
    """Return the checkpoints that a follower may take, in their order.

    `choices`: what can be loaded, newest first. `last`: place of the one that was taken last; None
    for none so far.
    """
    found = [_untouched(one) for one in _newer(choices, last) if identity(one) not in damaged]
    return [one for one in found if one.storage or (one.memory and not only_durable)]


def _newer(choices: Sequence[ElectedCheckpoint], last: Place | None) -> Sequence[ElectedCheckpoint]:
    if last is None:
        return choices
    # All are ordered together: a run's greatest generation may be known of one of them alone. What
    # is equal to the last one comes behind it.
    placed = [(last, None), *((one.place, one) for one in choices)]
    ordered = [one for _, one in newest_first(placed, lambda each: each[0])]
    newer: list[ElectedCheckpoint] = []
    for one in ordered:
        if one is None:
            break
        newer.append(one)
    return newer


def _untouched(choice: ElectedCheckpoint) -> ElectedCheckpoint:
    return replace(
        choice, memory=choice.memory and not choice.lost, lost={}, redundancy=Redundancy()
    )
