"""What this rank doesn't see: other nodes' memory, and storage where one rank asks for all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dcp_mem.errors import SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.format.manifest import ItemTable
from dcp_mem.sources.base import (
    Description,
    Source,
    described_table,
)

PEERS = "peers"
"""Label of other nodes' memory."""


class ElsewhereSource:
    """What other nodes' memory has, and storage what they lack, as a rank sees it: by the description that it was given.

    stored: None where storage doesn't have the checkpoint. held: files that lie in some node's memory.
    """

    def __init__(self, description: Description, stored: Source | None, is_held: Callable[[str], bool]) -> None:
        self.label = stored.label if stored is not None else PEERS
        self._description, self._stored, self._is_held = description, stored, is_held

    def describe(self) -> Description:
        return self._description

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        catalog = self._description.catalog
        assert catalog is not None
        others = [file for file in files if not self._is_held(file)]
        known = self._stored.tables(others) if self._stored is not None and others else {}
        return {file: known[file] if file in known else described_table(catalog, file) for file in files}

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._stored is None or self._is_held(file):  # those come from other ranks, who send them
            raise SegmentCorrupt("", names.rank_of(file), self.label, f"{file} lies in no memory that can be reached")
        self._stored.read_into(file, offset, buffers)

    def close(self) -> None:
        return
