"""Show what a checkpoint consists of: tensors, byte items and segments.

It goes by the checkpoint's catalog or, for a checkpoint that torch wrote, by DCP's metadata. Byte
items are read, to tell those that a load refuses; tensors aren't.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dcp_mem.common.files import open_file
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound, ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.catalog import BYTES, Catalog, Ints, catalog_named
from dcp_mem.format.locations import LayoutItems
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.policy.pieces import merged
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage import OfOneFile, Storage
from dcp_mem.storage.listing import get_parsed

Location = tuple[str, int, int]
"""File, offset and bytes of an item's stream."""
_MOST_NBYTES = 64 << 20
"""Of byte items that are read, all together."""
_PLAIN = re.compile(
    "PROTO|STOP|MARK|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|EMPTY_(DICT|LIST|"
    "TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|(LONG_)?BIN(PUT|GET)"
)
"""Opcodes of numbers, texts and containers."""


@value_class(kw_only=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    nbytes: int


@value_class
class ByteItem:
    """Anything that is no tensor, pickled."""

    name: str
    nbytes: int
    refused: str = ""  # why a load refuses it by default; "" where it doesn't, or can't be read


@value_class(kw_only=True)
class SegmentFile:
    file: str
    rank: int
    node: str  # the node that saved it; "" for a checkpoint that torch wrote
    nbytes: int
    # where it lies, as far as this node can see: MEMORY, STORAGE, both or none
    places: tuple[str, ...]


@value_class(kw_only=True)
class Contents:
    tensors: tuple[Tensor, ...]
    items: tuple[ByteItem, ...]
    segments: tuple[SegmentFile, ...]
    manifests: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    catalog: str = ""  # key of its catalog; "" where there is none


def contents_of(
    settings: Settings, storage: Storage | None, checkpoint: CheckpointStatus
) -> Contents:
    """Return what a checkpoint consists of, by what lies in memory if it does, else by storage."""
    stored = (
        {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name)}
        if storage is not None
        else {}
    )
    described = _described(settings, storage, checkpoint)
    if described is None:
        assert storage is not None
        return _foreign(storage, checkpoint, stored)
    manifest, catalog, local = described
    in_memory = set(os.listdir(local.directory)) if local is not None else set()
    segments = [
        SegmentFile(
            file=one.file,
            rank=names.home_rank(one.rank),
            node=one.node,
            nbytes=one.nbytes,
            places=_places(one.file, one.nbytes, in_memory, stored),
        )
        for one in manifest.segments
    ]
    tensors, items, locations = _entries(catalog, manifest)
    items = _judged(items, locations, storage, checkpoint.name, stored, local)
    return Contents(
        tensors=tuple(tensors),
        items=tuple(items),
        segments=tuple(segments),
        manifests=_own_files(storage, checkpoint.name, manifest),
        nodes=manifest.nodes,
        catalog=manifest.catalog,
    )


