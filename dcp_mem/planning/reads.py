"""The reads of one rank: direct reads as columns, other items one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Ints
from dcp_mem.planning.entries import Casts
from dcp_mem.planning.plain_tensors import HOST

Saved = tuple[torch.dtype, torch.Size]
"""Dtype and shape of a chunk as it was saved."""


@value_class(kw_only=True)
class ItemRead:
    """One item to read."""

    request: ReadItem
    file: str
    offset: int  # where its stream begins in the segment, in bytes
    length: int
    saved: Saved | None = None  # Dtype and shape of the saved chunk; None for a byte item
    transforms: Sequence[str] = ()

    @property
    def stop(self) -> int:
        """The end of its stream in the segment, in bytes."""
        return self.offset + self.length


@value_class(eq=False, kw_only=True)
class DirectRead:
    """Payloads that are read as they are into the caller's tensors, one row each."""

    file: Ints
    address: Ints
    offset: Ints  # where it begins in the segment, in bytes
    nbytes: Ints
    # number of the CUDA device that the address is on; `HOST` for this process's memory
    device: Ints

    def only(self, which: npt.NDArray[Any] | slice) -> DirectRead:
        """Return some of the rows.

        `which`: of each row, whether it is wanted; or their numbers, or a slice.
        """
        return DirectRead(
            file=self.file[which],
            address=self.address[which],
            offset=self.offset[which],
            nbytes=self.nbytes[which],
            device=self.device[which],
        )

    def joined(self, other: DirectRead) -> DirectRead:
        """Return the rows of both, by ascending offsets."""
        both = DirectRead(
            file=np.append(self.file, other.file),
            address=np.append(self.address, other.address),
            offset=np.append(self.offset, other.offset),
            nbytes=np.append(self.nbytes, other.nbytes),
            device=np.append(self.device, other.device),
        )
        return both.only(np.argsort(both.offset, kind="stable"))


@value_class(eq=False, kw_only=True)
class Reads:
    """All that one rank reads.

    `rest`: what `payloads` lack. `items_beside_host`: what `payloads` that go into this process's
    memory lack. `everything`: all, as items. `casts`: tensors that are loaded in another dtype.
    """

    files: Sequence[str]
    payloads: DirectRead
    rest: Callable[[], Sequence[ItemRead]]
    items_beside_host: Callable[[], Sequence[ItemRead]]
    everything: Callable[[], Sequence[ItemRead]]
    casts: Casts

    def direct_reads(self, *, on_host: bool = False) -> Iterator[tuple[str, DirectRead]]:
        """Yield the name of each segment and its direct reads, in the order of their offsets.

        `on_host`: only those that go into this process's memory.
        """
        payloads = self.payloads.only(self.payloads.device == HOST) if on_host else self.payloads
        payloads = payloads.only(np.lexsort((payloads.offset, payloads.file)))
        starts = np.flatnonzero(np.diff(payloads.file, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(payloads.file)]):
            yield self.files[payloads.file[start]], payloads.only(slice(start, stop))
