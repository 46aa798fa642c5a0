"""The global plan: all ranks' plans merged, so that every chunk is written once.

`merge` is a pure function, and refuses plans that contradict each other. Most names of a large job
are alike: the same ranks hold chunks of them at the same offsets. Such names are one class. What
`contradictions` looks for is looked for in one name of each class, and its chunks are sorted once.
Only the writers of chunks that several ranks hold are chosen for each name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints, counted, portions
from dcp_mem.format.column_file import distinct_rows
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.contradictions import (
    by_place,
    find_contradictions,
    refuse_contradictions,
    starts_of_chunks,
)
from dcp_mem.planning.joint_plan import (
    JointPlan,
    PlanRows,
    SeriesNumbers,
    in_order,
)
from dcp_mem.planning.plan_columns import PlanItems

_ITEMS_AT_ONCE = 1 << 16
"""Items that are looked at in one go: so many stay in the processor's cache."""


@value_class(eq=False, kw_only=True)
class _Names:
    """The names that have items, class by class."""

    name: Ints
    of_class: Ints  # of each name: the number of its class, ascending
    first: Ints  # of each name: where its series begin in `series`
    count: Ints  # of each name: how many series it has
    series: Ints  # all series, name by name; in the same order for all names of a class
    specimens: Ints  # of each class: its first name, by position

    def series_of(self, positions: Ints) -> Ints:
        """Return the series of some names, one after the other."""
        counts = self.count[positions]
        found: Ints = self.series[np.repeat(self.first[positions], counts) + counted(counts)]
        return found


@value_class(eq=False, kw_only=True)
class _Chunks:
    """The chunks of one name of each class, by class and then by offset."""

    of_class: Ints
    offset: Ints
    extent: Ints
    nbytes: Ints
    copies: Ints  # of each chunk: how many ranks hold it, whose copies come one after the other
    # Of each copy: which of the name's series it is, where among its holders the rank is, and it.
    series: Ints
    place: Ints
    rank: Ints


@value_class(eq=False)
class WrittenChunks:
    """The chunks of some names, name by name and then by offset."""

    first: Ints  # of each name: where its chunks begin; and where the last one's end
    series: Ints
    writer: Ints  # of each chunk: the rank that writes it
    row: Ints  # of each chunk: its row in the writer's plan


@value_class(eq=False, kw_only=True)
class GlobalPlan:
    """What the ranks write."""

    numbers: SeriesNumbers  # of all ranks' plans, in order
    names: _Names
    chunks: _Chunks
    first_chunks: Ints  # of each class: where its chunks begin; and where the last one's end
    first_copies: Ints  # of each chunk
    # Of each chunk that several ranks hold: where in its name's `shares` it is; else -1.
    shared: Ints
    first_shares: Ints  # of each name
    shares: npt.NDArray[np.int32]  # of each name's shared chunks: which of the holders writes it

    @property
    def plan(self) -> JointPlan:
        """All ranks' plans, in order."""
        return self.numbers.plan

    def written(self) -> Iterator[WrittenChunks]:
        """Yield the chunks of all names in portions."""
        counts = np.diff(self.first_chunks)[self.names.of_class]
        for part in portions(counts, _ITEMS_AT_ONCE):
            chunk_counts, of_class = counts[part], self.names.of_class[part]
            if len(of_class) and of_class[0] == of_class[-1]:
                chunks = slice(*self.first_chunks[of_class[0] : of_class[0] + 2])
                if (self.shared[chunks] < 0).all():
                    yield self._written_alike(part, chunks)
                    continue
            name = np.repeat(np.arange(part.start, part.stop), chunk_counts)
            chunk = np.repeat(self.first_chunks[of_class], chunk_counts) + counted(chunk_counts)
            copy = self.first_copies[chunk]
            is_shared = self.shared[chunk] >= 0
            shares = self.first_shares[name[is_shared]] + self.shared[chunk[is_shared]]
            copy[is_shared] += self.shares[shares]
            series = self.names.series[self.names.first[name] + self.chunks.series[copy]]
            yield WrittenChunks(
                np.append(0, np.cumsum(chunk_counts)),
                series,
                self.chunks.rank[copy],
                self.numbers.of(0, series, self.chunks.place[copy]),
            )

    def _written_alike(self, part: slice, chunks: slice) -> WrittenChunks:
        """Return the chunks of names of one class, all of whose chunks have one holder.

        Large jobs have hardly any others, and these take half the time.
        """
        copy = self.first_copies[chunks]
        local, place, firsts = self.chunks.series[copy], self.chunks.place[copy], self.names.first
        count = len(firsts[part])
        # One column of series where a name has only one.
        series = self.names.series[firsts[part][:, None] + (local if local.any() else local[:1])]
        return WrittenChunks(
            np.arange(count + 1) * len(copy),
            np.broadcast_to(series, (count, len(copy))).ravel(),
            np.tile(self.chunks.rank[copy], count),
            self.numbers.of(0, series, place).ravel(),
        )

    def masks(self) -> list[bytes]:
        """Return, for each rank, which rows of its own plan it writes, as bits.

        Equal ones are one object.
        """
        ends = np.cumsum(self.plan.lengths)
        written, starts = np.zeros(self.plan.count, bool), ends - self.plan.lengths
        for one in self.written():
            written[starts[one.writer] + one.row] = True
        known: dict[bytes, bytes] = {}
        masks = (
            np.packbits(written[start:stop]).tobytes()
            for start, stop in pairwise([0, *ends.tolist()])
        )
        return [known.setdefault(mask, mask) for mask in masks]


