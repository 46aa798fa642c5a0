"""Make a Hugging Face directory of a checkpoint, shard by shard, on a file system or object store.

Invariants:

- A directory without an index isn't an export. The index is put last; on file systems the whole
  directory gets its name after that.
- No reader gets a mix of two saves. Where something lies under the name already, and on object
  stores, the files' names hold the export's token, so an index and its files belong together.
- What an attempt has written whole is there for the next one: the token stands for the save and for
  what is made of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_mem.common import faults, files
from dcp_mem.common.log import log
from dcp_mem.common.parallel import in_parallel
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError, DcpMemError, StorageKeyMissing
from dcp_mem.export import DTYPES as CONVERTIBLE
from dcp_mem.export import INDEX, HuggingFaceExport
from dcp_mem.format.checksums import checksum
from dcp_mem.memory.exports import ExportRecord
from dcp_mem.operations.reading import Reading, open_reading
from dcp_mem.operations.safetensors_file import (
    Chosen,
    FileLayout,
    chosen_tensors,
    index_json,
    layout_of,
    shard_files,
    tensors_in,
)
from dcp_mem.storage import Storage, part_count

_READ_NBYTES = 256 << 20
_AT_ONCE = 4
_ABANDONED_SECONDS = 86_400.0
_PART = re.compile(r"\..+-[0-9a-f]{8}\.part")
_OWN_SHARD = re.compile(r"model-([0-9a-f]{8})-\d{5}-of-\d{5}\.safetensors")
_MOST_ENTRIES = 8


Wait = Callable[[int], None]
"""Waits while a flush is under way, and until so many bytes may be sent."""


def make_directory(
    settings: Settings,
    checkpoint: ExportRecord,
    export: HuggingFaceExport,
    storage: Storage,
    wait: Wait,
) -> str:
    """Make the directory of one checkpoint; return its path or URL.

    1. Return if it is there already.
    2. Choose tensors, names and dtypes, and cut them into shards.
    3. Put the files that were handed in.
    4. Read, convert and put each shard that isn't there yet.
    5. Put the index, and show the directory.
    6. Delete exports that aren't kept any more.
    """
    token = _token(checkpoint.save_id, export)
    if storage.url.startswith("/"):
        os.makedirs(storage.url, exist_ok=True)  # as the umask asks for
    kind = _Directory if storage.url.startswith("/") else _Place
    place = kind(storage, checkpoint.name, token)
    before = place.index()
    if before is not None and before.get("token") == token:
        return place.target
    with open_reading(settings, checkpoint.name, checkpoint.save_id) as reading:
        tensors = _tensors(reading, checkpoint.name, export)
        wait(0)
        for path in export.files:
            storage.put(f"{place.prefix}/{os.path.basename(path)}", Path(path).read_bytes())
        weight_map = _put_shards(place, reading, tensors, export.shard_nbytes, wait)
    faults.point("export.shards")
    nbytes = sum(one.made.nbytes for one in tensors.values())
    facts = {
        "job": settings.job,
        "checkpoint": checkpoint.name,
        "save_id": checkpoint.save_id,
        "step": checkpoint.step,
        "number": [checkpoint.generation, checkpoint.count],
        "token": token,
        "nbytes": nbytes,
    }
    index = index_json(weight_map, nbytes, dcp_mem=facts)
    place.show(index, {INDEX, *weight_map.values(), *map(os.path.basename, export.files)})
    faults.point("export.shown")
    if export.keep is not None:
        _delete_older(storage, settings.job, export.keep)
    return place.target


def _token(save_id: str, export: HuggingFaceExport) -> str:
    """Return what stands for a save and for what is made of it: 8 hex digits."""
    names = export.names
    table: object = sorted(names.items()) if isinstance(names, Mapping) else None
    if callable(names):
        table = names.__module__, names.__qualname__
    made_of = (save_id, export.part, table, export.dtype, export.shard_nbytes, export.files)
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]


# -- what is exported ------------------------------------------------------------------------------


def _tensors(reading: Reading, checkpoint: str, export: HuggingFaceExport) -> dict[str, Chosen]:
    """Return the tensors to export, by their new names. Raises ConfigError."""
    prefix, names = f"{export.part}." if export.part else "", export.names or {}

    def named(source: str) -> str | None:
        if not source.startswith(prefix):
            return None
        short = source.removeprefix(prefix)
        name: object = names(short) if callable(names) else names.get(short, short)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"names: {source} is to become {name!r}; give a text or None")
        return name

    def converted(dtype: torch.dtype) -> torch.dtype:
        if export.dtype is None or str(dtype).removeprefix("torch.") not in CONVERTIBLE:
            return dtype
        found: torch.dtype = getattr(torch, export.dtype)
        return found

    tensors = chosen_tensors(reading.entries, named, converted)
    if not tensors:
        raise ConfigError(
            f"{checkpoint} has no tensor below part={export.part!r}; it has "
            f"{_entries(reading) or 'none at all'}"
        )
    return tensors


def _entries(reading: Reading) -> str:
    """Return the first entries that tensors lie below, for people."""
    names = [name for name, entry in reading.entries if isinstance(entry, TensorStorageMetadata)]
    tops = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(list(tops)[:_MOST_ENTRIES]) + (", …" if len(tops) > _MOST_ENTRIES else "")


# -- shards ----------------------------------------------------------------------------------------


def _put_shards(
    place: _Place,
    reading: Reading,
    tensors: Mapping[str, Chosen],
    shard_nbytes: int,
    wait: Wait,
) -> dict[str, str]:
    """Put all shards that aren't there yet; return the file of each tensor. One buffer, as long as
    the longest file, takes one shard after the other.
    """
    sizes = {name: one.made.nbytes for name, one in tensors.items()}
    files = shard_files(sizes, shard_nbytes, place.stem)
    shapes = [{name: tensors[name].made for name in shard} for shard in files.values()]
    layouts = [layout_of(shape) for shape in shapes]
    there = place.sizes()
    buffer = torch.empty(0, dtype=torch.uint8)
    for file, shape, layout in zip(files, shapes, layouts, strict=True):
        if there.get(file) == layout.nbytes:
            continue
        if not len(buffer):
            buffer = torch.empty(max(one.nbytes for one in layouts), dtype=torch.uint8)
        _fill(buffer, layout, reading, {name: tensors[name] for name in shape}, wait)
        _put(place.storage, f"{place.prefix}/{file}", buffer[: layout.nbytes], wait)
        faults.point("export.shard")
    return {name: file for file, shard in files.items() for name in shard}


def _fill(
    buffer: torch.Tensor,
    layout: FileLayout,
    reading: Reading,
    tensors: Mapping[str, Chosen],
    wait: Wait,
) -> None:
    """Read a shard's tensors into the buffer: straight, or through others where they convert."""
    buffer[: len(layout.head)] = torch.frombuffer(bytearray(layout.head), dtype=torch.uint8)
    made = tensors_in(buffer, layout, {name: one.made for name, one in tensors.items()})
    for batch in _batches(tensors):
        wait(0)
        read = {
            one.source: made[name]
            if one.stored == one.made
            else torch.empty(one.stored.size, dtype=one.stored.dtype)
            for name, one in batch.items()
        }
        reading.load(dict(read))
        for name, one in batch.items():
            if one.stored != one.made:
                made[name].copy_(read.pop(one.source))


