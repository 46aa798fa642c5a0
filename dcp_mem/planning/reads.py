"""What a rank reads to load its part: by columns where that will do, and item by item where it won't."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_mem.format.catalog import Ints

Saved = tuple[torch.dtype, torch.Size]
"""Dtype and shape of a chunk as it was saved."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One item to read: where its stream lies in which segment, and what is known of the chunk in it (None: no tensor's)."""

    request: ReadItem
    file: str
    offset: int
    length: int
    saved: Saved | None = None
    transforms: Sequence[str] = ()

    @property
    def stop(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """Payloads that go as they are into memory of the caller's, one a row. file: number in `Reads.files`."""

    file: Ints
    address: Ints
    offset: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """All that one rank reads. rest, everything: make the items that aren't in `payloads`, and all items."""

    files: Sequence[str]
    payloads: Straight
    rest: Callable[[], Sequence[Wanted]]
    everything: Callable[[], Sequence[Wanted]]

    def straight(self) -> Iterator[tuple[str, Straight]]:
        """The payloads, segment by segment, in the order in which they lie there."""
        payloads = self.payloads
        order = np.lexsort((payloads.offset, payloads.file))
        columns = (payloads.file[order], payloads.address[order], payloads.offset[order], payloads.nbytes[order])
        starts = np.flatnonzero(np.diff(columns[0], prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(order)]):
            part = Straight(*(column[start:stop] for column in columns))
            yield self.files[part.file[0]], part
