"""The global plan: all ranks' plans merged, so that every chunk is written once.

`merge` is a pure function of columns, and refuses plans that contradict each other. Nothing here is
quadratic in items or ranks: rows are sorted once, by name and offset, and the rest is arithmetic on
the sorted columns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcp_mem.format.catalog import Ints, Path, Properties
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.plan_columns import COLUMNS, ItemKind, LocalPlan, PlanItems, widened

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
_MOST_ERRORS = 10


class PlanInvalid(ValueError):
    """The ranks' plans contradict each other, or leave a tensor incomplete."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GlobalPlan(PlanItems):
    """The items that the ranks write, by rank and then in the order of the rank's own plan.

    Names and properties are shared by all ranks.

    Attributes:
        writer: Of each item: the rank that writes it.
        row: Of each item: its row in that rank's plan.
    """

    writer: Ints
    row: Ints

    def rows_of(self, rank: int) -> Ints:
        """Return the rows of its own plan that a rank writes, in order.

        Args:
            rank: One of the ranks that planned.
        """
        start, stop = np.searchsorted(self.writer, [rank, rank + 1])
        return self.row[start:stop]


def merge(plans: Sequence[LocalPlan], *, to_lowest_rank: bool = False) -> GlobalPlan:
    """Merge all ranks' plans, so that every chunk has one writer.

    A chunk that several ranks hold goes to one of them: bytes are balanced over the ranks, and
    neighbours in the plan stay together, so that loading one shard takes few files.

    1. Join the plans' columns.
    2. Sort the rows by name and offset; rows with the same of both are copies of one chunk.
    3. Refuse contradictions.
    4. Choose a writer for each chunk.

    Args:
        plans: By rank.
        to_lowest_rank: Give each chunk to the first rank that holds it, and balance nothing.

    Raises:
        PlanInvalid: The plans contradict each other; the text names up to ten problems.
    """
    joined = _join(plans)
    order = _by_place(joined)
    starts = _starts_of_groups(joined, order)
    _refuse_contradictions(joined, order, starts, len(plans))
    writers = order[starts]  # in the order of ranks within a chunk's copies
    if not to_lowest_rank:
        writers = _choose_writers(joined, order, starts, len(plans))
    chosen = np.sort(writers)
    columns = {name: getattr(joined, name)[chosen] for name in (*COLUMNS, "writer", "row")}
    return replace(joined, **columns)


def _join(plans: Sequence[LocalPlan]) -> GlobalPlan:
    numbers: dict[str, int] = {}
    paths: list[Path] = []
    kinds: dict[Properties, int] = {}
    name, properties = [], []
    last: tuple[tuple[str, ...], Ints] = ((), np.zeros(0, np.int64))
    for plan in plans:
        if plan.names != last[0]:
            before = len(numbers)
            mapped = np.fromiter(
                (numbers.setdefault(one, len(numbers)) for one in plan.names),
                np.int64,
                len(plan.names),
            )
            paths.extend(
                path
                for path, number in zip(plan.paths, mapped.tolist(), strict=True)
                if number >= before
            )
            last = (plan.names, mapped)
        name.append(last[1][plan.name])
        table = [kinds.setdefault(one, len(kinds)) for one in plan.table]
        properties.append(np.array([*table, -1], np.int64)[plan.properties])
    width = max((plan.size.shape[1] for plan in plans), default=1)
    lengths = [len(plan) for plan in plans]
    return GlobalPlan(
        names=tuple(numbers),
        paths=tuple(paths),
        table=tuple(kinds),
        writer=np.repeat(np.arange(len(plans)), lengths),
        row=np.concatenate([np.arange(length) for length in lengths])
        if plans
        else np.zeros(0, np.int64),
        name=np.concatenate(name),
        kind=np.concatenate([plan.kind for plan in plans]),
        properties=np.concatenate(properties),
        dimensions=np.concatenate([plan.dimensions for plan in plans]),
        size=np.concatenate([widened(plan.size, width, 1) for plan in plans]),
        offset=np.concatenate([widened(plan.offset, width, 0) for plan in plans]),
        extent=np.concatenate([widened(plan.extent, width, 1) for plan in plans]),
    )


def _nbytes(joined: GlobalPlan) -> Ints:
    """Return the bytes of each row's chunk; a byte item's aren't known, and count as one."""
    itemsize = np.array([dtype_named(one.dtype).itemsize for one in joined.table] + [1], np.int64)
    nbytes: Ints = joined.extent.prod(axis=1) * itemsize[joined.properties]
    return nbytes


# -- the same chunk on several ranks --------------------------------------------------------------


def _by_place(joined: GlobalPlan) -> Ints:
    """Return the order of rows by name and offset; copies of a chunk stay in the order of ranks."""
    return np.lexsort((*joined.offset.T[::-1], joined.name))