def _batches(tensors: Mapping[str, Chosen]) -> Iterator[dict[str, Chosen]]:
    """Yield the tensors, as many at once as may be read without a pause for flushes."""
    batch, nbytes = dict[str, Chosen](), 0
    for name, one in tensors.items():
        if batch and nbytes + one.stored.nbytes > _READ_NBYTES:
            yield batch
            batch, nbytes = {}, 0
        batch[name] = one
        nbytes += one.stored.nbytes
    yield batch


def _put(storage: Storage, key: str, data: torch.Tensor, wait: Wait) -> None:
    view = memoryview(data.numpy().data)
    upload = storage.upload(key, len(view))
    try:

        def put(number: int) -> None:
            part = view[number * upload.part_nbytes :][: upload.part_nbytes]
            wait(len(part))
            upload.put_part(number, part, checksum(part))

        numbers = range(part_count(len(view), upload.part_nbytes))
        at_once = 1 if upload.in_order else _AT_ONCE
        for _ in in_parallel(put, numbers, at_once=at_once, name="dcp_mem-export"):
            pass
        upload.finish()
    finally:
        upload.close()


# -- where it is made ------------------------------------------------------------------------------


class _Place:
    """Where one export is made: a prefix of an object store, whose index is put last.

    Files are put under the key `prefix`; names of shards begin with `stem`.
    """

    def __init__(self, storage: Storage, name: str, token: str) -> None:
        self.storage, self.name, self.prefix = storage, name, name
        self.target = os.path.join(storage.url, name)
        self.stem = f"model-{token}"

    def index(self) -> dict[str, Any] | None:
        """Return what the index of the directory says of its export; None where there is none."""
        found = _index(self.storage, self.name)
        if found is None and self._is_taken():
            raise _not_ours(self.target)
        return found

    def _is_taken(self) -> bool:
        """Return whether something lies here that no export has made."""
        return any(not _OWN_SHARD.fullmatch(one) for one in self._shards())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file that this export's attempts have put so far."""
        return _sizes(self.storage, self.prefix)

    def show(self, index: bytes, belonging: set[str]) -> None:
        """Put the index, and have readers see the directory; what doesn't belong to it goes."""
        self.storage.put(f"{self.prefix}/{INDEX}", index)
        for file in self._shards():
            if file not in belonging:
                self.storage.delete(f"{self.prefix}/{file}")

    def _shards(self) -> list[str]:
        return [one for one in self.sizes() if one.endswith(".safetensors")]


