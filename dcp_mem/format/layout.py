"""Where each item of a segment lies: one layout for each plan, reused for every save of that plan.

Items with a plain dense payload come first, at offsets that depend on dtypes and shapes alone; whatever varies in
length (byte items, tensors on the slow road) is appended behind them, save by save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
Columns = npt.NDArray[np.int64]


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Columns of the dense items, in the order of the plan.

    offsets, lengths: bytes of the item in the segment. payload_offsets, payload_nbytes: its raw data in the segment.
    nbytes: where the dense items end. key: names the layout by its content.
    """

    offsets: Columns
    lengths: Columns
    payload_offsets: Columns
    payload_nbytes: Columns
    nbytes: int
    key: str

    def __len__(self) -> int:
        return len(self.offsets)

    def describing(self, plain: Sequence[bool]) -> Layout:
        """The same layout with a payload offset of -1 where a reader can't go by the plan's dtype and shape, but must
        ask the item's own head (a planner transformed the tensor).
        """
        return layout_of(
            np.stack([self.offsets, self.lengths, np.where(plain, self.payload_offsets, -1), self.payload_nbytes])
        )


def layout_of(columns: Columns) -> Layout:
    """The layout with these four rows."""
    end = int(columns[0, -1] + columns[1, -1]) if columns.shape[1] else 0
    key = hashlib.sha256(columns.tobytes()).hexdigest()[:16] if columns.shape[1] else ""
    return Layout(columns[0], columns[1], columns[2], columns[3], align(end), key)
