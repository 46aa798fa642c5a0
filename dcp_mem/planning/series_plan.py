"""The global plan of many ranks, made and kept series by series instead of item by item.

Most names of a large job are alike: the same ranks hold chunks of them at the same offsets. Such
names are one class. What `contradictions` looks for is looked for in one name of each class, and
its chunks are sorted once. Only the writers of chunks that several ranks hold are chosen for each
name. The plan is the one that `global_plan.merge_rows` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_mem.format.catalog import Ints
from dcp_mem.planning.contradictions import (
    by_place,
    find_contradictions,
    refuse_contradictions,
    starts_of_chunks,
)
from dcp_mem.planning.dealing import Floats, chunk_bytes, deal_out, words_of_ranks
from dcp_mem.planning.joint_plan import JointPlan, added, in_order, plan_rows, sorted_rows

_ROWS_AT_ONCE = 1 << 16
"""Items that are looked at in one go: so many stay in the processor's cache."""
_RANK = 1 << 32
"""A rank times this, plus a row of its plan, is a place in the order of the whole plan."""


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """Names whose series have the same holders, offsets and extents."""

    names: Ints
    series: Ints  # of each name, its series: int64[names, series of a name]


@dataclass(eq=False, kw_only=True)
class _Class:
    """A class of names, and the chunks of each of them.

    The copies of a name's chunks are in the order of their offsets, copies of one chunk in the
    order of their ranks.
    """

    alike: _Alike
    series: Ints  # of each copy: which of the name's series it belongs to
    place: Ints  # of each copy: where among the series' holders its rank is
    rank: Ints  # of each copy: the rank that holds it
    starts: Ints
    nbytes: Ints
    shared: Ints
    # of each name, and each of these chunks: which of the holders writes it
    share: npt.NDArray[np.int32]

    def choices(self) -> tuple[list[Ints], Ints]:
        """Return the distinct sets of copies that are written, and which of them each name has."""
        if not self.share.any():
            return [self.starts], np.zeros(len(self.share), np.int64)
        known: dict[bytes, int] = {}
        found = [known.setdefault(one.tobytes(), len(known)) for one in self.share]
        numbers = np.array(found, np.int64)
        sets = []
        for name in np.unique(numbers, return_index=True)[1].tolist():
            copies = self.starts.copy()
            copies[self.shared] += self.share[name]
            sets.append(copies)
        return sets, numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WrittenSeries:
    """The chunks of one name, in the order of their offsets."""

    name: int
    first: int  # the series of the chunk that comes first in the plan
    place: int  # of that chunk: its place in the order of the whole plan
    # Offsets and extents of the chunks. The same object for names of which they are equal.
    box: Boxes
    rows: Ints  # of each chunk: its row in the writer's plan


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Chunks of a name."""

    writer: Ints  # of each chunk: the rank that writes it
    offset: Sequence[Ints]  # of each chunk, a column for each dimension
    extent: Sequence[Ints]  # of each chunk, a column for each dimension


@dataclass(frozen=True, slots=True, eq=False)
class SeriesPlan:
    """What the ranks write."""

    plan: JointPlan  # all ranks' plans, in order
    classes: Sequence[_Class]

    def written(self) -> Iterator[WrittenSeries]:
        """Yield the chunks of each name that has any, in any order of names."""
        for one in self.classes:
            sets, numbers = one.choices()
            for number, copies in enumerate(sets):
                yield from self._written(one, copies, np.flatnonzero(numbers == number))

    def _written(self, one: _Class, copies: Ints, members: Ints) -> Iterator[WrittenSeries]:
        """Yield the names of a class of whose chunks these copies are written."""
        series, place, writer = one.series[copies], one.place[copies], one.rank[copies]
        pieces = [
            (number, np.flatnonzero(series == number))
            for number in range(one.alike.series.shape[1])
        ]
        like = one.alike.series[members[0]]

        def values(own: Ints, column: int) -> Ints:
            if len(pieces) == 1:
                return self.plan.values(int(own[0]), column)[place]
            found = np.empty(len(copies), np.int64)
            for number, chunks in pieces:
                found[chunks] = self.plan.values(int(own[number]), column)[place[chunks]]
            return found

        width = self.plan.width
        box = Boxes(
            writer,
            [values(like, 1 + dimension) for dimension in range(width)],
            [values(like, 1 + width + dimension) for dimension in range(width)],
        )
        for member in members.tolist():
            own = one.alike.series[member]
            rows = values(own, 0)
            places = writer * _RANK + rows
            first = int(places.argmin())
            yield WrittenSeries(
                name=int(one.alike.names[member]),
                first=int(own[series[first]]),
                place=int(places[first]),
                box=box,
                rows=rows,
            )

    def masks(self) -> list[bytes]:
        """Return, for each rank, which rows of its own plan it writes, as bits."""
        ends = np.cumsum(self.plan.lengths)
        written, starts = np.zeros(self.plan.count, bool), ends - self.plan.lengths
        for one in self.written():
            written[starts[one.box.writer] + one.rows] = True
        return masks_of(written, ends)


def masks_of(written: npt.NDArray[np.bool_], ends: Ints) -> list[bytes]:
    """Return each rank's part of this as bits; equal ones are one object.

    `written`: of each item of all ranks, rank after rank: whether its rank writes it.
    """
    known: dict[bytes, bytes] = {}
    masks = (
        np.packbits(written[start:stop]).tobytes() for start, stop in pairwise([0, *ends.tolist()])
    )
    return [known.setdefault(mask, mask) for mask in masks]


def merge_series(plan: JointPlan, *, to_lowest_rank: bool = False) -> SeriesPlan:
    """Merge all ranks' plans series by series.

    1. Find the names that are alike.
    2. Sort the chunks of one name of each class, and refuse contradictions.
    3. Choose writers for chunks that several ranks hold.

    Raises PlanInvalid.
    """
    plan = in_order(plan)
    classes, bad = [], []
    for several in _batches(plan, _alike(plan)):
        found, refused = _classes(plan, several)
        classes += found
        bad += refused
    if bad:
        _refuse(plan, np.concatenate([one.series.ravel() for one in bad]))
    if not to_lowest_rank:
        _choose_writers(plan, classes)
    return SeriesPlan(plan, classes)


def _alike(plan: JointPlan) -> list[_Alike]:
    """Return the names that have items, those that are alike together."""
    keys = np.stack(
        [
            *(plan.kind, plan.properties, plan.dimensions, plan.turn, plan.holders),
            *(*plan.size.T, *plan.columns[:, 1:].T, *plan.bases[:, 1:].T),
        ],
        axis=1,
    )
    order, is_new = sorted_rows(keys)
    kinds = np.empty(len(keys), np.int64)
    kinds[order] = np.cumsum(is_new) - 1
    by_name = np.lexsort((kinds, plan.name))
    cuts = np.flatnonzero(np.diff(plan.name[by_name])) + 1
    classes: dict[bytes, list[Ints]] = {}
    for series in np.split(by_name, cuts) if len(by_name) else ():
        classes.setdefault(kinds[series].tobytes(), []).append(series)
    stacked = (np.stack(series) for series in classes.values())
    return [_Alike(plan.name[series[:, 0]], series) for series in stacked]


def _batches(plan: JointPlan, classes: Sequence[_Alike]) -> Iterator[list[_Alike]]:
    """Yield the classes, several together if one name of each has few items."""
    sizes = np.array([len(group.ranks) for group in plan.groups], np.int64)
    batch: list[_Alike] = []
    count = 0
    for one in classes:
        batch.append(one)
        count += int(sizes[plan.holders[one.series[0]]].sum())
        if count >= _ROWS_AT_ONCE:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _classes(plan: JointPlan, several: Sequence[_Alike]) -> tuple[list[_Class], list[_Alike]]:
    """Sort the chunks of some classes.

    Returns the classes, and instead those that contradict themselves.
    """
    rows = plan_rows(plan, np.concatenate([one.series[0] for one in several]))
    order = by_place(rows)
    starts = starts_of_chunks(rows, order)
    if find_contradictions(rows, order, starts, len(plan.ranks)):
        if len(several) == 1:
            return [], list(several)
        each = [_classes(plan, [one]) for one in several]
        return [], [one for _, refused in each for one in refused]
    nbytes = chunk_bytes(rows)[order[starts]]
    counts = np.diff(np.append(starts, len(order)))
    number_of = np.zeros(len(plan.name), np.int64)
    for one in several:
        number_of[one.series[0]] = np.arange(one.series.shape[1])
    bounds = np.append(starts, len(order))
    name = rows.name[order[starts]]
    cuts = np.flatnonzero(np.diff(name, prepend=-1, append=-1))
    slices = {int(name[start]): (start, stop) for start, stop in pairwise(cuts.tolist())}
    classes = []
    for one in several:
        start, stop = slices[int(one.names[0])]
        copies = order[bounds[start] : bounds[stop]]
        shared = np.flatnonzero(counts[start:stop] > 1)
        classes.append(
            _Class(
                alike=one,
                series=number_of[rows.series[copies]].astype(np.int32),
                place=rows.place[copies].astype(np.int32),
                rank=rows.rank[copies],
                starts=starts[start:stop] - bounds[start],
                nbytes=nbytes[start:stop],
                shared=shared,
                share=np.zeros((len(one.names), len(shared)), np.int32),
            )
        )
    return classes, []


def _refuse(plan: JointPlan, series: Ints) -> None:
    """Raise PlanInvalid for these series, with the text that all items would give."""
    rows = plan_rows(plan, series)
    order = by_place(rows)
    refuse_contradictions(rows, order, starts_of_chunks(rows, order), len(plan.ranks))
    raise AssertionError("names that contradict themselves don't")


# -- who writes what ------------------------------------------------------------------------------


def _choose_writers(plan: JointPlan, classes: Sequence[_Class]) -> None:
    """Choose writers for chunks that several ranks hold.

    Those that the same ranks hold are dealt out together, in the order of the plan, and those with
    the fewest holders first: as `global_plan` does item by item.
    """
    load: Floats = np.zeros(len(plan.ranks), np.float64)
    for one in classes:
        alone = np.diff(np.append(one.starts, len(one.rank))) == 1
        nbytes = one.nbytes[alone] * float(len(one.alike.names))
        np.add.at(load, one.rank[one.starts[alone]], nbytes)
    for chunks in _by_holders(classes, len(plan.ranks)):
        pieces = [(classes[number], number_shared) for number, number_shared in chunks]
        _deal_out(plan, pieces, load)


def _by_holders(classes: Sequence[_Class], ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield chunks of classes that the same ranks hold: the class, and which of its shared ones."""
    words = words_of_ranks(ranks)
    numbers, chunks, holders, sums = [], [], [], []
    for number, one in enumerate(classes):
        if len(one.shared):
            numbers.append(np.full(len(one.shared), number))
            chunks.append(np.arange(len(one.shared)))
            counts = np.diff(np.append(one.starts, len(one.rank)))
            holders.append(counts[one.shared])
            sums.append(np.add.reduceat(words[one.rank], one.starts)[one.shared])
    if not numbers:
        return
    of_class, chunk = np.concatenate(numbers), np.concatenate(chunks)
    total = np.concatenate(sums)
    order = np.lexsort((total, np.concatenate(holders)))
    total = total[order]
    for several in np.split(order, np.flatnonzero(total[1:] != total[:-1]) + 1):
        yield list(zip(of_class[several].tolist(), chunk[several].tolist(), strict=True))


