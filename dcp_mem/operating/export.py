"""Checkpoints written out for other programs: as a DCP directory elsewhere, as one file of torch's, as safetensors, or as the
files that they were saved as.

One process does it, without a process group. Tensors go from the checkpoint straight into the mapped pages of the new file, which
the system writes back as it needs them: only what is on its way takes memory of the process.
"""

from __future__ import annotations

import functools
import json
import mmap
import operator
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_mem.api import load
from dcp_mem.config import Settings, checkpoint_name, root_url
from dcp_mem.errors import ConfigError, DcpMemError, SegmentCorrupt
from dcp_mem.flushing.flush import Evicted, NotYet, flush
from dcp_mem.flushing.parts import FlushJob
from dcp_mem.format import names
from dcp_mem.format.checksums import BlockChecksums, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.root import node_id
from dcp_mem.operating.contents import contents, held_of
from dcp_mem.operating.inventory import STORAGE, Checkpoint
from dcp_mem.operating.streams import open_stream
from dcp_mem.operating.verify import Observer
from dcp_mem.planning.whole import blank_tensors, nested, paths_of
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.sources.stored import StorageSource
from dcp_mem.storage import Storage, part_count
from dcp_mem.storage.routes import open_storage

SHARD_NBYTES = 5_000_000_000
"""Bytes of a safetensors file, as Hugging Face cuts them."""
_ALIGNMENT = 8
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. files: by path or key, in the order in which they came to be."""

    target: str
    files: tuple[str, ...]
    nbytes: int


# -- as a DCP directory ----------------------------------------------------------------------------------------------------


def export_dcp(
    settings: Settings,
    storage: Storage | None,
    checkpoint: Checkpoint,
    target: str,
    target_options: Mapping[str, Any],
    observer: Observer,
) -> Exported:
    """Copy a checkpoint to a directory or URL of its own, `.metadata` last; torch's readers load it there, and ours verify it.

    What is read from storage is held against its checksums on the way. Raises ConfigError where there is a checkpoint already,
    SegmentCorrupt (then there is no `.metadata`), StorageUnavailable, StorageRefused.
    """
    target = target if "://" in target else os.path.abspath(os.path.expanduser(target))
    parent, _, name = target.rstrip("/").rpartition("/")
    url = root_url(parent or "/") if not parent.endswith(":/") else None
    if url is None:
        raise ConfigError(
            f"{target!r} is no place for a checkpoint: give a directory, or a URL below a bucket or container"
        )
    name = checkpoint_name(url, name)
    there = open_storage(url, target_options)
    if any(entry.name == names.metadata_file(checkpoint.scope) for entry in there.ls(name)):
        raise ConfigError(f"there is a checkpoint at {target} already: give another target")
    if STORAGE in checkpoint.places and storage is not None:
        _copy(storage, checkpoint, there, name, observer)
    else:
        _flush_to(settings, checkpoint, there, name)
    files = [(f"{name}/{entry.name}", entry.nbytes) for entry in there.ls(name) if not entry.is_directory]
    return Exported(target, tuple(file for file, _ in files), sum(nbytes for _, nbytes in files))


def _flush_to(settings: Settings, checkpoint: Checkpoint, there: Storage, name: str) -> None:
    held = held_of(settings, checkpoint)
    if held is None:
        raise DcpMemError(f"{checkpoint.name} has just left memory")
    if len(held.manifest.nodes) > 1:
        raise DcpMemError(
            f"{checkpoint.name} lies on several nodes: bring it to storage first (dcp-mem flush --all), then export it"
        )
    held = replace(held, manifest=replace(held.manifest, name=name))
    try:
        flush(FlushJob(held, node_id(settings.memory_root), there, overwrite=False))
    except (NotYet, Evicted) as error:
        raise DcpMemError(f"{checkpoint.name} can't be exported from memory just now: {error}") from None


def _copy(storage: Storage, checkpoint: Checkpoint, there: Storage, name: str, observer: Observer) -> None:
    files = {entry.name: entry.nbytes for entry in storage.ls(checkpoint.name) if not entry.is_directory}
    own = {f"{names.OWN}/{entry.name}": entry.nbytes for entry in storage.ls(f"{checkpoint.name}/{names.OWN}")}
    metadata = names.metadata_file(checkpoint.scope)
    tables: Mapping[str, ItemTable | None] = {}
    manifest = None
    if checkpoint.save_id:
        source = StorageSource(storage, checkpoint.name, checkpoint.save_id, checkpoint.scope)
        manifest = source.describe().manifest
        assert manifest is not None
        tables = source.tables([segment.file for segment in manifest.segments])
        files = {segment.file: segment.nbytes for segment in manifest.segments}
        kept = (checkpoint.save_id, manifest.catalog)
        files |= {file: nbytes for file, nbytes in own.items() if any(one in file for one in kept)}
    observer.expect(f"copying {checkpoint.name}", sum(files.values()))
    for file, nbytes in files.items():
        if file == metadata:
            continue
        if manifest is not None and file == names.stored_manifest(checkpoint.save_id):
            there.put(f"{name}/{file}", replace(manifest, name=name).to_json())
        else:
            _copy_file(
                storage, f"{checkpoint.name}/{file}", nbytes, there, f"{name}/{file}", tables.get(file), observer
            )
    there.put(f"{name}/{metadata}", storage.get(f"{checkpoint.name}/{metadata}"))


def _copy_file(
    storage: Storage, key: str, nbytes: int, there: Storage, to: str, table: ItemTable | None, observer: Observer
) -> None:
    checksums = None if table is None else BlockChecksums(blocks_of(table.offsets, table.lengths))
    upload = there.upload(to, nbytes)
    try:
        buffer = memoryview(bytearray(min(upload.part_nbytes, nbytes)))
        for number in range(part_count(nbytes, upload.part_nbytes)):
            start = number * upload.part_nbytes
            part = buffer[: min(upload.part_nbytes, nbytes - start)]
            if storage.read_into(key, start, [part]) < len(part):
                raise SegmentCorrupt(key.partition("/")[0], 0, storage.url, f"{key} ends before {nbytes} bytes")
            crc = checksum(part) if checksums is None else checksums.add(start, part)
            upload.put_part(number, part, crc)
            observer.add(len(part))
        if checksums is not None and table is not None and (checksums.result() != table.crc32c).any():
            file = key.rpartition("/")[2]
            raise SegmentCorrupt(
                key.partition("/")[0],
                names.rank_of(file),
                storage.url,
                "other bytes than were saved (dcp-mem verify says which)",
            )
        upload.finish()
    finally:
        upload.close()


# -- as torch's and safetensors' files -----------------------------------------------------------------------------------------


def export_torch(settings: Settings, checkpoint: Checkpoint, target: str, *, trust: bool = False) -> Exported:
    """Write one file that torch.load reads, nested as the state dict was.

    trust: unpickle byte items freely, as torch does. Raises ConfigError where the file is there already, UntrustedObject.
    """
    with _reading(settings, checkpoint) as reading, _new_file(target) as path:
        items: dict[str, Any] = {name: None for name, entry in reading.entries if not _is_tensor(entry)}
        reading.load(items, trust=trust)
        with FakeTensorMode():
            fakes = blank_tensors(reading.metadata)
        flat = {name: fakes.get(name, items.get(name)) for name, _ in reading.entries}
        paths = paths_of(reading.metadata)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(nested(reading.metadata, flat), path)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped: Any = torch.load(path, mmap=True, weights_only=False)
        reading.load({name: functools.reduce(operator.getitem, paths[name], mapped) for name in fakes}, trust=trust)
    return Exported(target, (target,), os.path.getsize(target))


def export_safetensors(
    settings: Settings, checkpoint: Checkpoint, target: str, *, prefix: str = "", shard_nbytes: int = SHARD_NBYTES
) -> Exported:
    """Write a directory of model-0000X-of-0000Y.safetensors and their index, as Hugging Face reads it; tensors only.

    prefix: only names that begin with it, which is taken off. The index comes last. Raises ConfigError where the directory has
    anything in it already, or the format lacks a dtype.
    """
    if os.path.isdir(target) and os.listdir(target):
        raise ConfigError(f"{target} is not empty: give another directory")
    with _reading(settings, checkpoint) as reading:
        tensors = {
            name: entry
            for name, entry in reading.entries
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix) and name != prefix
        }
        if not tensors:
            raise ConfigError(f"{checkpoint.name} has no tensor whose name begins with {prefix!r}")
        for name, entry in tensors.items():
            if entry.properties.dtype not in _SAFETENSORS:
                raise ConfigError(f"{name} is {entry.properties.dtype}, which safetensors don't have")
        shards = list(_shards(tensors, shard_nbytes))
        os.makedirs(target, exist_ok=True)
        files, index = [], dict[str, str]()
        for number, of_shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            with _new_file(os.path.join(target, file)) as path:
                reading.load(_mapped(path, {name: tensors[name] for name in of_shard}, prefix), trust=False)
            index.update((name.removeprefix(prefix), file) for name in of_shard)
            files.append(os.path.join(target, file))
    total = sum(map(_nbytes, tensors.values()))
    listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    with _new_file(os.path.join(target, "model.safetensors.index.json")) as path, open(path, "w") as stream:
        json.dump(listing, stream, indent=2)
    return Exported(target, (*files, os.path.join(target, "model.safetensors.index.json")), total)


def export_files(settings: Settings, storage: Storage | None, checkpoint: Checkpoint, target: str) -> Exported:
    """Write each file that was saved through Nebula's API, or by DeepSpeed, into a directory, as torch.save had written it.

    storage: the job's. Of one name that several ranks have saved, each rank's is called name@rank. All are held against their
    checksums. Raises ConfigError where the checkpoint has tensors, or a file is there already, SegmentCorrupt where it is damaged
    wherever it lies.
    """
    storage = storage if STORAGE in checkpoint.places else None
    found = contents(settings, storage, checkpoint)
    if found.tensors or not found.items:
        raise ConfigError(f"{checkpoint.name} has tensors, not files: choose --format dcp, torch or safetensors")
    root, files, total = os.path.abspath(os.path.expanduser(target)), list[str](), 0
    paths = {item.name: os.path.abspath(os.path.join(root, item.name)) for item in found.items}
    for name, path in paths.items():
        if os.path.commonpath([root, path]) != root or path == root:
            raise ConfigError(f"{checkpoint.name} has a file {name!r}, which isn't below {target}")
    for name, path in paths.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        pick = functools.partial(_if_there, name)
        with open_stream(settings, storage, checkpoint, pick, name) as data, _new_file(path) as part:
            with open(part, "wb") as stream:
                stream.write(data)
            total += data.nbytes
        files.append(path)
    return Exported(target, tuple(files), total)


def _if_there(name: str, there: Sequence[str]) -> str | None:
    return name if name in there else None


def _shards(tensors: Mapping[str, TensorStorageMetadata], most: int) -> Iterator[list[str]]:
    """Names in order, cut where a file would have more bytes than `most`."""
    shard, nbytes = list[str](), 0
    for name in sorted(tensors):
        if shard and nbytes + _nbytes(tensors[name]) > most:
            yield shard
            shard, nbytes = [], 0
        shard.append(name)
        nbytes += _nbytes(tensors[name])
    yield shard


def _mapped(path: str, tensors: Mapping[str, TensorStorageMetadata], prefix: str) -> dict[str, torch.Tensor]:
    """Make a safetensors file without values, and return its tensors, to be filled."""
    head, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), 0
    places: dict[str, tuple[int, int]] = {}
    for name in sorted(
        tensors, key=lambda one: (-tensors[one].properties.dtype.itemsize, one)
    ):  # so that all are aligned
        entry = tensors[name]
        places[name] = start, end = end, end + _nbytes(entry)
        described = {
            "dtype": _SAFETENSORS[entry.properties.dtype],
            "shape": list(entry.size),
            "data_offsets": [start, end],
        }
        head[name.removeprefix(prefix)] = described
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(stream.tell() + end)
        first = stream.tell()
    data = torch.from_file(path, shared=True, size=first + end, dtype=torch.uint8)[first:]
    return {
        name: data[start:stop].view(tensors[name].properties.dtype).view(tensors[name].size)
        for name, (start, stop) in places.items()
    }


def _nbytes(entry: TensorStorageMetadata) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize


def _is_tensor(entry: object) -> bool:
    return isinstance(entry, TensorStorageMetadata)


class _Reading:
    """A checkpoint that is loaded from several times."""

    def __init__(self, reader: MemoryStorageReader, name: str) -> None:
        self._reader, self._name = reader, name
        reader.reset(name)
        self.metadata: Metadata = reader.read_metadata()
        self.entries = list(self.metadata.state_dict_metadata.items())

    def load(self, state: dict[str, Any], *, trust: bool) -> None:
        if state:
            load(state, checkpoint_id=self._name, storage_reader=self._reader, no_dist=True, weights_only=not trust)


@contextmanager
def _reading(settings: Settings, checkpoint: Checkpoint) -> Iterator[_Reading]:
    reader = MemoryStorageReader(
        settings.url,
        memory=settings.memory_root,
        job=settings.job,
        storage_options=settings.storage_options,
        record=False,
    )
    with reader:
        yield _Reading(reader, checkpoint.name)


@contextmanager
def _new_file(path: str) -> Iterator[str]:
    """Where to write a file that gets its name when it is whole. Raises ConfigError where it is there already."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: give another target")
    part = f"{path}.{uuid.uuid4().hex[:8]}.part"
    try:
        yield part
        os.rename(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)