class _Directory(_Place):
    """A directory of a file system: made under a hidden name beside its own."""

    def __init__(self, storage: Storage, name: str, token: str) -> None:
        super().__init__(storage, name, token)
        self.prefix = f".{name}-{token}.part"
        if not os.path.lexists(self.target):
            self.stem = "model"

    def _is_taken(self) -> bool:
        return os.path.lexists(self.target)

    def show(self, index: bytes, belonging: set[str]) -> None:
        for file in self.sizes().keys() - belonging:
            self.storage.delete(f"{self.prefix}/{file}")
        self.storage.put(f"{self.prefix}/{INDEX}", index)
        made = os.path.join(self.storage.url, self.prefix)
        if os.path.lexists(self.target):
            try:
                files.swap_names(made, self.target)
            except OSError:  # a file system that can't, such as NFS
                aside = _hide(self.storage, self.name)
                os.rename(made, self.target)
                made = aside
            shutil.rmtree(made, ignore_errors=True)
        else:
            os.rename(made, self.target)
        files.sync_directory(self.storage.url)
        for entry in self.storage.ls(""):  # what attempts have left that nobody goes on with
            is_old = 0.0 < entry.modified < time.time() - _ABANDONED_SECONDS
            if entry.is_directory and is_old and _PART.fullmatch(entry.name):
                shutil.rmtree(os.path.join(self.storage.url, entry.name), ignore_errors=True)


def _sizes(storage: Storage, prefix: str) -> dict[str, int]:
    return {one.name: one.nbytes for one in storage.ls(prefix) if not one.is_directory}


def _index(storage: Storage, name: str) -> dict[str, Any] | None:
    """Return what the index under a name says of its export; None where there is no index."""
    try:
        index = json.loads(storage.get(f"{name}/{INDEX}"))
        found = index["metadata"]["dcp_mem"]
        if not isinstance(found, dict):
            raise TypeError
    except StorageKeyMissing:
        return None
    except (ValueError, KeyError, TypeError):
        raise _not_ours(f"{storage.url}/{name}") from None
    return found


def _not_ours(target: str) -> ConfigError:
    return ConfigError(
        f"there is something at {target} that no export has made: move it, or export elsewhere"
    )


# -- which exports stay ----------------------------------------------------------------------------


def _delete_older(storage: Storage, job: str, keep: int) -> None:
    """Delete all but the newest exports of a job; a failure is logged, the next one tries again."""
    try:
        own = [
            (tuple(found.get("number", ())), entry.name)
            for entry in storage.ls("")
            if entry.is_directory and not entry.name.startswith(".")
            if (found := _index_of_any(storage, entry.name)).get("job") == job
        ]
        for _, name in sorted(own)[:-keep]:
            _delete(storage, name)
            log.info("the export %s/%s is deleted: newer ones are kept", storage.url, name)
    except (DcpMemError, OSError) as error:
        log.warning("older exports in %s stay for now: %s", storage.url, error)


def _index_of_any(storage: Storage, name: str) -> dict[str, Any]:
    with contextlib.suppress(ConfigError):
        return _index(storage, name) or {}
    return {}


def _delete(storage: Storage, name: str) -> None:
    """Delete an export; from the first moment on it isn't one any more."""
    if storage.url.startswith("/"):
        shutil.rmtree(_hide(storage, name))
        return
    storage.delete(f"{name}/{INDEX}")
    for file in _sizes(storage, name):
        storage.delete(f"{name}/{file}")


def _hide(storage: Storage, name: str) -> str:
    """Take its name from a directory; return the path that it has then."""
    hidden = os.path.join(storage.url, f".{name}-00000000.part")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(os.path.join(storage.url, name), hidden)
    return hidden
