"""Write checkpoints out for other programs, with one process and without a process group.

The forms: a DCP directory elsewhere, one file of torch's, safetensors, or the files that were
saved. Tensors are read straight into the mapped pages of the new file, which the system writes back
as needed: only what is on its way takes memory of the process.
"""

from __future__ import annotations

import functools
import mmap
import operator
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_mem.common.files import sync_directory
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import STORAGE, CheckpointStatus
from dcp_mem.config import Settings, checkpoint_name, root_url
from dcp_mem.errors import ConfigError, DcpMemError, SegmentCorrupt
from dcp_mem.export import INDEX
from dcp_mem.flushing.commit import AlreadyFlushing, Evicted, NotYet, Superseded, flush
from dcp_mem.flushing.parts import FlushJob
from dcp_mem.format import names
from dcp_mem.format.checksums import BlockChecksums, blocks_of, checksum
from dcp_mem.format.manifest import ItemTable
from dcp_mem.loading.sources.stored import StorageSource
from dcp_mem.memory.root import node_id
from dcp_mem.operations.contents import contents_of, local_checkpoint_of
from dcp_mem.operations.reading import open_reading
from dcp_mem.operations.safetensors_file import (
    SHARD_NBYTES,
    chosen_tensors,
    create_file,
    index_json,
    reserve,
    shard_files,
)
from dcp_mem.operations.streams import OpenStreams
from dcp_mem.operations.verify import Observer
from dcp_mem.planning.whole_checkpoint import blank_tensors, nested, paths_of
from dcp_mem.storage import Storage, part_count
from dcp_mem.storage.leases import being_read
from dcp_mem.storage.routes import open_storage


@value_class
class Exported:
    target: str
    files: tuple[str, ...]  # paths or keys, in the order in which they were written
    nbytes: int


# -- as a DCP directory ----------------------------------------------------------------------------


def export_dcp(
    settings: Settings,
    storage: Storage | None,
    checkpoint: CheckpointStatus,
    target: str,
    target_options: Mapping[str, Any],
    observer: Observer,
) -> Exported:
    """Copy a checkpoint to a directory or URL; torch's readers load it there, and ours verify it.
    `.metadata` is written last. What is read from storage is compared with its checksums on the
    way.
    """
    target = target if "://" in target else os.path.abspath(os.path.expanduser(target))
    parent, _, name = target.rstrip("/").rpartition("/")
    url = root_url(parent or "/") if not parent.endswith(":/") else None
    if url is None:
        raise ConfigError(
            f"{target!r} is no place for a checkpoint: give a directory, or a URL below a bucket "
            f"or container"
        )
    name = checkpoint_name(url, name)
    destination = open_storage(url, target_options)
    found = {(entry.name, entry.modified) for entry in destination.ls(name)}
    if names.metadata_file(checkpoint.scope) in {file for file, _ in found}:
        raise ConfigError(f"there is a checkpoint at {target} already: give another target")
    if STORAGE in checkpoint.places and storage is not None:
        with being_read(storage, checkpoint.name):
            _copy(storage, checkpoint, destination, name, observer)
    else:
        _flush_to(settings, checkpoint, destination, name)
    files = [
        (f"{name}/{entry.name}", entry.nbytes)
        for entry in destination.ls(name)
        if not entry.is_directory and (entry.name, entry.modified) not in found
    ]
    return Exported(target, tuple(file for file, _ in files), sum(nbytes for _, nbytes in files))


def _flush_to(
    settings: Settings, checkpoint: CheckpointStatus, destination: Storage, name: str
) -> None:
    local = local_checkpoint_of(settings, checkpoint)
    if local is None:
        raise DcpMemError(f"{checkpoint.name} has just left memory")
    if len(local.manifest.nodes) > 1:
        raise DcpMemError(
            f"{checkpoint.name} lies on several nodes: bring it to storage first (dcp-mem flush "
            f"--all), then export it"
        )
    local = replace(local, manifest=replace(local.manifest, name=name))
    try:
        node = node_id(settings.memory_root)
        flush(
            FlushJob(
                checkpoint=local,
                node=node,
                storage=destination,
                overwrite=False,
                takes_rejected=True,  # who exports it has named it
            )
        )
    except (AlreadyFlushing, NotYet, Evicted, Superseded) as error:
        raise DcpMemError(
            f"{checkpoint.name} can't be exported from memory just now: {error}"
        ) from None


def _copy(
    storage: Storage,
    checkpoint: CheckpointStatus,
    destination: Storage,
    name: str,
    observer: Observer,
) -> None:
    files = {
        entry.name: entry.nbytes for entry in storage.ls(checkpoint.name) if not entry.is_directory
    }
    own = {
        f"{names.OWN}/{entry.name}": entry.nbytes
        for entry in storage.ls(f"{checkpoint.name}/{names.OWN}")
    }
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
            destination.put(f"{name}/{file}", replace(manifest, name=name).to_json())
        else:
            _copy_file(
                storage,
                f"{checkpoint.name}/{file}",
                nbytes,
                destination,
                f"{name}/{file}",
                tables.get(file),
                observer,
            )
    description = storage.get(f"{checkpoint.name}/{metadata}")
    if checkpoint.save_id.encode() not in description:
        raise DcpMemError(
            f"{checkpoint.name} was saved anew while it was copied: nothing is at the target that "
            f"could be loaded; export it again"
        )
    destination.put(f"{name}/{metadata}", description)


