"""Values that aren't finite, counted in a segment's bytes without torch.

A value isn't finite if all bits of its exponent are set; in formats without infinity that is NaN.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

import numpy as np

from dcp_mem.format.catalog import Catalog

_BITS = {
    "torch.float64": ("<u8", 0x7FF0_0000_0000_0000),
    "torch.complex128": ("<u8", 0x7FF0_0000_0000_0000),
    "torch.float32": ("<u4", 0x7F80_0000),
    "torch.complex64": ("<u4", 0x7F80_0000),
    "torch.float16": ("<u2", 0x7C00),
    "torch.complex32": ("<u2", 0x7C00),
    "torch.bfloat16": ("<u2", 0x7F80),
    "torch.float8_e5m2": ("u1", 0x7C),
    "torch.float8_e4m3fn": ("u1", 0x7F),
    "torch.float8_e8m0fnu": ("u1", 0xFF),
}
"""By dtype: how to look at the bytes, and the bits that are all set where a value isn't finite."""


class FiniteCheck:
    """Counts values that aren't finite in the tensors of one segment.

    Tensors without a plain payload, and dtypes without a mask above, are left out.

    `found`: how many such values there are, by the tensor's name.
    """

    def __init__(self, catalog: Catalog, rank: int) -> None:
        self.found: Counter[str] = Counter()
        writer = np.flatnonzero(catalog.ranks == rank)
        rows = np.flatnonzero(catalog.writer == writer[0]) if len(writer) else writer
        layout, entries = catalog.layout(rank), catalog.entry_of_row()[rows]
        self._payloads: list[tuple[int, int, str, str, int]] = []
        for entry, number in zip(entries.tolist(), catalog.number[rows].tolist(), strict=True):
            properties = int(catalog.properties[entry])
            if properties < 0 or number >= len(layout) or layout.payload_offsets[number] < 0:
                continue
            kind, bits = _BITS.get(catalog.table[properties].dtype, ("", 0))
            start, nbytes = layout.payload_offsets[number], layout.payload_nbytes[number]
            if kind and nbytes:
                name = catalog.names[int(catalog.name[entry])]
                self._payloads.append((int(start), int(start + nbytes), name, kind, bits))
        self._payloads.sort()
        self._starts = [start for start, *_ in self._payloads]
        self._stops = [stop for _, stop, *_ in self._payloads]

    def look(self, low: int, data: memoryview) -> None:
        """Look at bytes of the segment; no value may be cut in two."""
        high = low + len(data)
        first, last = bisect_right(self._stops, low), bisect_left(self._starts, high)
        for start, stop, name, kind, bits in self._payloads[first:last]:
            values = np.frombuffer(data[max(start, low) - low : min(stop, high) - low], kind)
            count = int(np.count_nonzero((values & values.dtype.type(bits)) == bits))
            if count:
                self.found[name] += count

    def __str__(self) -> str:
        names = [f"{name} ({count})" for name, count in self.found.most_common(4)]
        more = f" and {len(self.found) - 4} more tensors" if len(self.found) > 4 else ""
        return f"values that aren't finite in {', '.join(names)}{more}"
