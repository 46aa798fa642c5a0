"""DCP's own `Metadata`: read without free unpickling, and made when it is first needed."""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_mem.errors import UntrustedMetadata
from dcp_mem.format.names import DCP_VERSION
from dcp_mem.format.sizes import refuse_greedy_pickle

StorageInfo = _StorageInfo
"""Where an item lies in a file, as DCP's own writer records it."""


def with_storage(
    metadata: Metadata, storage_data: Any, save_id: str, checkpoint_id: str | None = None
) -> Metadata:
    """Return a new `Metadata` of the same content with other storage data.

    Torch 2.6 has no `version` field.

    `storage_data`: as DCP has it: where each item lies, by its index.
    """
    result = Metadata(
        state_dict_metadata=metadata.state_dict_metadata,
        planner_data=metadata.planner_data,
        storage_data=storage_data,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
    )
    if hasattr(result, "version"):
        result.version = DCP_VERSION
    return result


class LazyMetadata(Metadata):
    """Metadata that is made when it is first needed; few callers of a save ever look at it.

    `make`: returns the metadata; called at most once.
    """

    def __new__(cls, make: Callable[[], Metadata] | None = None, **changed: Any) -> Any:
        # dataclasses.replace calls this with fields, and gets a plain Metadata.
        return super().__new__(cls) if make is not None else Metadata(**changed)

    def __init__(self, make: Callable[[], Metadata]) -> None:
        self.__dict__["_make"] = make

    def _whole(self) -> Metadata:
        whole = self.__dict__.get("_made")
        if whole is None:
            whole = self.__dict__["_made"] = self.__dict__["_make"]()
        return cast(Metadata, whole)

    def __eq__(self, other: object) -> bool:
        return self._whole() == (other._whole() if isinstance(other, LazyMetadata) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._whole())

    def __reduce__(self) -> tuple[Any, ...]:
        # A plain Metadata, for processes without dcp_mem and for `read_metadata`. So are copies.
        whole = self._whole()
        return Metadata, (whole.state_dict_metadata,), vars(whole)


def _field(name: str) -> property:
    def read(self: LazyMetadata) -> Any:
        return getattr(self._whole(), name)

    def write(self: LazyMetadata, value: Any) -> None:
        setattr(self._whole(), name, value)

    return property(read, write)


for _one in fields(Metadata):
    setattr(LazyMetadata, _one.name, _field(_one.name))


def read_metadata(data: bytes) -> Metadata:
    """Unpickle a `.metadata`, admitting only what DCP metadata is made of.

    Megatron-LM keeps the ranks' plans with it, so the parts of save plans are admitted as well.

    Raises UntrustedMetadata, SizeRefused.
    """
    metadata = read_part(data)
    if not isinstance(metadata, Metadata):
        raise UntrustedMetadata(f"a {type(metadata).__name__} in place of DCP metadata")
    return metadata


def read_part(data: bytes) -> Any:
    """Unpickle something that a `.metadata` may hold.

    Raises UntrustedMetadata, SizeRefused.
    """
    refuse_greedy_pickle(data, "a .metadata")
    before = [(thing, dict(vars(thing))) for thing in _mutable()]
    try:
        found = _MetadataUnpickler(io.BytesIO(data)).load()
    except UntrustedMetadata:
        raise
    except Exception as error:
        raise UntrustedMetadata(
            f"a damaged or foreign .metadata ({type(error).__name__}: {error})"
        ) from None
    finally:
        changed = [thing for thing, attributes in before if _restore(thing, attributes)]
    if changed:
        raise UntrustedMetadata(f"a change of {changed[0]!r} itself")
    return found


def refuse_contradictions(metadata: Metadata) -> None:
    """Make sure that metadata is made as torch's own writers make it.

    `metadata`: as `read_metadata` returns it: of admitted classes, which may hold anything. Raises
    ValueError.
    """
    # Whatever torch's annotations say, a pickle may hold anything here.
    entries: Any = metadata.state_dict_metadata
    places: Any = metadata.storage_data
    if not isinstance(entries, Mapping) or not isinstance(places, Mapping):
        raise ValueError("it lacks the entries, or where they lie")
    if not all(
        isinstance(one, StorageInfo) and isinstance(one.relative_path, str)
        for one in places.values()
    ):
        raise ValueError("it doesn't say where an item lies")
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            _refuse_outside(name, entry)
        elif not isinstance(name, str) or not isinstance(entry, BytesStorageMetadata):
            raise ValueError(f"{name!r} is neither a tensor nor a byte item")


def _refuse_outside(name: Any, tensor: Any) -> None:
    """Raise ValueError where a tensor is none, or where a chunk of it lies outside of it."""
    known = isinstance(tensor.properties, TensorProperties) and isinstance(tensor.chunks, list)
    if not isinstance(name, str) or not known or not _are_lengths(tensor.size):
        raise ValueError(f"{name!r} lacks what a tensor has")
    for chunk in tensor.chunks:
        if not (
            isinstance(chunk, ChunkStorageMetadata)
            and _are_lengths(chunk.offsets)
            and _are_lengths(chunk.sizes)
            and len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            and all(
                offset + length <= most
                for offset, length, most in zip(
                    chunk.offsets, chunk.sizes, tensor.size, strict=True
                )
            )
        ):
            raise ValueError(f"a chunk of {name!r} lies outside of it")


def _are_lengths(size: Any) -> bool:
    return isinstance(size, torch.Size) and all(length >= 0 for length in size)


def _mutable() -> list[Any]:
    """Return what a pickle could change besides the objects that it makes.

    A pickle may set attributes of everything that it can name.
    """
    classes = [thing for thing in _MetadataUnpickler.ADMITTED.values() if isinstance(thing, type)]
    ours = [kind for kind in classes if kind.__module__.startswith("torch.distributed.")]
    return [*ours, *dcp_metadata._MEM_FORMAT_ENCODING, *dcp_planner.WriteItemType]


def _restore(thing: Any, attributes: Mapping[str, Any]) -> bool:
    """Restore the attributes of a class or an object; return whether any had changed."""
    if dict(vars(thing)) == attributes:
        return False
    set_attribute, delete = (
        (type.__setattr__, type.__delattr__) if isinstance(thing, type) else (setattr, delattr)
    )
    for name in set(vars(thing)) - set(attributes):
        delete(thing, name)
    for name, value in attributes.items():
        if vars(thing).get(name) is not value:
            set_attribute(thing, name, value)
    return True


class _MemberOfEnum:
    """Replaces the `getattr` by which some Python versions pickle enum members."""

    __slots__ = ()  # as in the next two classes: no attributes that a pickle could set

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
    """Replaces paths of any system: they are only labels, and POSIX can't make a WindowsPath."""

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
    admitted: dict[tuple[str, str], Any] = {
        (module, name): getattr(dcp_metadata, name) for name in names
    }
    parts_of_plans = [
        "SavePlan",
        "WriteItem",
        "WriteItemType",
        "TensorWriteData",
        "BytesIOWriteData",  # newer than torch 2.6
    ]
    admitted |= {
        (dcp_planner.__name__, name): getattr(dcp_planner, name)
        for name in parts_of_plans
        if hasattr(dcp_planner, name)
    }
    admitted |= {
        ("torch", "Size"): torch.Size,
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
        ("torch.serialization", "_get_layout"): _LayoutNamed(),
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "getattr"): _MemberOfEnum(),
        # Of sets; and of what `metadata_by_entry` makes, which is pickled as lists and a dict.
        **{("builtins", kind.__name__): kind for kind in (set, list, dict)},
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