def _copy_file(
    storage: Storage,
    key: str,
    nbytes: int,
    destination: Storage,
    to: str,
    table: ItemTable | None,
    observer: Observer,
) -> None:
    checksums = None if table is None else BlockChecksums(blocks_of(table.offsets, table.lengths))
    upload = destination.upload(to, nbytes)
    try:
        buffer = memoryview(bytearray(min(upload.part_nbytes, nbytes)))
        for number in range(part_count(nbytes, upload.part_nbytes)):
            start = number * upload.part_nbytes
            part = buffer[: min(upload.part_nbytes, nbytes - start)]
            if storage.read_into(key, start, [part]) < len(part):
                raise SegmentCorrupt(
                    key.partition("/")[0], 0, storage.url, f"{key} ends before {nbytes} bytes"
                )
            crc = checksum(part) if checksums is None else checksums.add(start, part)
            upload.put_part(number, part, crc)
            observer.add(len(part))
        if (
            checksums is not None
            and table is not None
            and (checksums.result() != table.crc32c).any()
        ):
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


# -- as torch's and safetensors' files -------------------------------------------------------------


def export_torch(
    settings: Settings, checkpoint: CheckpointStatus, target: str, *, trust: bool = False
) -> Exported:
    """Write one file for torch.load, nested as the state dict was."""
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    with (
        open_reading(settings, checkpoint.name, checkpoint.save_id) as reading,
        _new_file(target) as path,
    ):
        items: dict[str, Any] = {
            name: None
            for name, entry in reading.entries
            if not isinstance(entry, TensorStorageMetadata)
        }
        reading.load(items, trust=trust)
        with FakeTensorMode():
            fakes = blank_tensors(reading.metadata)
        flat = {name: fakes.get(name, items.get(name)) for name, _ in reading.entries}
        paths = paths_of(reading.metadata)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(nested(reading.metadata, flat), path)
        reserve(path)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            mapped: Any = torch.load(path, mmap=True, weights_only=False)
        reading.load(
            {name: functools.reduce(operator.getitem, paths[name], mapped) for name in fakes},
            trust=trust,
        )
    return Exported(target, (target,), os.path.getsize(target))


def export_safetensors(
    settings: Settings, checkpoint: CheckpointStatus, target: str, *, prefix: str = ""
) -> Exported:
    """Write a directory of safetensors files and their index for Hugging Face; tensors only. Only
    tensors whose names begin with the prefix are written; the names lose it. The index is last.
    """

    def without_prefix(name: str) -> str | None:
        return name.removeprefix(prefix) or None if name.startswith(prefix) else None

    if os.path.isdir(target) and os.listdir(target):
        raise ConfigError(f"{target} is not empty: give another directory")
    with open_reading(settings, checkpoint.name, checkpoint.save_id) as reading:
        tensors = chosen_tensors(reading.entries, without_prefix)
        if not tensors:
            raise ConfigError(f"{checkpoint.name} has no tensor whose name begins with {prefix!r}")
        sizes = {name: one.made.nbytes for name, one in tensors.items()}
        os.makedirs(target, exist_ok=True)
        files, weight_map = [], dict[str, str]()
        for file, of_shard in shard_files(sizes, SHARD_NBYTES, "model").items():
            with _new_file(os.path.join(target, file)) as path:
                made = create_file(path, {name: tensors[name].made for name in of_shard})
                reading.load({prefix + name: tensor for name, tensor in made.items()})
            weight_map.update(dict.fromkeys(of_shard, file))
            files.append(os.path.join(target, file))
    total = sum(sizes.values())
    files.append(os.path.join(target, INDEX))
    with _new_file(files[-1]) as path, open(path, "wb") as stream:
        stream.write(index_json(weight_map, total))
    return Exported(target, tuple(files), total)


def export_files(
    settings: Settings, storage: Storage | None, checkpoint: CheckpointStatus, target: str
) -> Exported:
    """Write the files that were saved through Nebula's API or by DeepSpeed, as torch.save had them.
    Of a name that several ranks have saved, each rank's file is called name@rank.
    """
    storage = storage if STORAGE in checkpoint.places else None
    found = contents_of(settings, storage, checkpoint)
    if found.tensors or not found.items:
        raise ConfigError(
            f"{checkpoint.name} has tensors, not files: choose --format dcp, torch or safetensors"
        )
    root, files, total = os.path.abspath(os.path.expanduser(target)), list[str](), 0
    paths = {item.name: os.path.abspath(os.path.join(root, item.name)) for item in found.items}
    for name, path in paths.items():
        if os.path.commonpath([root, path]) != root or path == root:
            raise ConfigError(f"{checkpoint.name} has a file {name!r}, which isn't below {target}")
    with OpenStreams(settings, storage, checkpoint) as streams:
        for name, path in paths.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            data = streams.whole(name)
            with _new_file(path) as part, open(part, "wb") as file:
                file.write(data)
            total += data.nbytes
            files.append(path)
    return Exported(target, tuple(files), total)


@contextmanager
def _new_file(path: str) -> Iterator[str]:
    """Yield where to write a file; it gets its name once it is whole."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already: give another target")
    part = f"{path}.{uuid.uuid4().hex[:8]}.part"
    try:
        yield part
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())  # what a full disk or a quota refuses late shows here
        os.rename(part, path)
        sync_directory(os.path.dirname(os.path.abspath(path)))
    finally:
        if os.path.exists(part):
            os.unlink(part)
