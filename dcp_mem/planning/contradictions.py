"""What is refused of the ranks' plans: contradictions, and tensors that are incomplete.

Nothing here is quadratic in items or ranks: items are sorted once, by name and offset, and the rest
is arithmetic on the sorted columns.
"""

from __future__ import annotations

from bisect import insort

import numpy as np
import numpy.typing as npt

from dcp_mem.format.catalog import Ints
from dcp_mem.planning.joint_plan import PlanRows
from dcp_mem.planning.plan_columns import ItemKind

Bools = npt.NDArray[np.bool_]
_MOST_ERRORS = 10


class PlanInvalid(ValueError):
    """The ranks' plans contradict each other, or leave a tensor incomplete."""


def by_place(joined: PlanRows) -> Ints:
    """Return the order of items by name and offset; copies of a chunk stay in rank order."""
    return np.lexsort((*joined.offset.T[::-1], joined.name))


def starts_of_chunks(joined: PlanRows, order: Ints) -> Ints:
    """Return where, in that order, the copies of each chunk begin."""
    if not len(order):
        return np.zeros(0, np.int64)
    name, offset = joined.name[order], joined.offset[order]
    differs = (name[1:] != name[:-1]) | (offset[1:] != offset[:-1]).any(axis=1)
    return np.flatnonzero(np.concatenate([[True], differs]))


def refuse_contradictions(joined: PlanRows, order: Ints, starts: Ints, ranks: int) -> None:
    """Raise PlanInvalid where the plans contradict each other, or leave a tensor incomplete.

    `joined`: items of all ranks: of a name, all of them or none.
    """
    problems = find_contradictions(joined, order, starts, ranks)
    if problems:
        more = f" (and {len(problems) - _MOST_ERRORS} more)" if len(problems) > _MOST_ERRORS else ""
        raise PlanInvalid("; ".join(problems[:_MOST_ERRORS]) + more)


def find_contradictions(joined: PlanRows, order: Ints, starts: Ints, ranks: int) -> list[str]:
    """Return what contradicts itself, for people; each problem is one of one name.

    `joined`: items of all ranks: of a name, all of them or none.
    """
    return [
        *_doubled(joined, order, starts),
        *_mixed(joined),
        *_out_of_bounds(joined),
        *_badly_covered(joined, order, starts, ranks),
    ]


def _doubled(joined: PlanRows, order: Ints, starts: Ints) -> list[str]:
    """Return chunks that one rank has twice, and those that ranks have in different sizes."""
    name, rank = joined.name[order], joined.rank[order]
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


def _mixed(joined: PlanRows) -> list[str]:
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


def _out_of_bounds(joined: PlanRows) -> list[str]:
    """Return chunks that reach out of their tensors."""
    outside = (
        (joined.offset < 0) | (joined.extent < 0) | (joined.offset + joined.extent > joined.size)
    )
    return [
        f"{joined.names[joined.name[one]]}: the chunk at {_place(joined, one)} is out of bounds"
        for one in np.flatnonzero(outside.any(axis=1)).tolist()
    ]


def _badly_covered(joined: PlanRows, order: Ints, starts: Ints, ranks: int) -> list[str]:
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


def _are_grids(joined: PlanRows, chunks: Ints, firsts: Ints) -> Bools:
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


def _overlap(joined: PlanRows, chunks: Ints) -> bool:
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


def _place(joined: PlanRows, row: int) -> tuple[int, ...]:
    return tuple(joined.offset[row, : joined.dimensions[row]].tolist())
