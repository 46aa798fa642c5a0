"""The order of a job's checkpoints: which of two is newer. No clock takes part in it (ADR 23).

Decided from the numbers that saves got from their ranks. The rules:

1. A save's number is the generation of its run, and the count of the save. Ranks agree on a number
   above all that any of them knows of, so the greater number is the newer save.
2. A run may begin before it knows what storage has. Its generation is raised later, and then holds
   for all its saves: whoever knows the raised one tells the others (`Place.run`).
3. A checkpoint that another writer has put on storage has no number. It comes right behind the
   newest one of the job's that storage had before it, by the storage's own clock.
4. A checkpoint of an older dcp_mem has no number either. It is older than all that have one; among
   themselves these go by the time of the save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, total_ordering
from operator import attrgetter
from typing import TypeVar

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class

T = TypeVar("T")

_COUNTS = 1 << 32
_NUMBER = attrgetter("number")


@sendable
@value_class(frozen=True)
@total_ordering
class SaveNumber:
    """The number of a save within its job; the greater one is newer."""

    generation: int = 0  # of the run; 0 for a checkpoint without a number
    count: int = 0

    @property
    def packed(self) -> int:
        """The number as one integer, which is short when it is sent."""
        return self.generation * _COUNTS + self.count

    @staticmethod
    def unpacked(packed: int) -> SaveNumber:
        """Return the number that `packed` stands for."""
        return SaveNumber(*divmod(packed, _COUNTS))

    def __lt__(self, other: SaveNumber) -> bool:
        return (self.generation, self.count) < (other.generation, other.count)

    def __str__(self) -> str:
        return f"{self.generation}.{self.count}" if self.generation else "none"


UNNUMBERED = SaveNumber()


def next_number(known: SaveNumber, generation: int) -> SaveNumber:
    """Return the number of the next save.

    `generation`: the one that the run goes on with; 0 if it hasn't begun one. A run that learns of
    a newer generation begins another one, and is another run from then on.
    """
    if generation and generation >= known.generation:
        return SaveNumber(generation, known.count + 1 if generation == known.generation else 1)
    return SaveNumber(known.generation + 1, 1)


@sendable
@value_class(kw_only=True)
class Place:
    """The facts by which a checkpoint gets its place in the order."""

    number: SaveNumber
    run: str = ""  # token of the run that saved it; "" where that isn't known
    # When it was saved, in seconds since the epoch. It counts only among checkpoints without a
    # number.
    time: float = 0.0
    # when storage got its `.metadata`, by the storage's clock; 0.0 where it didn't, or doesn't tell
    stored_at: float = 0.0
    # Whether it is none of the job's saves. One that has a number all the same comes right behind
    # the save with that number.
    is_foreign: bool = False
    step: int | None = None  # its training step; None where that isn't known
    key: tuple[str, ...] = ()  # tells it from all others, and decides where nothing else does


_Rank = tuple[SaveNumber, bool, float, int, tuple[str, ...]]


def newest_first(found: Iterable[T], place: Callable[[T], Place]) -> list[T]:
    """Return the checkpoints of a job, the newest first."""
    listed = list(found)
    return [listed[number] for number in in_order(list(map(place, listed)))]


def in_order(places: Sequence[Place]) -> list[int]:
    """Return the numbers of these places of a job, that of the newest first."""
    if len(places) < 2:
        return list(range(len(places)))
    generations = raised(places)
    numbers = [
        SaveNumber(max(one.number.generation, generations.get(one.run, 0)), one.number.count)
        for one in places
    ]
    anchors = sorted(
        [
            (each.stored_at, number)
            for each, number in zip(places, numbers, strict=True)
            if each.stored_at and each.number.generation and not each.is_foreign
        ]
    )
    ranks = list(map(partial(_rank, anchors), places, numbers))
    return sorted(range(len(places)), key=ranks.__getitem__, reverse=True)


def is_newer(one: Place, other: Place) -> bool:
    """Return whether a checkpoint is newer than another one of the same job."""
    return in_order([one, other])[0] == 0


def raised(places: Iterable[Place]) -> dict[str, int]:
    """Return the greatest generation that is known of each run (rule 2)."""
    generations: dict[str, int] = {}
    for one in places:
        if one.run:
            generations[one.run] = max(generations.get(one.run, 0), one.number.generation)
    return generations


def _rank(anchors: Sequence[tuple[float, SaveNumber]], one: Place, number: SaveNumber) -> _Rank:
    """Return what a place is sorted by.

    `anchors`: by when storage got them, the job's own checkpoints. `number`: the place's, raised.
    """
    if one.number.generation:
        time = one.time if one.is_foreign else 0.0
        # Two runs that knew nothing of each other may have given the same number.
        step = -1 if one.step is None else one.step
        return number, one.is_foreign, time, step, one.key
    if one.is_foreign:
        before = (anchor for stored_at, anchor in anchors if stored_at < one.stored_at)
        return max(before, default=UNNUMBERED), True, one.time, -1, one.key
    return UNNUMBERED, True, one.time, -1, one.key


def joined_place(places: Sequence[Place], key: tuple[str, ...]) -> Place:
    """Return what is known together of one checkpoint that was found in several places."""
    newest = max(places, key=_NUMBER)
    return replace(newest, stored_at=max([one.stored_at for one in places]), key=key)


def contradiction(newest: Place, others: Sequence[Place]) -> str:
    """Say whether steps contradict the order; "" where they don't.

    A job that went back to an older step and saved on looks like that, and so does a job whose
    order was lost, such as with a root that was put together by hand.

    `newest`: the newest checkpoint; the first text of its key is its name.
    """
    later = [
        one
        for one in others
        if newest.step is not None and one.step is not None and one.step > newest.step
    ]
    if not later:
        return ""
    last = max(later, key=lambda one: (one.step or 0, one.key))
    count = f", and {len(later) - 1} more" if len(later) > 1 else ""
    return (
        f"{newest.key[0]} (step {newest.step}) is the newest by the job's order, but "
        f"{last.key[0]} has a later step ({last.step}){count}"
    )
