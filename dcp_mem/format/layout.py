"""The items of a segment, and its layout: one for each plan, reused for every save of that plan.

Items with a plain dense payload come first, at offsets that depend on dtypes and shapes alone.
Items of varying length (byte items, tensors without such a payload) follow in the tail, save by
save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class

ALIGNMENT = 64
_MOST = 1 << 50
"""The largest offset or length in a segment."""
Columns = npt.NDArray[np.int64]


def align(offset: int) -> int:
    """Return the offset, rounded up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@value_class(eq=False)
class ItemColumns:
    """Items of a segment, in the order of their offsets."""

    # int64[4, items], in bytes: where each begins in the segment, and its length; where its raw
    # data begins there, -1 where readers can't go by the plan's dtype and shape, and their length
    columns: Columns

    @property
    def offsets(self) -> Columns:
        return self.columns[0]  # type: ignore[no-any-return]

    @property
    def lengths(self) -> Columns:
        return self.columns[1]  # type: ignore[no-any-return]

    @property
    def payload_offsets(self) -> Columns:
        return self.columns[2]  # type: ignore[no-any-return]

    @property
    def payload_nbytes(self) -> Columns:
        return self.columns[3]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.columns[0])


@sendable
@value_class(eq=False)
class Layout(ItemColumns):
    """The dense items, in the order of the plan."""

    nbytes: int
    key: str  # name of the layout, made from its content; "" for an empty one

    def with_payloads_where(self, plain: Sequence[bool]) -> Layout:
        """Return the same layout with a payload offset of -1 for the items that aren't plain: where
        a planner has transformed the tensor, readers must read the head of the item itself.
        """
        payloads = np.where(plain, self.payload_offsets, -1)
        return layout_of(np.stack([*self.columns[:2], payloads, self.payload_nbytes]))


def layout_of(columns: Columns) -> Layout:
    """Return the layout with the columns that `ItemColumns` has."""
    if not columns.shape[1]:
        return Layout(columns, 0, "")
    key = hashlib.sha256(columns.tobytes()).hexdigest()[:16]
    return Layout(columns, align(int(columns[0, -1] + columns[1, -1])), key)


NO_LAYOUT = layout_of(np.zeros((4, 0), np.int64))


def refuse_outside(columns: Columns) -> None:
    """Raise ValueError where items lie outside of any segment, or payloads outside of their items.

    `columns`: as `ItemColumns` has them, of one segment or of several.
    """
    offsets, lengths, payload_offsets, payload_nbytes = columns
    sizes = columns[[0, 1, 3]]
    if (sizes < 0).any() or (sizes > _MOST).any():
        raise ValueError("items lie outside of any segment")
    inside = (payload_offsets >= offsets) & (payload_nbytes <= lengths)
    inside &= payload_offsets - offsets <= lengths - payload_nbytes
    if not (inside | (payload_offsets == -1)).all():
        raise ValueError("payloads reach out of their items")
