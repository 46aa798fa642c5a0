"""What a source tells of a checkpoint, and how it is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, UntrustedMetadata
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, Extent, catalog_key, catalog_named
from dcp_mem.format.described import metadata_of
from dcp_mem.format.manifest import ItemTable, Manifest, items_of
from dcp_mem.format.places import places_of

Failures = (SegmentCorrupt, UntrustedMetadata, ManifestInvalid)
"""What makes a source unusable without saying anything about the others."""


class Description:
    """What a checkpoint consists of. catalog, manifest: None where only DCP's metadata says it: others have written it."""

    def __init__(self, catalog: Catalog | None, manifest: Manifest | None, metadata: Metadata | None = None) -> None:
        """Raises ManifestInvalid where catalog and manifest don't belong together, UntrustedMetadata for odd planner data."""
        self.catalog = catalog
        self.manifest = manifest
        self._metadata = metadata
        if catalog is not None:
            places_of(catalog).tail.extents(self.tails)
            if catalog.planner_pickle:
                _ = self.metadata

    @property
    def save_id(self) -> str:
        return "" if self.manifest is None else self.manifest.save_id

    @property
    def step(self) -> int | None:
        """Of which training step it is, where that was told."""
        return None if self.manifest is None else self.manifest.step

    @property
    def tails(self) -> Mapping[int, Sequence[Extent]]:
        """By rank, where the items behind the layout of its segment lie."""
        return {} if self.manifest is None else self.manifest.tails

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's DCP metadata, made when it is first asked for."""
        if self._metadata is None:
            assert self.catalog is not None
            assert self.manifest is not None
            self._metadata = metadata_of(self.catalog, self.manifest.save_id, self.tails)
        return self._metadata


@dataclass(frozen=True, slots=True)
class StoredDescription:
    """Files that describe a checkpoint, for ranks that don't see them. metadata: DCP's, where nothing of ours does."""

    manifest: bytes = b""
    catalog: bytes = b""
    metadata: bytes = b""


def description_of(told: StoredDescription) -> Description:
    """What another rank has told. Raises ManifestInvalid."""
    manifest = Manifest.from_json(told.manifest)
    return Description(catalog_named(manifest.catalog, told.catalog), manifest)


class Source(Protocol):
    """One place that has the whole checkpoint. Every method raises SegmentCorrupt where bytes are missing or wrong."""

    label: str

    def describe(self) -> Description:
        """What the checkpoint consists of. Raises UntrustedMetadata as well."""

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        """Extents, payloads and checksums of these segments' items; None where nothing of ours describes one."""

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with a segment's bytes from `offset` on."""

    def close(self) -> None:
        """End leases and give back descriptors."""


def described_table(catalog: Catalog, file: str) -> ItemTable:
    """The items that a catalog has of a segment, without checksums."""
    return items_of(catalog.layout(names.rank_of(file)), ())


def checked_catalog(key: str, data: bytes) -> bytes:
    """The catalog's bytes. Raises ManifestInvalid where they aren't those of that key."""
    if catalog_key(data) != key:
        raise ManifestInvalid(f"catalog {key} is damaged")
    return data
