"""Lay out files in the safetensors format, and name them as Hugging Face does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError

_ALIGNMENT = 8
SHARD_NBYTES = 5_000_000_000
"""Bytes of a safetensors file, as Hugging Face cuts them."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
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
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"
"""Names of the dtypes that the format has."""


@value_class
class Shape:
    """A tensor without its values."""

    dtype: torch.dtype
    size: torch.Size

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize


@value_class
class FileLayout:
    head: bytes  # the bytes that it begins with
    # where each tensor's values lie behind the head: bytes [start, stop)
    places: Mapping[str, tuple[int, int]]
    nbytes: int


@value_class
class Chosen:
    """A tensor of a checkpoint that is written, and what it is in the file."""

    source: str
    stored: Shape
    made: Shape


def chosen_tensors(
    entries: Iterable[tuple[str, object]],
    named: Callable[[str], str | None],
    converted: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> dict[str, Chosen]:
    """Return the tensors to write by their new names; `named` gives None for one to leave out.

    Raises ConfigError.
    """
    found: dict[str, Chosen] = {}
    for source, entry in entries:
        if not isinstance(entry, TensorStorageMetadata) or (name := named(source)) is None:
            continue
        if name in found:
            raise ConfigError(f"names: {source} and {found[name].source} both become {name}")
        dtype = entry.properties.dtype
        made = Shape(converted(dtype), entry.size)
        if made.dtype not in DTYPES:
            raise ConfigError(f"{source} is {made.dtype}, which safetensors don't have")
        found[name] = Chosen(source, Shape(dtype, entry.size), made)
    return found


def shard_files(sizes: Mapping[str, int], most: int, stem: str) -> dict[str, list[str]]:
    """Return the tensors of each file, by its name: in order, cut where a file would have more than
    `most` bytes. A larger tensor has a file of its own.
    """
    shards, nbytes = list[list[str]]([[]]), 0
    for name in sorted(sizes):
        if shards[-1] and nbytes + sizes[name] > most:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += sizes[name]
    count = len(shards)
    return {
        f"{stem}-{number:05}-of-{count:05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def layout_of(tensors: Mapping[str, Shape]) -> FileLayout:
    head, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), 0
    places: dict[str, tuple[int, int]] = {}
    # The largest elements come first, so that all tensors are aligned.
    for name in sorted(tensors, key=lambda one: (-tensors[one].dtype.itemsize, one)):
        shape = tensors[name]
        places[name] = start, end = end, end + shape.nbytes
        head[name] = {
            "dtype": DTYPES[shape.dtype],
            "shape": list(shape.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    text = len(text).to_bytes(8, "little") + text
    return FileLayout(text, places, len(text) + end)


def tensors_in(
    file: torch.Tensor, layout: FileLayout, tensors: Mapping[str, Shape]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, to be filled; other bytes may lie behind it."""
    data = file[len(layout.head) :]
    return {
        name: data[start:stop].view(tensors[name].dtype).view(tensors[name].size)
        for name, (start, stop) in layout.places.items()
    }


def create_file(path: str, tensors: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """Make a file without values, and return its tensors, to be filled through its mapped pages."""
    layout = layout_of(tensors)
    with open(path, "wb") as stream:
        stream.write(layout.head)
        stream.truncate(layout.nbytes)
    reserve(path)
    file = torch.from_file(path, shared=True, size=layout.nbytes, dtype=torch.uint8)
    return tensors_in(file, layout, tensors)


def reserve(path: str) -> None:
    """Have a file get all its blocks: a store to a mapped page that has none kills the process."""
    with open(path, "r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, os.path.getsize(path))


def index_json(weight_map: Mapping[str, str], nbytes: int, **facts: Any) -> bytes:
    metadata = {"total_size": nbytes, **facts}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()
