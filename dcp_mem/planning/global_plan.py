"""The global plan: all ranks' plans merged, so that every chunk is written once.

`merge` is a pure function, and refuses plans that contradict each other. Small jobs, and those
whose ranks have little in common, are planned item by item (`merge_rows`); large ones series by
series (`series_plan`). Both ways lead to the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcp_mem.format.catalog import Ints
from dcp_mem.planning.contradictions import by_place, refuse_contradictions, starts_of_chunks
from dcp_mem.planning.dealing import Floats, chunk_bytes, deal_out, words_of_ranks
from dcp_mem.planning.joint_plan import JointPlan, PlanRows, in_order, plan_rows
from dcp_mem.planning.plan_columns import COLUMNS, PlanItems
from dcp_mem.planning.series_plan import SeriesPlan, masks_of, merge_series

_LARGE = 1 << 19
"""Items of all ranks from which on they are planned series by series."""
_ALIKE = 16
"""Items per name, on average, from which on that is quicker."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GlobalPlan(PlanItems):
    """The items that the ranks write, by rank and then in the order of the rank's own plan.

    Names and properties are shared by all ranks.
    """

    writer: Ints  # of each item: the rank that writes it
    row: Ints  # of each item: its row in that rank's plan
    lengths: Ints  # of each rank: the items of its plan

    def rows_of(self, rank: int) -> Ints:
        """Return the rows of its own plan that a rank writes, in order."""
        start, stop = np.searchsorted(self.writer, [rank, rank + 1])
        return self.row[start:stop]

    def masks(self) -> list[bytes]:
        """Return, for each rank, which rows of its own plan it writes, as bits."""
        written = np.zeros(int(self.lengths.sum()), bool)
        ends = np.cumsum(self.lengths)
        written[(ends - self.lengths)[self.writer] + self.row] = True
        return masks_of(written, ends)


WholePlan = GlobalPlan | SeriesPlan
"""The global plan, however it was made; both have `masks`."""


def merge(plan: JointPlan, *, to_lowest_rank: bool = False) -> WholePlan:
    """Merge all ranks' plans, so that every chunk has one writer.

    A chunk that several ranks hold goes to one of them: bytes are balanced over the ranks, and
    neighbours in the plan stay together, so that loading one shard takes few files.

    `to_lowest_rank`: give each chunk to the first rank that holds it, and balance nothing. Raises
    PlanInvalid.
    """
    way = merge_series if plan.count >= max(_LARGE, _ALIKE * len(plan.names)) else merge_rows
    return way(plan, to_lowest_rank=to_lowest_rank)


def merge_rows(plan: JointPlan, *, to_lowest_rank: bool = False) -> GlobalPlan:
    """Merge all ranks' plans item by item.

    1. Sort the items by name and offset; items with the same of both are copies of one chunk.
    2. Refuse contradictions.
    3. Choose a writer for each chunk.

    Raises PlanInvalid.
    """
    joined = plan_rows(in_order(plan), np.arange(len(plan.name)))
    ranks = len(plan.ranks)
    order = by_place(joined)
    starts = starts_of_chunks(joined, order)
    refuse_contradictions(joined, order, starts, ranks)
    writers = order[starts]  # in the order of ranks within a chunk's copies
    if not to_lowest_rank:
        writers = _choose_writers(joined, order, starts, ranks)
    chosen = np.sort(writers)
    return GlobalPlan(
        names=joined.names,
        paths=joined.paths,
        table=joined.table,
        writer=joined.rank[chosen],
        row=joined.row[chosen],
        lengths=plan.lengths,
        **{name: getattr(joined, name)[chosen] for name in COLUMNS},
    )


def _choose_writers(joined: PlanRows, order: Ints, starts: Ints, ranks: int) -> Ints:
    """Return, for each chunk, the row that writes it.

    Chunks that the same ranks hold are dealt out together, in the order of the plan: each rank gets
    a run of them. Chunks with the fewest holders come first, so that those that many ranks hold can
    even out the loads.
    """
    holders = np.diff(np.append(starts, len(order)))
    nbytes = chunk_bytes(joined)[order][starts]
    writer = order[starts]
    alone = holders == 1
    load: Floats = np.bincount(
        joined.rank[writer[alone]], weights=nbytes[alone], minlength=ranks
    ).astype(np.float64)
    for places in _by_holders(joined, order, starts, holders):
        held_by = joined.rank[order[starts[places[0]] : starts[places[0]] + holders[places[0]]]]
        share = deal_out(nbytes[places], load[held_by])
        writer[places] = order[starts[places] + share]
        load += np.bincount(held_by[share], weights=nbytes[places], minlength=ranks)
    return writer


def _by_holders(joined: PlanRows, order: Ints, starts: Ints, holders: Ints) -> Iterator[Ints]:
    """Yield the chunks that several ranks hold, together if those are the same ranks.

    Those with the fewest holders come first; within a group, chunks are in the order of the plan.
    """
    shared = np.flatnonzero(holders > 1)
    if not len(shared):
        return
    words = words_of_ranks(int(joined.rank.max()) + 1)
    sums = np.add.reduceat(words[joined.rank[order]], starts)[shared]
    by_plan = np.lexsort((joined.row[order[starts[shared]]], sums, holders[shared]))
    shared, sums = shared[by_plan], sums[by_plan]
    cuts = np.flatnonzero(sums[1:] != sums[:-1]) + 1
    yield from np.split(shared, cuts)
