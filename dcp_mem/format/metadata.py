"""DCP's own `.metadata`: made for stock readers, read without free unpickling.

The pickle of a checkpoint's metadata is the same from save to save but for the save id in its file names, as long as
the plan and the lengths of the byte items are. So it is made once, with a placeholder for the id, and rendered by
replacing bytes: pickling 20,000 tensors anew would cost a fifth of a second of every save. Where the items behind the
layout lie differs from save to save; so these numbers are pickled with eight bytes each, and put in place as well.
"""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
import random
import re
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from dcp_mem.errors import UntrustedMetadata
from dcp_mem.format.names import segment_file

DCP_VERSION = "1.0.0"
_NUMBER = struct.Struct("<q")
_NUMBERS = re.compile(b"(?=" + re.escape(pickle.LONG1 + bytes([_NUMBER.size])) + b"(.{8}))", re.DOTALL)
Extent = tuple[int, int]
"""(offset, length) of an item in its segment."""


@dataclass(frozen=True, slots=True)
class RankItems:
    """Where one rank's items lie in its segment: the indexes DCP knows them by, and their extents in bytes.

    fixed: how many of them, from the first on, lie in the same place in every save.
    """

    rank: int
    indexes: Sequence[MetadataIndex]
    extents: Sequence[Extent]
    fixed: int


@dataclass(frozen=True, slots=True)
class MetadataTemplate:
    """A pickled `Metadata` with placeholders for what differs from save to save.

    holes: (position, rank, number of the item in the rank's tail, 0 for its offset and 1 for its length).
    """

    data: bytes
    placeholder: bytes
    holes: Sequence[tuple[int, int, int, int]]

    def render(self, save_id: str, tails: Mapping[int, Sequence[Extent]]) -> bytes:
        """The bytes of `.metadata` for this save. tails: of each rank, where the items that aren't fixed lie."""
        data = bytearray(self.data)
        for position, rank, number, part in self.holes:
            _NUMBER.pack_into(data, position, tails[rank][number][part])
        return bytes(data).replace(self.placeholder, save_id.encode())


def make_template(metadata: Metadata, items: Sequence[RankItems]) -> MetadataTemplate:
    """Pickle `metadata` with the storage data of all ranks' items; the argument itself is left as it is."""
    while True:
        template = _try_template(metadata, items, uuid.uuid4().hex[:8])
        if template is not None:
            return template


def _try_template(metadata: Metadata, items: Sequence[RankItems], placeholder: str) -> MetadataTemplate | None:
    """A template, unless its placeholders are by chance part of the metadata."""
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    holes: dict[MetadataIndex, tuple[int, int]] = {}
    for of_rank in items:
        file = segment_file(of_rank.rank, placeholder)
        for number, (index, (offset, length)) in enumerate(zip(of_rank.indexes, of_rank.extents, strict=True)):
            holes.pop(index, None)
            if number >= of_rank.fixed:
                offset, length = _placeholder_number(), _placeholder_number()
                holes[index] = (of_rank.rank, number - of_rank.fixed)
            storage_data[index] = _StorageInfo(file, offset, length)
    data = pickle.dumps(with_storage(metadata, storage_data, placeholder), protocol=4)
    written = len({info.relative_path for info in storage_data.values()})
    if data.count(placeholder.encode()) != written + 1:  # one string for each file, one for the save id
        return None
    places: dict[bytes, list[int]] = {}
    for match in _NUMBERS.finditer(data) if holes else ():
        places.setdefault(match[1], []).append(match.start(1))
    found = []
    for index, (rank, number) in holes.items():
        for part, value in enumerate((storage_data[index].offset, storage_data[index].length)):
            positions = places.get(_NUMBER.pack(value), [])
            if len(positions) != 1:
                return None
            found.append((positions[0], rank, number, part))
    return MetadataTemplate(data, placeholder.encode(), found)


def _placeholder_number() -> int:
    """A number that pickle writes with eight bytes; any other may take their place."""
    return random.randrange(1 << 55, 1 << 63)


def with_storage(metadata: Metadata, storage_data: Any, save_id: str) -> Metadata:
    """A new `Metadata` of the same content, with this storage data. (Torch 2.6 has no `version` field.)"""
    result = Metadata(
        state_dict_metadata=metadata.state_dict_metadata,
        planner_data=metadata.planner_data,
        storage_data=storage_data,
        storage_meta=StorageMeta(save_id=save_id),
    )
    if hasattr(result, "version"):
        result.version = DCP_VERSION
    return result