def merge(plan: JointPlan, *, to_lowest_rank: bool = False) -> GlobalPlan:
    """Merge all ranks' plans, so that every chunk has one writer.

    1. Find the names that are alike.
    2. Sort the chunks of one name of each class, and refuse contradictions.
    3. Choose writers for chunks that several ranks hold: bytes are balanced over the ranks, and
       neighbours in the plan stay together, so that loading one shard takes few files.

    `to_lowest_rank`: give each chunk to the first rank that holds it, and balance nothing. Raises
    PlanInvalid.
    """
    numbers = SeriesNumbers(in_order(plan))
    names = _alike(numbers.plan)
    chunks = _chunks(numbers, names)
    of_class, is_shared = chunks.of_class, chunks.copies > 1
    shared_of_class = np.bincount(of_class[is_shared], minlength=len(names.specimens))
    before = (np.cumsum(shared_of_class) - shared_of_class)[of_class]
    ends = np.cumsum(shared_of_class[names.of_class])
    merged = GlobalPlan(
        numbers=numbers,
        names=names,
        chunks=chunks,
        first_chunks=np.searchsorted(of_class, np.arange(len(names.specimens) + 1)),
        first_copies=np.cumsum(chunks.copies) - chunks.copies,
        shared=np.where(is_shared, np.cumsum(is_shared) - 1 - before, -1),
        first_shares=ends - shared_of_class[names.of_class],
        shares=np.zeros(int(ends[-1]) if len(ends) else 0, np.int32),
    )
    if not to_lowest_rank:
        _choose_writers(merged)
    return merged


def _alike(plan: JointPlan) -> _Names:
    """Return the names that have items, those together whose series are alike."""
    facts = [plan.kind, plan.properties, plan.dimensions, plan.turn, plan.holders]
    boxes = [*plan.size.T, *plan.columns[:, 1:].T, *plan.bases[:, 1:].T]
    _, kinds = distinct_rows(np.stack([*facts, *boxes], axis=1))
    series = np.lexsort((kinds, plan.name))
    first = np.flatnonzero(np.diff(plan.name[series], prepend=-1))
    name, count = plan.name[series[first]], np.diff(np.append(first, len(series)))
    specimen = np.empty(len(name), np.int64)  # of each name: the first one that is like it
    for number in dict.fromkeys(count.tolist()):
        members = np.flatnonzero(count == number)
        found, alike = distinct_rows(kinds[series[first[members, None] + np.arange(number)]])
        specimen[members] = members[found[alike]]
    by_class = np.argsort(specimen, kind="stable")
    is_new = np.diff(specimen[by_class], prepend=-1) != 0
    return _Names(
        name=name[by_class],
        of_class=np.cumsum(is_new) - 1,
        first=first[by_class],
        count=count[by_class],
        series=series,
        specimens=np.flatnonzero(is_new),
    )


def _chunks(numbers: SeriesNumbers, names: _Names) -> _Chunks:
    """Return the chunks of one name of each class.

    Raises PlanInvalid.
    """
    which = np.empty(len(names.series), np.int64)
    which[names.series_of(np.arange(len(names.name)))] = counted(names.count)
    counts = names.count[names.specimens]
    items = numbers.counts[names.series_of(names.specimens)]
    found, bad = [], []
    for part in portions(np.add.reduceat(items, np.cumsum(counts) - counts), _ITEMS_AT_ONCE):
        rows, order, starts = _in_order(numbers, names.series_of(names.specimens[part]))
        if find_contradictions(rows, order, starts, len(numbers.plan.ranks)):
            bad += [one for one in range(part.start, part.stop) if _is_bad(numbers, names, one)]
            continue
        copies = order[starts]
        found.append(
            (
                np.searchsorted(names.name[names.specimens], rows.name[copies]),
                rows.offset[copies],
                rows.extent[copies],
                chunk_bytes(rows)[copies],
                np.diff(np.append(starts, len(order))),
                which[rows.series[order]],
                rows.place[order],
                rows.rank[order],
            )
        )
    if bad:
        refused = names.series_of(np.flatnonzero(np.isin(names.of_class, bad)))
        refuse_contradictions(*_in_order(numbers, refused), len(numbers.plan.ranks))
    columns = (np.concatenate(column) for column in zip(*found, strict=True))
    return _Chunks(**dict(zip([one.name for one in fields(_Chunks)], columns, strict=True)))


