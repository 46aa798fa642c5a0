"""The source of bytes that aren't in this node's memory: other nodes' memory, and storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dcp_mem.errors import SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.format.manifest import ItemTable
from dcp_mem.loading.sources.base import Description, Source, described_table

PEERS = "peers"
"""Label of other nodes' memory."""


class RemoteSource:
    """Other nodes' memory, and storage for segments that no node has.

    Bytes in other nodes' memory can't be read through it: their ranks send them. It knows the items
    of all segments from the checkpoint's description.

    `label`: of storage, or `PEERS` where storage doesn't have the checkpoint.
    """

    def __init__(
        self, description: Description, stored: Source | None, is_in_memory: Callable[[str], bool]
    ) -> None:
        """Join what this rank knows.

        `stored`: storage; None where it doesn't have the checkpoint.
        """
        self.label = stored.label if stored is not None else PEERS
        self._description, self._stored = description, stored
        self._is_in_memory = is_in_memory

    def describe(self) -> Description:
        return self._description

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        catalog = self._description.catalog
        assert catalog is not None
        not_in_memory = [file for file in files if not self._is_in_memory(file)]
        known: dict[str, ItemTable | None] = {}
        if self._stored is not None and not_in_memory:
            known = self._stored.tables(not_in_memory)
        return {
            file: known[file] if file in known else described_table(catalog, file) for file in files
        }

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._stored is None or self._is_in_memory(file):
            detail = f"{file} lies in no memory that can be reached"
            raise SegmentCorrupt("", names.rank_of(file), self.label, detail)
        self._stored.read_into(file, offset, buffers)

    def close(self) -> None:
        return