def _deal_out(plan: JointPlan, pieces: Sequence[tuple[_Class, int]], load: Floats) -> None:
    """Deal out the chunks of all names of some classes that the same ranks hold."""
    rows, nbytes = [], []
    for one, shared in pieces:
        chunk = one.shared[shared]
        copy = one.starts[chunk]
        series = one.alike.series[:, one.series[copy]]
        columns = plan.groups[plan.holders[series[0]]].columns
        found = columns[plan.columns[series, 0], one.place[copy]]
        rows.append(added(found, plan.bases[series, 0]))
        nbytes.append(np.full(len(series), one.nbytes[chunk]))
    order = np.argsort(np.concatenate(rows), kind="stable")
    held_by = _holders_of(*pieces[0])
    sizes = np.concatenate(nbytes)[order]
    share = deal_out(sizes, load[held_by])
    load += np.bincount(held_by[share], weights=sizes, minlength=len(load))
    shares = np.empty_like(share)
    shares[order] = share
    done = 0
    for one, shared in pieces:
        count = len(one.alike.names)
        one.share[:, shared] = shares[done : done + count]
        done += count


def _holders_of(one: _Class, shared: int) -> Ints:
    """Return the ranks that hold a shared chunk."""
    chunk = int(one.shared[shared])
    stop = int(one.starts[chunk + 1]) if chunk + 1 < len(one.starts) else len(one.rank)
    return one.rank[one.starts[chunk] : stop]
