"""Who writes a chunk that several ranks hold: shares of equal bytes, in runs of neighbours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_mem.format.catalog import Ints
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.plan_columns import PlanItems

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
