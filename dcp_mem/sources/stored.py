"""A committed checkpoint on storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.catalog import catalog_named
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest
from dcp_mem.format.metadata import read_metadata
from dcp_mem.sources.base import (
    Description,
    StoredDescription,
    checked_catalog,
)
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import get_parsed, is_committed

T = TypeVar("T")

_MANIFESTS_AT_ONCE = 8


class StorageSource:
    """Goes by `.metadata`, manifests and catalog, or by `.metadata` alone where others have written it. save_id: "" there."""

    def __init__(self, storage: Storage, name: str, save_id: str, scope: str) -> None:
        self.label = storage.url
        self._storage, self._name, self._save_id, self._scope = storage, name, save_id, scope
        self._manifest: Manifest | None = None

    def describe(self) -> Description:
        return self.adopt(self.fetch_description())

    def fetch_description(self) -> StoredDescription:
        """What storage says of the checkpoint; one rank may ask, and tell the others. Raises SegmentCorrupt."""
        if not self._save_id:
            return StoredDescription(metadata=self._get(names.metadata_file(self._scope), bytes))
        if not self._is_committed():
            raise self._corrupt(0, f"what is committed there isn't save {self._save_id}")
        manifest, key = self._get(
            names.stored_manifest(self._save_id), lambda data: (data, Manifest.from_json(data).catalog)
        )
        return StoredDescription(manifest, self._get(names.catalog_file(key), lambda data: checked_catalog(key, data)))

    def adopt(self, stored: StoredDescription) -> Description:
        """Go by what storage said to this rank or another. Raises SegmentCorrupt, UntrustedMetadata."""
        if not self._save_id:
            return Description(None, None, self._foreign(read_metadata(stored.metadata)))
        try:
            self._manifest = Manifest.from_json(stored.manifest)
            return Description(catalog_named(self._manifest.catalog, stored.catalog), self._manifest)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def _is_committed(self) -> bool:
        file = names.metadata_file(self._scope)
        nbytes = next((entry.nbytes for entry in self._storage.ls(self._name) if entry.name == file), 0)
        try:
            return is_committed(self._storage, f"{self._name}/{file}", nbytes, self._save_id)
        except StorageKeyMissing as error:
            raise self._corrupt(0, str(error)) from None

    def _foreign(self, metadata: Metadata) -> Metadata:
        """What torch wrote has no manifest; a checkpoint of ours without one has lost its checksums."""
        files = {getattr(info, "relative_path", "") for info in (metadata.storage_data or {}).values()}
        if any(names.SEGMENT.fullmatch(file) for file in files):
            raise self._corrupt(0, "its manifest is missing, and the checksums with it (torch's own readers need none)")
        return metadata

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        if not self._save_id:
            return dict.fromkeys(files)
        if self._manifest is None:  # another source has described the checkpoint
            self._manifest = self._get(names.stored_manifest(self._save_id), Manifest.from_json)
        of_rank = dict(zip(self._manifest.segments.rank, self._manifest.segments.node, strict=True))
        nodes = sorted({of_rank[names.rank_of(file)] for file in files if names.rank_of(file) in of_rank})
        known: dict[str, ItemTable | None] = {}
        with ThreadPoolExecutor(_MANIFESTS_AT_ONCE, thread_name_prefix="dcp_mem-manifests") as pool:
            for tables in pool.map(self._tables_of_node, nodes):
                known.update(tables)
        for file in files:
            if file not in known:
                raise self._corrupt(names.rank_of(file), f"no manifest of its has the checksums of {file}")
        return {file: known[file] for file in files}

    def _tables_of_node(self, node: str) -> Mapping[str, ItemTable]:
        return self._get(names.stored_node_manifest(self._save_id, node), NodeManifest.from_json).tables

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, buffers))
        try:
            count = self._storage.read_into(f"{self._name}/{file}", offset, buffers)
        except StorageKeyMissing as error:
            raise self._corrupt(names.rank_of(file), str(error)) from None
        if count < nbytes:
            raise self._corrupt(names.rank_of(file), f"{file} ends at {offset + count}, {nbytes - count} bytes short")

    def close(self) -> None:
        return

    def _get(self, file: str, parse: Callable[[bytes], T]) -> T:
        try:
            return get_parsed(self._storage, f"{self._name}/{file}", parse)
        except (StorageKeyMissing, ManifestInvalid) as error:
            raise self._corrupt(0, str(error)) from None

    def _corrupt(self, rank: int, detail: str) -> SegmentCorrupt:
        return SegmentCorrupt(self._name, rank, self.label, detail)