def _starts_of_groups(joined: GlobalPlan, order: Ints) -> Ints:
    """Return where, in that order, the copies of each chunk begin."""
    if not len(order):
        return np.zeros(0, np.int64)
    name, offset = joined.name[order], joined.offset[order]
    differs = (name[1:] != name[:-1]) | (offset[1:] != offset[:-1]).any(axis=1)
    return np.flatnonzero(np.concatenate([[True], differs]))


def _choose_writers(joined: GlobalPlan, order: Ints, starts: Ints, ranks: int) -> Ints:
    """Return, for each chunk, the row that writes it.

    Chunks that the same ranks hold are dealt out together, in the order of the plan: each rank gets
    a run of them. Chunks with the fewest holders come first, so that those that many ranks hold can
    even out the loads.
    """
    holders = np.diff(np.append(starts, len(order)))
    nbytes = _nbytes(joined)[order][starts]
    writer = order[starts]
    alone = holders == 1
    load: Floats = np.bincount(
        joined.writer[writer[alone]], weights=nbytes[alone], minlength=ranks
    ).astype(np.float64)
    for places in _by_holders(joined, order, starts, holders):
        held_by = joined.writer[order[starts[places[0]] : starts[places[0]] + holders[places[0]]]]
        share = _deal_out(nbytes[places], load[held_by])
        writer[places] = order[starts[places] + share]
        load += np.bincount(held_by[share], weights=nbytes[places], minlength=ranks)
    return writer


def _by_holders(joined: GlobalPlan, order: Ints, starts: Ints, holders: Ints) -> Iterator[Ints]:
    """Yield the chunks that several ranks hold, together if those are the same ranks.

    Those with the fewest holders come first; within a group, chunks are in the order of the plan.
    """
    shared = np.flatnonzero(holders > 1)
    if not len(shared):
        return
    # A set of ranks is identified by a sum of random words: two are equal by chance in 1 of 2**64.
    words = np.random.default_rng(0).integers(
        0, 1 << 63, int(joined.writer.max()) + 1, dtype=np.uint64
    )
    sums = np.add.reduceat(words[joined.writer[order]], starts)[shared]
    by_plan = np.lexsort((joined.row[order[starts[shared]]], sums, holders[shared]))
    shared, sums = shared[by_plan], sums[by_plan]
    cuts = np.flatnonzero(sums[1:] != sums[:-1]) + 1
    yield from np.split(shared, cuts)


