"""The description of a checkpoint, and the interface of all sources of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, SizeRefused, UntrustedMetadata
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, Tails, catalog_key, catalog_named
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.locations import refuse_missing_tails
from dcp_mem.format.manifest import ItemTable, Manifest, items_of

SOURCE_ERRORS = (SegmentCorrupt, UntrustedMetadata, ManifestInvalid, SizeRefused)
"""Errors that make one source unusable; others may still have the bytes whole."""


class Description:
    """The description of a checkpoint: its catalog and manifest, or DCP's metadata alone.

    `catalog`: names, shapes and places of its items; None for what torch's own writer made.
    `manifest`: its segments; None for what torch's own writer made. `file_nbytes`: of the files
    that torch's own writer made.
    """

    def __init__(
        self,
        catalog: Catalog | None,
        manifest: Manifest | None,
        metadata: Metadata | None = None,
        file_nbytes: Mapping[str, int] | None = None,
    ) -> None:
        """Describe a checkpoint by catalog and manifest, or by DCP's metadata alone.

        Raises ManifestInvalid, UntrustedMetadata.
        """
        self.catalog = catalog
        self.manifest = manifest
        self.file_nbytes = file_nbytes
        self._metadata = metadata
        if catalog is not None:
            _refuse_beyond_segments(catalog, manifest)
            refuse_missing_tails(catalog, self.tails)
            if catalog.planner_pickle:
                _ = self.metadata

    @property
    def save_id(self) -> str:
        """Of the save; "" for what torch's own writer made."""
        return "" if self.manifest is None else self.manifest.save_id

    @property
    def step(self) -> int | None:
        """The training step; None where the writer wasn't told."""
        return None if self.manifest is None else self.manifest.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """The figures given with the save."""
        return {} if self.manifest is None else self.manifest.metrics

    @property
    def tails(self) -> Tails:
        """By rank, the extents of the items behind the layout of its segment."""
        return {} if self.manifest is None else self.manifest.tails

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's DCP metadata, made when it is first needed."""
        if self._metadata is None:
            assert self.catalog is not None
            assert self.manifest is not None
            manifest = self.manifest
            self._metadata = metadata_of(self.catalog, manifest.save_id, self.tails, manifest.name)
        return self._metadata


def _refuse_beyond_segments(catalog: Catalog, manifest: Manifest | None) -> None:
    """Raise ManifestInvalid where a layout, or a tail, reaches beyond its segment."""
    if manifest is None:
        return
    segments = manifest.segments
    nbytes = dict(zip(segments.rank, segments.nbytes, strict=True))
    ends = [int((one.offsets + one.lengths).max(initial=0)) for one in catalog.layouts]
    for rank, layout in zip(catalog.ranks.tolist(), catalog.layout_of.tolist(), strict=True):
        if ends[layout] > nbytes.get(rank, ends[layout]):
            raise ManifestInvalid(
                f"the items of rank {names.home_rank(rank)} reach beyond its segment"
            )


@sendable
@value_class
class DescriptionFiles:
    """The files that describe a checkpoint, as they lie in memory or on storage."""

    manifest: bytes = b""
    catalog: bytes = b""
    metadata: bytes = b""  # DCP's `.metadata`, where there is nothing of ours
    # of the files beside it, as storage lists them
    file_nbytes: Mapping[str, int] = field(default_factory=dict)

    def description(self) -> Description:
        """Return what manifest and catalog say. Raises ManifestInvalid."""
        manifest = Manifest.from_json(self.manifest)
        return Description(catalog_named(manifest.catalog, self.catalog), manifest)


class Source(Protocol):
    """One place that has a checkpoint, or part of it.

    Every method raises SegmentCorrupt where bytes are missing or wrong.

    Attributes:
        label: Names the source in errors and reports.
    """

    label: str

    def describe(self) -> Description:
        """Return what the checkpoint consists of. Raises UntrustedMetadata as well."""

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        """Return extents, payloads and checksums of these segments' items.

        None stands for a segment of a checkpoint that torch's own writer made.

        Args:
            files: The segments' files.
        """

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with a segment's bytes from `offset` on.

        Args:
            file: Name of the segment's file.
            offset: In bytes.
            buffers: Memory to fill; all of it.
        """

    def close(self) -> None:
        """End leases and close files."""


def described_table(catalog: Catalog, file: str) -> ItemTable:
    """Return the items that a catalog has of a segment's file, without checksums."""
    return items_of(catalog.layout(names.rank_of(file)), ())


def checked_catalog(key: str, data: bytes) -> bytes:
    """Return a catalog's bytes, once they are shown to be those of that key.

    Raises ManifestInvalid.
    """
    if catalog_key(data) != key:
        raise ManifestInvalid(f"catalog {key} is damaged")
    return data


# -- bytes that aren't in this node's memory -----------------------------------------------------

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
