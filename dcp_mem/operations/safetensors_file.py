"""Lay out files in the safetensors format, to be filled through their mapped pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_ALIGNMENT = 8
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


def cut_into_shards(tensors: Mapping[str, TensorStorageMetadata], most: int) -> Iterator[list[str]]:
    """Yield the tensors' names in order, cut where a file would have more bytes than `most`.

    Args:
        tensors: The tensors, by name.
        most: Bytes of a file at most; a larger tensor has a file of its own.
    """
    shard, nbytes = list[str](), 0
    for name in sorted(tensors):
        if shard and nbytes + nbytes_of(tensors[name]) > most:
            yield shard
            shard, nbytes = [], 0
        shard.append(name)
        nbytes += nbytes_of(tensors[name])
    yield shard


def create_file(
    path: str, tensors: Mapping[str, TensorStorageMetadata], prefix: str
) -> dict[str, torch.Tensor]:
    """Make a file without values, and return its tensors, to be filled.

    Args:
        path: Where to make it.
        tensors: The tensors, by name.
        prefix: What the names lose in the file.
    """
    head, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), 0
    places: dict[str, tuple[int, int]] = {}
    # The largest elements come first, so that all tensors are aligned.
    for name in sorted(tensors, key=lambda one: (-tensors[one].properties.dtype.itemsize, one)):
        entry = tensors[name]
        places[name] = start, end = end, end + nbytes_of(entry)
        described = {
            "dtype": DTYPES[entry.properties.dtype],
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


def nbytes_of(entry: TensorStorageMetadata) -> int:
    """Return the bytes of a whole tensor.

    Args:
        entry: What the metadata has of the tensor.
    """
    return entry.size.numel() * entry.properties.dtype.itemsize
