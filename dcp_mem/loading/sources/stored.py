"""A committed checkpoint on storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.common.parallel import in_parallel
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.catalog import catalog_named
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest
from dcp_mem.format.metadata import read_metadata, refuse_contradictions
from dcp_mem.loading.sources.base import Description, DescriptionFiles, checked_catalog
from dcp_mem.storage import FileUnavailable, OfOneFile, Storage
from dcp_mem.storage.listing import get_parsed, is_committed

T = TypeVar("T")


class StorageSource:
    """A committed checkpoint on storage, described by our manifests and catalog.

    What torch's own writer made has its `.metadata` alone; a save id of "" stands for it.
    """

    def __init__(self, storage: Storage, name: str, save_id: str, scope: str) -> None:
        """Take down where to look; storage is asked later.

        `save_id`: of the save; "" for what torch's own writer made.
        """
        self.label = storage.url
        self._storage, self._name, self._save_id, self._scope = storage, name, save_id, scope
        self._manifest: Manifest | None = None

    def describe(self) -> Description:
        return self.describe_by(self.description_files())

    def description_files(self) -> DescriptionFiles:
        """Return the files that describe the checkpoint, for this rank or others.

        Raises SegmentCorrupt.
        """
        if not self._save_id:
            listed = self._listed()
            metadata = self._get(names.metadata_file(self._scope), bytes)
            return DescriptionFiles(metadata=metadata, file_nbytes=listed)
        if not self._is_committed():
            raise self._corrupt(0, f"what is committed there isn't save {self._save_id}")
        manifest, key = self._get(
            names.stored_manifest(self._save_id),
            lambda data: (data, Manifest.from_json(data).catalog),
        )
        catalog = self._get(names.catalog_file(key), lambda data: checked_catalog(key, data))
        return DescriptionFiles(manifest, catalog)

    def describe_by(self, files: DescriptionFiles) -> Description:
        """Return what description files say, which this rank or another has read.

        Raises SegmentCorrupt, UntrustedMetadata.
        """
        if not self._save_id:
            metadata = read_metadata(files.metadata)
            try:
                refuse_contradictions(metadata)
            except ValueError as error:
                raise self._corrupt(0, f"its .metadata contradicts itself: {error}") from None
            return Description(None, None, self._without_manifest(metadata), files.file_nbytes)
        try:
            self._manifest = Manifest.from_json(files.manifest)
            return Description(catalog_named(self._manifest.catalog, files.catalog), self._manifest)
        except ManifestInvalid as error:
            raise self._corrupt(0, str(error)) from None

    def _is_committed(self) -> bool:
        file = names.metadata_file(self._scope)
        nbytes = self._listed().get(file, 0)
        try:
            return is_committed(self._storage, f"{self._name}/{file}", nbytes, self._save_id)
        except (StorageKeyMissing, OfOneFile) as error:
            raise self._unread(0, error) from None

    def _listed(self) -> dict[str, int]:
        try:
            return {entry.name: entry.nbytes for entry in self._storage.ls(self._name)}
        except OfOneFile as error:
            raise self._unread(0, error) from None

    def _without_manifest(self, metadata: Metadata) -> Metadata:
        """Return metadata that torch wrote; refuse ours, which lost its checksums."""
        files = {info.relative_path for info in metadata.storage_data.values()}
        if any(names.SEGMENT.fullmatch(file) for file in files):
            detail = "its manifest is missing, and the checksums with it"
            raise self._corrupt(0, f"{detail} (torch's own readers need none)")
        return metadata

    def tables(self, files: Collection[str]) -> dict[str, ItemTable | None]:
        if not self._save_id:
            return dict.fromkeys(files)
        if self._manifest is None:  # another source has described the checkpoint
            self._manifest = self._get(names.stored_manifest(self._save_id), Manifest.from_json)
        segments = self._manifest.segments
        node_of = dict(zip(segments.rank, segments.node, strict=True))
        ranks = {names.rank_of(file) for file in files}
        nodes = sorted({node_of[rank] for rank in ranks if rank in node_of})
        known: dict[str, ItemTable | None] = {}
        for tables in in_parallel(self._tables_of_node, nodes, name="dcp_mem-manifests"):
            known.update(tables)
        for file in files:
            if file not in known:
                detail = f"no manifest of its has the checksums of {file}"
                raise self._corrupt(names.rank_of(file), detail)
        self._refuse_beyond_segments({file: known[file] for file in files})
        return {file: known[file] for file in files}

    def _refuse_beyond_segments(self, tables: Mapping[str, ItemTable | None]) -> None:
        """Raise SegmentCorrupt where checksums are of more bytes than a segment has."""
        assert self._manifest is not None
        segments = self._manifest.segments
        nbytes = dict(zip(segments.rank, segments.nbytes, strict=True))
        for file, table in tables.items():
            rank = names.rank_of(file)
            end = 0 if table is None else int((table.offsets + table.lengths).max(initial=0))
            if end > nbytes.get(rank, end):
                raise self._corrupt(rank, f"its items reach beyond the end of {file}")

    def _tables_of_node(self, node: str) -> Mapping[str, ItemTable]:
        file = names.stored_node_manifest(self._save_id, node)
        return self._get(file, NodeManifest.from_json).tables

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(map(len, buffers))
        try:
            count = self._storage.read_into(f"{self._name}/{file}", offset, buffers)
        except (StorageKeyMissing, OfOneFile) as error:
            raise self._unread(names.rank_of(file), error) from None
        if count < nbytes:
            detail = f"{file} ends at {offset + count}, {nbytes - count} bytes short"
            raise self._corrupt(names.rank_of(file), detail)

    def close(self) -> None:
        return

    def _get(self, file: str, parse: Callable[[bytes], T]) -> T:
        try:
            return get_parsed(self._storage, f"{self._name}/{file}", parse)
        except (StorageKeyMissing, ManifestInvalid, OfOneFile) as error:
            raise self._unread(0, error) from None

    def _unread(self, rank: int, error: Exception) -> SegmentCorrupt:
        corrupt = self._corrupt(rank, str(error))
        corrupt.may_pass = isinstance(error, FileUnavailable)
        return corrupt

    def _corrupt(self, rank: int, detail: str) -> SegmentCorrupt:
        return SegmentCorrupt(self._name, rank, self.label, detail)