def _in_order(numbers: SeriesNumbers, series: Ints) -> tuple[PlanRows, Ints, Ints]:
    """Return the items of some series, their order by place, and where each chunk begins."""
    rows = numbers.items(series)
    order = by_place(rows)
    return rows, order, starts_of_chunks(rows, order)


def _is_bad(numbers: SeriesNumbers, names: _Names, one: int) -> bool:
    """Return whether the names of a class contradict themselves."""
    found = _in_order(numbers, names.series_of(names.specimens[one : one + 1]))
    return bool(find_contradictions(*found, len(numbers.plan.ranks)))


# -- who writes what ------------------------------------------------------------------------------


def _choose_writers(merged: GlobalPlan) -> None:
    """Choose writers for chunks that several ranks hold.

    Chunks that the same ranks hold are dealt out together, in the order of the plan: each rank gets
    a run of them. Chunks with the fewest holders come first, so that those that many ranks hold can
    even out the loads.
    """
    chunks, ranks = merged.chunks, len(merged.plan.ranks)
    members = np.bincount(merged.names.of_class)
    alone = chunks.copies == 1
    nbytes = chunks.nbytes[alone] * members[chunks.of_class[alone]].astype(np.float64)
    writers = chunks.rank[merged.first_copies[alone]]
    load: Floats = np.bincount(writers, weights=nbytes, minlength=ranks).astype(np.float64)
    first_names = np.cumsum(members) - members
    for several in _by_holders(merged, ranks):
        counts = members[chunks.of_class[several]]
        chunk = np.repeat(several, counts)
        name = np.repeat(first_names[chunks.of_class[several]], counts) + counted(counts)
        copy = merged.first_copies[chunk]
        series = merged.names.series[merged.names.first[name] + chunks.series[copy]]
        order = np.argsort(merged.numbers.of(0, series, chunks.place[copy]), kind="stable")
        start = merged.first_copies[several[0]]
        held_by = chunks.rank[start : start + chunks.copies[several[0]]]
        sizes = chunks.nbytes[chunk[order]]
        share = deal_out(sizes, load[held_by])
        load += np.bincount(held_by[share], weights=sizes, minlength=ranks)
        merged.shares[(merged.first_shares[name] + merged.shared[chunk])[order]] = share


def _by_holders(merged: GlobalPlan, ranks: int) -> Iterator[Ints]:
    """Yield the chunks that several ranks hold, those together that the same ones do."""
    chunks, shared = merged.chunks, np.flatnonzero(merged.shared >= 0)
    if not len(shared):
        return
    words = words_of_ranks(ranks)
    sums = np.add.reduceat(words[chunks.rank], merged.first_copies)[shared]
    order = np.lexsort((sums, chunks.copies[shared]))
    cuts = np.flatnonzero(np.diff(sums[order])) + 1
    yield from np.split(shared[order], cuts)


Floats = npt.NDArray[np.float64]


def words_of_ranks(ranks: int) -> npt.NDArray[np.uint64]:
    """Return a random word for each rank; a set of ranks is identified by the sum of its words.

    Two sets have the same sum by chance in 1 of 2**64.
    """
    return np.random.default_rng(0).integers(0, 1 << 63, ranks, dtype=np.uint64)


def chunk_bytes(items: PlanItems) -> Ints:
    """Return the bytes of each item's chunk; a byte item's aren't known, and count as one."""
    itemsize = np.array([dtype_named(one.dtype).itemsize for one in items.table] + [1], np.int64)
    nbytes: Ints = items.extent.prod(axis=1) * itemsize[items.properties]
    return nbytes


def deal_out(nbytes: Ints, load: Floats) -> Ints:
    """Return, for each of some chunks, which of the holders writes it.

    Each holder gets a run of them, and loads become as equal as they can.

    `load`: of each holder: the bytes that it writes anyway.
    """
    total = float(nbytes.sum())
    ordered = np.sort(load)
    # Fill up the least loaded to one level: that at which all bytes are used up.
    filled = (total + np.cumsum(ordered)) / np.arange(1, len(load) + 1)
    reach = filled > ordered
    level = filled[np.flatnonzero(reach)[-1]] if reach.any() else ordered[0]
    ends = np.cumsum(np.maximum(level - load, 0))
    middles = np.cumsum(nbytes) - nbytes / 2
    return np.minimum(np.searchsorted(ends, middles, side="right"), len(load) - 1)