def _own_files(storage: Storage | None, name: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the files on storage that describe this save of a checkpoint."""
    listed = storage.ls(f"{name}/{names.OWN}") if storage is not None else []
    keys = (manifest.save_id, manifest.catalog)
    return tuple(sorted(one.name for one in listed if any(key in one.name for key in keys)))


def _places(file: str, nbytes: int, in_memory: set[str], stored: dict[str, int]) -> tuple[str, ...]:
    return (
        *([MEMORY] if file in in_memory else []),
        *([STORAGE] if stored.get(file) == nbytes else []),
    )


def _described(
    settings: Settings, storage: Storage | None, checkpoint: CheckpointStatus
) -> tuple[Manifest, Catalog, LocalCheckpoint | None] | None:
    """Return manifest, catalog and the local checkpoint; None for a checkpoint that torch wrote."""
    local, trouble = local_checkpoint_of(settings, checkpoint), ""
    if local is not None:
        try:
            return local.manifest, read_catalog(local.directory, local.manifest.catalog), local
        except (ManifestInvalid, FileNotFoundError) as error:
            trouble = str(error)
    if STORAGE not in checkpoint.places or storage is None:
        if trouble:
            raise SegmentCorrupt(checkpoint.name, 0, MEMORY, trouble)
        raise CheckpointNotFound(
            checkpoint.name, f"memory (job {settings.job})", [], ["it has just left"]
        )
    if not checkpoint.save_id:
        return None
    try:
        own = names.stored_manifest(checkpoint.save_id)
        manifest = get_parsed(storage, f"{checkpoint.name}/{own}", Manifest.from_json)
        key = manifest.catalog
        catalog = get_parsed(
            storage,
            f"{checkpoint.name}/{names.catalog_file(key)}",
            lambda data: catalog_named(key, data),
        )
    except (ManifestInvalid, StorageKeyMissing, OfOneFile) as error:
        raise SegmentCorrupt(checkpoint.name, 0, storage.url, str(error)) from None
    return manifest, catalog, local


def local_checkpoint_of(settings: Settings, checkpoint: CheckpointStatus) -> LocalCheckpoint | None:
    """Return the checkpoint in this node's memory; None where it isn't there."""
    memory = job_memory(settings) if MEMORY in checkpoint.places else None
    found = [] if memory is None else memory.find(checkpoint.name)
    return next((local for local in found if local.manifest.save_id == checkpoint.save_id), None)


# -- by the catalog --------------------------------------------------------------------------------


def _entries(
    catalog: Catalog, manifest: Manifest
) -> tuple[list[Tensor], list[ByteItem], dict[str, Location]]:
    """Return tensors, byte items, and where these lie."""
    offsets, sizes = _extents_of_rows(catalog, manifest)
    locations: dict[str, Location] = {}
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
            tensors.append(
                Tensor(
                    name=catalog.names[name],
                    dtype=dtype,
                    shape=tuple(size[:dimensions]),
                    shards=stop - start,
                    nbytes=nbytes,
                )
            )
        elif kind == BYTES:
            items.append(ByteItem(catalog.names[name], nbytes))
            if nbytes:
                rank = int(catalog.ranks[catalog.writer[start]])
                file = names.segment_file(rank, manifest.save_id)
                locations[catalog.names[name]] = file, int(offsets[start]), int(sizes[start])
    return tensors, items, locations


def _extents_of_rows(catalog: Catalog, manifest: Manifest) -> tuple[Ints, Ints]:
    """Return each row's offset and bytes: its payload, or its whole item where that has none. A row
    that no rank has written has 0 bytes.
    """
    offsets, found = np.zeros((2, len(catalog.writer)), np.int64)
    written = np.flatnonzero(catalog.writer >= 0)
    items = LayoutItems(catalog)
    placed = catalog.writer[written], catalog.number[written]
    numbers = items.find(*placed)
    firsts, lengths, payload_offsets, payload_nbytes = items.columns
    offsets[written] = np.where(payload_offsets >= 0, payload_offsets, firsts)[numbers]
    found[written] = np.where(payload_offsets >= 0, payload_nbytes, lengths)[numbers]
    behind, tails = items.beyond(*placed), manifest.tails
    for row, number in zip(
        written[numbers < 0].tolist(), behind[numbers < 0].tolist(), strict=True
    ):
        tail: Sequence[tuple[int, int]] = tails.get(int(catalog.ranks[catalog.writer[row]]), ())
        offsets[row], found[row] = tail[number] if number < len(tail) else (0, 0)
    return offsets, found


def _judged(
    items: Sequence[ByteItem],
    locations: Mapping[str, Location],
    storage: Storage | None,
    name: str,
    stored: Mapping[str, int],
    local: LocalCheckpoint | None = None,
) -> list[ByteItem]:
    """Return the items with what a load refuses of them, as far as they can be read here."""

    def read(file: str, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        if local is not None:
            with (
                suppress(OSError),
                open(open_file(local.segment_path(file)), "rb", buffering=0) as stream,
            ):
                return os.pread(stream.fileno(), stop - start, start)
        if storage is not None and stored.get(file, 0) >= stop:
            with suppress(OfOneFile, StorageKeyMissing):
                storage.read_into(f"{name}/{file}", start, [memoryview(data)])
                return bytes(data)
        return b""

    refused = _refusals_of(locations, read)
    return [replace(one, refused=refused.get(one.name, "")) for one in items]


# -- what a load refuses -------------------------------------------------------------------------


def _refusals_of(
    locations: Mapping[str, Location], read: Callable[[str, int, int], bytes]
) -> dict[str, str]:
    """Return by name why a load refuses an item; not of items that `read` returns no bytes of."""
    by_file: dict[str, dict[str, tuple[int, int]]] = {}
    left = _MOST_NBYTES
    for name, (file, offset, nbytes) in locations.items():
        if nbytes <= left:
            left -= nbytes
            by_file.setdefault(file, {})[name] = offset, offset + nbytes
    found: dict[str, str] = {}
    for file, items in by_file.items():
        waiting = deque(sorted((low, high, name) for name, (low, high) in items.items()))
        for start, stop in merged(items.values()):
            data = read(file, start, stop)
            while waiting and waiting[0][0] < stop:
                low, high, name = waiting.popleft()
                if start <= low and len(data) == stop - start:
                    found[name] = _why_refused(data[low - start : high - start])
    return {name: why for name, why in found.items() if why}


def _why_refused(stream: bytes) -> str:
    if _is_plain(stream):
        return ""
    # Imported here because it takes seconds.
    from dcp_mem.format.saved_streams import is_whole, read_stream, why_refused

    try:
        read_stream(io.BytesIO(stream), weights_only=True, map_location="cpu")
    except Exception as error:
        return why_refused(error) if is_whole(stream) else ""
    return ""


def _is_plain(stream: bytes) -> bool:
    with suppress(Exception), zipfile.ZipFile(io.BytesIO(stream)) as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        opcodes = pickletools.genops(archive.read(pickled))
        return all(_PLAIN.fullmatch(opcode.name) for opcode, _, _ in opcodes)
    return False


# -- by DCP's metadata -----------------------------------------------------------------------------


def _foreign(storage: Storage, checkpoint: CheckpointStatus, stored: dict[str, int]) -> Contents:
    # Imported here because it takes seconds, and our own checkpoints are shown without torch.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dcp_mem.format.metadata import read_metadata

    metadata = read_metadata(
        storage.get(f"{checkpoint.name}/{names.metadata_file(checkpoint.scope)}")
    )
    lengths, locations = dict[str, int](), dict[str, Location]()
    for index, info in (metadata.storage_data or {}).items():
        lengths[index.fqn] = lengths.get(index.fqn, 0) + info.length
        locations[index.fqn] = info.relative_path, info.offset, info.length
    tensors, items = [], []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            nbytes = dtype.itemsize * sum(chunk.sizes.numel() for chunk in entry.chunks)
            shape = tuple(entry.size)
            tensors.append(
                Tensor(
                    name=name,
                    dtype=str(dtype).removeprefix("torch."),
                    shape=shape,
                    shards=len(entry.chunks),
                    nbytes=nbytes,
                )
            )
        else:
            items.append(ByteItem(name, lengths.get(name, 0)))
    bytes_at = {one.name: locations[one.name] for one in items if one.name in locations}
    items = _judged(items, bytes_at, storage, checkpoint.name, stored)
    files = sorted({info.relative_path for info in (metadata.storage_data or {}).values()})
    segments = [
        SegmentFile(
            file=file,
            rank=rank,
            node="",
            nbytes=stored.get(file, 0),
            places=(STORAGE,) if file in stored else (),
        )
        for rank, file in enumerate(files)
    ]
    return Contents(
        tensors=tuple(tensors), items=tuple(items), segments=tuple(segments), manifests=()
    )