def _deal_out(nbytes: Ints, load: Floats) -> Ints:
    """Return, for each of these chunks, which of the holders writes it.

    Each holder gets a run of them, and loads become as equal as they can.
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


# -- what is refused ------------------------------------------------------------------------------


def _refuse_contradictions(joined: GlobalPlan, order: Ints, starts: Ints, ranks: int) -> None:
    problems = [
        *_doubled(joined, order, starts),
        *_mixed(joined),
        *_out_of_bounds(joined),
        *_badly_covered(joined, order, starts, ranks),
    ]
    if problems:
        more = f" (and {len(problems) - _MOST_ERRORS} more)" if len(problems) > _MOST_ERRORS else ""
        raise PlanInvalid("; ".join(problems[:_MOST_ERRORS]) + more)


def _doubled(joined: GlobalPlan, order: Ints, starts: Ints) -> list[str]:
    """Return chunks that one rank has twice, and those that ranks have in different sizes."""
    name, rank = joined.name[order], joined.writer[order]
    same_place = np.ones(len(order), bool)
    same_place[starts] = False
    twice = np.flatnonzero(same_place[1:] & (rank[1:] == rank[:-1])) + 1
    is_shard = joined.kind[order] == ItemKind.SHARD
    extent = joined.extent[order]
    other = (
        np.flatnonzero(same_place[1:] & is_shard[1:] & (extent[1:] != extent[:-1]).any(axis=1)) + 1
    )
    return [
        *(
            f"{joined.names[name[one]]}: rank {rank[one]} has the chunk at "
            f"{_place(joined, order[one])} twice"
            for one in twice
        ),
        *(
            f"{joined.names[name[one]]}: overlapping chunks at {_place(joined, order[one])}"
            for one in other
        ),
    ]


def _mixed(joined: GlobalPlan) -> list[str]:
    """Return names that are different things on different ranks, or tensors of different sizes."""
    is_object, is_tensor = np.zeros((2, len(joined.names)), bool)
    is_object[joined.name[joined.kind == ItemKind.OBJECT]] = True
    is_tensor[joined.name[joined.kind != ItemKind.OBJECT]] = True
    most, fewest = (
        np.zeros(len(joined.names), np.int64),
        np.full(len(joined.names), np.iinfo(np.int64).max),
    )
    np.maximum.at(most, joined.name, joined.dimensions)
    np.minimum.at(fewest, joined.name, joined.dimensions)
    unlike = np.flatnonzero((is_object & is_tensor) | ((most != fewest) & is_tensor))
    is_chunk = np.zeros(len(joined.names), bool)
    is_whole = np.zeros(len(joined.names), bool)
    is_chunk[joined.name[joined.kind == ItemKind.SHARD]] = True
    is_whole[joined.name[joined.kind != ItemKind.SHARD]] = True
    mixed = np.flatnonzero(is_chunk & is_whole)
    largest, least = np.zeros((2, len(joined.names), joined.size.shape[1]), np.int64)
    tensors = np.flatnonzero(joined.kind != ItemKind.OBJECT)
    least[:] = np.iinfo(np.int64).max
    np.maximum.at(largest, joined.name[tensors], joined.size[tensors])
    np.minimum.at(least, joined.name[tensors], joined.size[tensors])
    uneven = np.flatnonzero(is_tensor & (largest != least).any(axis=1))
    return [
        *(f"{joined.names[one]}: something else on another rank" for one in unlike),
        *(f"{joined.names[one]}: sharded on one rank and not on another" for one in mixed),
        *(f"{joined.names[one]}: ranks have different sizes of the whole tensor" for one in uneven),
    ]


def _out_of_bounds(joined: GlobalPlan) -> list[str]:
    """Return chunks that reach out of their tensors."""
    outside = (
        (joined.offset < 0) | (joined.extent < 0) | (joined.offset + joined.extent > joined.size)
    )
    return [
        f"{joined.names[joined.name[one]]}: the chunk at {_place(joined, one)} is out of bounds"
        for one in np.flatnonzero(outside.any(axis=1)).tolist()
    ]


def _badly_covered(joined: GlobalPlan, order: Ints, starts: Ints, ranks: int) -> list[str]:
    """Return tensors whose chunks overlap, or leave a part out.

    A rank that saves alone may leave parts out: it has no others.
    """
    chunks = order[starts]
    chunks = chunks[joined.kind[chunks] == ItemKind.SHARD]
    if not len(chunks):
        return []
    name = joined.name[chunks]
    firsts = np.flatnonzero(np.concatenate([[True], name[1:] != name[:-1]]))
    counts = np.diff(np.append(firsts, len(name)))
    volume = np.add.reduceat(joined.extent[chunks].prod(axis=1), firsts)
    whole = joined.size[chunks[firsts]].prod(axis=1)
    gaps = np.flatnonzero(volume != whole) if ranks > 1 else np.zeros(0, np.int64)
    doubtful = np.flatnonzero((counts > 1) & ~_are_grids(joined, chunks, firsts))
    overlapping = [
        one
        for one in doubtful.tolist()
        if _overlap(joined, chunks[firsts[one] : firsts[one] + counts[one]])
    ]
    return [
        *(
            f"{joined.names[name[firsts[one]]]}: chunks cover {volume[one]} of "
            f"{whole[one]} elements"
            for one in gaps
        ),
        *(f"{joined.names[name[firsts[one]]]}: overlapping chunks" for one in overlapping),
    ]


def _are_grids(joined: GlobalPlan, chunks: Ints, firsts: Ints) -> Bools:
    """Return, for each tensor, whether its chunks are cells of a grid, which can't overlap.

    They are if, in each dimension, the intervals that occur don't overlap. (No two chunks have the
    same offset.)
    """
    tensor = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(chunks))))
    result = np.ones(len(firsts), bool)
    for offset, extent in zip(joined.offset[chunks].T, joined.extent[chunks].T, strict=True):
        by_offset = np.lexsort((extent, offset, tensor))
        owner, start, stop = tensor[by_offset], offset[by_offset], (offset + extent)[by_offset]
        neighbours = owner[1:] == owner[:-1]
        same = (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
        bad = neighbours & ~same & (start[1:] < stop[:-1])
        result[owner[1:][bad]] = False
    return result


def _overlap(joined: GlobalPlan, chunks: Ints) -> bool:
    """Return whether any two chunks of one tensor share an element.

    Sweeps along the longest dimension.
    """
    offset, extent = joined.offset[chunks], joined.extent[chunks]
    keep = (extent > 0).all(axis=1)
    offset, extent = offset[keep], extent[keep]
    if not len(offset):
        return False
    along = int(np.argmax(joined.size[chunks[0]]))
    active: list[tuple[int, int]] = []
    for one in np.argsort(offset[:, along], kind="stable").tolist():
        start = int(offset[one, along])
        while active and active[0][0] <= start:
            active.pop(0)
        for _, other in active:
            if (
                (offset[one] < offset[other] + extent[other])
                & (offset[other] < offset[one] + extent[one])
            ).all():
                return True
        insort(active, (start + int(extent[one, along]), one))
    return False


def _place(joined: GlobalPlan, row: int) -> tuple[int, ...]:
    return tuple(joined.offset[row, : joined.dimensions[row]].tolist())
