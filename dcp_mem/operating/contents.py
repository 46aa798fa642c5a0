"""What a checkpoint consists of: its tensors, byte items and segments, by its catalog or, where others have written it, by
DCP's metadata. No tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.catalog import BYTES, Catalog, Ints, catalog_named
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.places import LayoutItems
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.job import Held
from dcp_mem.operating.inventory import MEMORY, STORAGE, Checkpoint, job_memory
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import get_parsed


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype: as torch prints it, without "torch.". shape: of the whole. shards: pieces that were saved. nbytes: of all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ByteItem:
    """Anything that is no tensor, pickled. nbytes: of its file form."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """One rank's file. node: "" where nothing of ours tells. places: where it lies, as far as this node can see."""

    file: str
    rank: int
    node: str
    nbytes: int
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint, taken apart. manifests: files that describe it on storage. catalog: its key ("": none)."""

    tensors: tuple[Tensor, ...]
    items: tuple[ByteItem, ...]
    segments: tuple[SegmentFile, ...]
    manifests: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    catalog: str = ""


def contents(settings: Settings, storage: Storage | None, checkpoint: Checkpoint) -> Contents:
    """Look into a checkpoint, in memory if it lies there. storage: the job's.

    Raises SegmentCorrupt where what describes it is damaged everywhere, UntrustedMetadata, CheckpointNotFound where it has left.
    """
    stored = {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name)} if storage is not None else {}
    described = _described(settings, storage, checkpoint)
    if described is None:
        assert storage is not None
        return _foreign(storage, checkpoint, stored)
    manifest, catalog, held = described
    listed = storage.ls(f"{checkpoint.name}/{names.OWN}") if storage is not None else []
    in_memory = set(os.listdir(held.directory)) if held is not None else set()
    segments = [
        SegmentFile(one.file, one.rank, one.node, one.nbytes, _places(one.file, one.nbytes, in_memory, stored))
        for one in manifest.segments
    ]
    tensors, items = _entries(catalog, manifest)
    return Contents(
        tuple(tensors),
        tuple(items),
        tuple(segments),
        tuple(
            sorted(entry.name for entry in listed if manifest.save_id in entry.name or manifest.catalog in entry.name)
        ),
        manifest.nodes,
        manifest.catalog,
    )


def _places(file: str, nbytes: int, in_memory: set[str], stored: dict[str, int]) -> tuple[str, ...]:
    return (*([MEMORY] if file in in_memory else []), *([STORAGE] if stored.get(file) == nbytes else []))


def _described(
    settings: Settings, storage: Storage | None, checkpoint: Checkpoint
) -> tuple[Manifest, Catalog, Held | None] | None:
    """Manifest and catalog; None where nothing of ours describes it."""
    held, trouble = held_of(settings, checkpoint), ""
    if held is not None:
        try:
            return held.manifest, read_catalog(held.directory, held.manifest.catalog), held
        except (ManifestInvalid, FileNotFoundError) as error:
            trouble = str(error)
    if STORAGE not in checkpoint.places or storage is None:
        if trouble:
            raise SegmentCorrupt(checkpoint.name, 0, MEMORY, trouble)
        raise CheckpointNotFound(checkpoint.name, f"memory (job {settings.job})", [], ["it has just left"])
    if not checkpoint.save_id:
        return None
    try:
        own = names.stored_manifest(checkpoint.save_id)
        manifest = get_parsed(storage, f"{checkpoint.name}/{own}", Manifest.from_json)
        key = manifest.catalog
        catalog = get_parsed(
            storage, f"{checkpoint.name}/{names.catalog_file(key)}", lambda data: catalog_named(key, data)
        )
    except (ManifestInvalid, StorageKeyMissing) as error:
        raise SegmentCorrupt(checkpoint.name, 0, storage.url, str(error)) from None
    return manifest, catalog, held


def held_of(settings: Settings, checkpoint: Checkpoint) -> Held | None:
    """The checkpoint in this node's memory."""
    memory = job_memory(settings) if MEMORY in checkpoint.places else None
    found = [] if memory is None else memory.find(checkpoint.name)
    return next((held for held in found if held.manifest.save_id == checkpoint.save_id), None)


# -- by the catalog --------------------------------------------------------------------------------------------------------


def _entries(catalog: Catalog, manifest: Manifest) -> tuple[list[Tensor], list[ByteItem]]:
    sizes = _nbytes_of_rows(catalog, manifest)
    columns = (catalog.name, catalog.properties, catalog.dimensions)
    tensors, items = [], []
    for (name, kind, dimensions), size, (start, stop) in zip(
        zip(*(column.tolist() for column in columns), strict=True),
        catalog.size.tolist(),
        pairwise(catalog.first.tolist()),
        strict=True,
    ):
        nbytes = int(sizes[start:stop].sum())
        if kind >= 0:
            dtype = catalog.table[kind].dtype.removeprefix("torch.")
            tensors.append(Tensor(catalog.names[name], dtype, tuple(size[:dimensions]), stop - start, nbytes))
        elif kind == BYTES:
            items.append(ByteItem(catalog.names[name], nbytes))
    return tensors, items


def _nbytes_of_rows(catalog: Catalog, manifest: Manifest) -> Ints:
    """Of each row its payload's bytes, or its whole item's where that has none; 0 where nobody has written it."""
    found = np.zeros(len(catalog.writer), np.int64)
    written = np.flatnonzero(catalog.writer >= 0)
    items = LayoutItems(catalog)
    numbers = items.of(written)
    _, lengths, payload_offsets, payload_nbytes = items.columns
    found[written] = np.where(payload_offsets >= 0, payload_nbytes, lengths)[numbers]
    behind, tails = items.behind(written), manifest.tails
    for row, number in zip(written[numbers < 0].tolist(), behind[numbers < 0].tolist(), strict=True):
        tail: Sequence[tuple[int, int]] = tails.get(int(catalog.ranks[catalog.writer[row]]), ())
        found[row] = tail[number][1] if number < len(tail) else 0
    return found


# -- by DCP's metadata -----------------------------------------------------------------------------------------------------


def _foreign(storage: Storage, checkpoint: Checkpoint, stored: dict[str, int]) -> Contents:
    # torch, which whoever looks at our own can do without.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dcp_mem.format.metadata import read_metadata

    metadata = read_metadata(storage.get(f"{checkpoint.name}/{names.metadata_file(checkpoint.scope)}"))
    lengths: dict[str, int] = {}
    for index, info in (metadata.storage_data or {}).items():
        lengths[index.fqn] = lengths.get(index.fqn, 0) + info.length
    tensors, items = [], []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            nbytes = dtype.itemsize * sum(chunk.sizes.numel() for chunk in entry.chunks)
            shape = tuple(entry.size)
            tensors.append(Tensor(name, str(dtype).removeprefix("torch."), shape, len(entry.chunks), nbytes))
        else:
            items.append(ByteItem(name, lengths.get(name, 0)))
    files = sorted({info.relative_path for info in (metadata.storage_data or {}).values()})
    segments = [
        SegmentFile(file, rank, "", stored.get(file, 0), (STORAGE,) if file in stored else ())
        for rank, file in enumerate(files)
    ]
    return Contents(tuple(tensors), tuple(items), tuple(segments), ())
