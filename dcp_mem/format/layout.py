"""The layout of a segment's items: one for each plan, reused for every save of that plan.

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
Columns = npt.NDArray[np.int64]


def align(offset: int) -> int:
    """Return the offset, rounded up to a multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@sendable
@value_class(eq=False, kw_only=True)
class Layout:
    """Columns of the dense items, in the order of the plan."""

    offsets: Columns  # where each item begins in the segment, in bytes
    lengths: Columns
    # where each item's raw data begins in the segment; -1 where readers can't go by the plan's
    # dtype and shape
    payload_offsets: Columns
    payload_nbytes: Columns
    nbytes: int
    key: str  # name of the layout, made from its content; "" for an empty one

    def __len__(self) -> int:
        return len(self.offsets)

    def with_payloads_where(self, plain: Sequence[bool]) -> Layout:
        """Return the same layout with a payload offset of -1 for the items that aren't plain.

        `plain`: for each item, whether readers can go by the plan's dtype and shape. Where a
        planner has transformed the tensor, they must read the head of the item itself.
        """
        return layout_of(
            np.stack(
                [
                    self.offsets,
                    self.lengths,
                    np.where(plain, self.payload_offsets, -1),
                    self.payload_nbytes,
                ]
            )
        )


def layout_of(columns: Columns) -> Layout:
    """Return the layout with these four rows: offsets, lengths, payload offsets, payload bytes.

    `columns`: int64[4, items], in bytes.
    """
    end = int(columns[0, -1] + columns[1, -1]) if columns.shape[1] else 0
    key = hashlib.sha256(columns.tobytes()).hexdigest()[:16] if columns.shape[1] else ""
    return Layout(
        offsets=columns[0],
        lengths=columns[1],
        payload_offsets=columns[2],
        payload_nbytes=columns[3],
        nbytes=align(end),
        key=key,
    )