class RenderedMetadata(Metadata):
    """Metadata that is unpickled when it is first looked at, as few callers of a save ever do."""

    def __new__(cls, render: Callable[[], bytes] | None = None, **changed: Any) -> Any:
        return super().__new__(cls) if render is not None else Metadata(**changed)  # dataclasses.replace asks for one

    def __init__(self, render: Callable[[], bytes]) -> None:
        self.__dict__["_render"] = render

    def _whole(self) -> Metadata:
        whole = self.__dict__.get("_read")
        if whole is None:
            whole = self.__dict__["_read"] = read_metadata(self.__dict__["_render"]())
        return cast(Metadata, whole)

    def __eq__(self, other: object) -> bool:
        return self._whole() == (other._whole() if isinstance(other, RenderedMetadata) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._whole(),)


def _itself(metadata: Metadata) -> Metadata:
    return metadata


def _field(name: str) -> property:
    def read(self: RenderedMetadata) -> Any:
        return getattr(self._whole(), name)

    def write(self: RenderedMetadata, value: Any) -> None:
        setattr(self._whole(), name, value)

    return property(read, write)


for _one in fields(Metadata):
    setattr(RenderedMetadata, _one.name, _field(_one.name))


def read_metadata(data: bytes) -> Metadata:
    """Unpickle a `.metadata`, admitting only what DCP metadata is made of.

    Raises UntrustedMetadata, naming what was refused, before anything of it was called.
    """
    before = [(thing, dict(vars(thing))) for thing in _mutable()]
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except UntrustedMetadata:
        raise
    except Exception as error:
        raise UntrustedMetadata(f"a damaged or foreign .metadata ({type(error).__name__}: {error})") from None
    finally:
        changed = [thing for thing, attributes in before if _restore(thing, attributes)]
    if changed:
        raise UntrustedMetadata(f"a change of {changed[0]!r} itself")
    if not isinstance(metadata, Metadata):
        raise UntrustedMetadata(f"a {type(metadata).__name__} in place of DCP metadata")
    return metadata


def _mutable() -> list[Any]:
    """What a pickle could change besides what it makes: it may set attributes of everything that it can name."""
    classes = [thing for thing in _MetadataUnpickler.ADMITTED.values() if isinstance(thing, type)]
    ours = [kind for kind in classes if kind.__module__.startswith("torch.distributed.")]
    return [*ours, *dcp_metadata._MEM_FORMAT_ENCODING]


def _restore(thing: Any, attributes: Mapping[str, Any]) -> bool:
    """Give a class or an object its attributes back; whether they were others."""
    if dict(vars(thing)) == attributes:
        return False
    set_attribute, delete = (type.__setattr__, type.__delattr__) if isinstance(thing, type) else (setattr, delattr)
    for name in set(vars(thing)) - set(attributes):
        delete(thing, name)
    for name, value in attributes.items():
        if vars(thing).get(name) is not value:
            set_attribute(thing, name, value)
    return True


class _MemberOfEnum:
    """Stands in for the `getattr` by which some Python versions pickle enum members."""

    __slots__ = ()  # like its siblings, without attributes that a pickle could set

    def __call__(self, kind: Any, name: str) -> enum.Enum:
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
            return kind.__members__[name]
        raise UntrustedMetadata(f"getattr({kind!r}, {name!r})")


class _LayoutNamed:
    __slots__ = ()

    def __call__(self, name: str) -> torch.layout:
        layout = getattr(torch, str(name).removeprefix("torch."), None)
        if isinstance(layout, torch.layout):
            return layout
        raise UntrustedMetadata(f"layout {name!r}")


class _PathOf:
    """A path of any system is only a label here, and WindowsPath can't be made on POSIX."""

    __slots__ = ()

    def __call__(self, *parts: str) -> pathlib.PurePosixPath:
        return pathlib.PurePosixPath(*parts)


def _admitted() -> Mapping[tuple[str, str], Any]:
    module = dcp_metadata.__name__
    names = [
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ]
    admitted: dict[tuple[str, str], Any] = {(module, name): getattr(dcp_metadata, name) for name in names}
    admitted |= {
        ("torch", "Size"): torch.Size,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
        ("torch.serialization", "_get_layout"): _LayoutNamed(),
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "getattr"): _MemberOfEnum(),
        ("builtins", "set"): set,
    }
    for path_module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            admitted[path_module, name] = _PathOf()
    return admitted


class _MetadataUnpickler(pickle.Unpickler):
    ADMITTED = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        known = self.ADMITTED.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UntrustedMetadata(f"{module}.{name}")
