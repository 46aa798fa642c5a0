"""Files that claim more than they hold, or contradict themselves: by kind, each with a name.

Most were found by hand, some by Hypothesis. Each of them once took gigabytes, minutes, or raised
something that nobody catches.
"""

import base64
import io
import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_mem.format.catalog import VERSION, Catalog, Properties
from dcp_mem.format.checksums import checksum
from dcp_mem.format.column_file import Packed, pack, unpack
from dcp_mem.format.layout import layout_of
from dcp_mem.format.shared_runs import RunPool

HUGE = 1 << 50
_ZEROS = bytes(1 << 20)


def json_file(kind: str, body: str, *, version: int = 3) -> bytes:
    """A record of ours with a right checksum, whatever its body is."""
    head = {"format": f"dcp_mem/{kind}", "version": version, "crc": zlib.crc32(body.encode())}
    return (json.dumps(head)[:-1] + f', "body": {body}}}').encode()


def column_file(head: Mapping[str, Any] | bytes, body: bytes = b"", version: int = 1) -> bytes:
    """A catalog's file with a right checksum, whatever its head and body are."""
    text = head if isinstance(head, bytes) else json.dumps({"version": version, **head}).encode()
    rest = struct.pack("<I", len(text)) + text + body
    return b"dcpmemC1" + struct.pack("<I", checksum(rest)) + rest


def packed_column(data: bytes) -> str:
    """A column of a node manifest."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def node_manifest(**columns: bytes) -> bytes:
    """A node manifest of one segment with one item, with other columns in the place of its own."""
    usual = {
        "offsets": struct.pack("<q", 0),
        "lengths": struct.pack("<q", 4),
        "payload_offsets": struct.pack("<q", -1),
        "payload_nbytes": struct.pack("<q", 0),
        "crc32c": struct.pack("<I", 0),
    }
    *items, crc32c = ({**usual, **columns}[name] for name in usual)
    table = {"items": packed_column(b"".join(items)), "crc32c": packed_column(crc32c)}
    body = {"save_id": "00000000", "node": "n", "tables": {"__0_0-00000000.distcp": table}}
    return json_file("node", json.dumps(body))


def manifest(**fields: Any) -> bytes:
    """A manifest of one segment, with other fields in the place of its own."""
    segments = {
        "nodes": ["n"],
        "layouts": [""],
        "rank": [0],
        "node": [0],
        "nbytes": [8],
        "layout": [0],
        "tail": [[[0, 8]]],
    }
    usual = {
        "name": "step-1",
        "save_id": "00000000",
        "scope": "",
        "job": "job",
        "created": 1.0,
        "world_size": 1,
        "persist": True,
        "committer": "n",
        "catalog": "0123456789abcdef",
        "segments": {**segments, **fields.pop("segments", {})},
    }
    return json_file("manifest", json.dumps({**usual, **fields}))


def manifests() -> dict[str, bytes]:
    """Manifests."""
    return {
        "nested deeply": json_file("manifest", "[" * 100_000 + "]" * 100_000),
        "a head nested deeply": b"[" * 100_000 + b', "body": {}}',
        "infinite": manifest(segments={"tail": [[[0, float("inf")]]]}),
        "a size that is no number": manifest(segments={"nbytes": ["8"]}),
        "a negative size": manifest(segments={"nbytes": [-8], "tail": [[]]}),
        "a tail beyond its segment": manifest(segments={"tail": [[[0, HUGE]]]}),
        "a rank twice": manifest(
            segments={
                "rank": [0, 0],
                "node": [0, 0],
                "nbytes": [8, 8],
                "layout": [0, 0],
                "tail": [[], []],
            }
        ),
        "a node outside": manifest(segments={"nodes": ["../../.."]}),
        "a name outside": manifest(name="../step-1"),
        "created by nobody": manifest(created=None),
        "metrics of texts": manifest(metrics={"loss": "low"}),
        "a number of many digits": json_file("manifest", '{"created": 1' + "0" * 10_000 + "}"),
        "fields of another kind": json_file("manifest", "[]"),
        "no segments": manifest(segments={"rank": []}),
    }


def node_manifests() -> dict[str, bytes]:
    """Node manifests."""
    return {
        "a column that unpacks to a gibibyte": node_manifest(offsets=_ZEROS * 1024),
        "a length of a pebibyte": node_manifest(lengths=struct.pack("<q", HUGE)),
        "a length beyond all": node_manifest(lengths=struct.pack("<q", (1 << 63) - 1)),
        "a negative length": node_manifest(lengths=struct.pack("<q", -1)),
        "a payload outside": node_manifest(payload_offsets=struct.pack("<q", 1 << 40)),
        "columns of other lengths": node_manifest(offsets=bytes(16)),
        "too many checksums": node_manifest(crc32c=bytes(8)),
        "half a number": node_manifest(offsets=bytes(7)),
        "no tables": json_file("node", '{"save_id": "0", "node": "n", "tables": []}'),
        "no columns": json_file("node", '{"save_id": "0", "node": "n", "tables": {"f": {}}}'),
        "columns that are no text": json_file(
            "node", '{"save_id": "0", "node": "n", "tables": {"f": {"offsets": 1}}}'
        ),
    }


def catalogs() -> dict[str, bytes]:
    """Catalogs."""
    whole = ["<u1", [1 << 16], 0]
    return {
        "columns that all are the whole body": column_file(
            {"table": {str(n): whole for n in range(20_000)}, "facts": {}}, bytes(1 << 16)
        ),
        "a column of a pebibyte": column_file(
            {"table": {"name": ["<u1", [HUGE], 0]}, "facts": {}}, bytes(8)
        ),
        "a column of many dimensions": column_file(
            {"table": {"name": ["<u1", [HUGE, HUGE, 0], 0]}, "facts": {}}, bytes(8)
        ),
        "a shape of no dimension": column_file({"table": {"name": ["<u1", [], 0]}, "facts": {}}),
        "a shape of fractions": column_file(
            {"table": {"name": ["<u1", [0.5], 0.5]}, "facts": {}}, bytes(8)
        ),
        "a head nested deeply": column_file(b"[" * 100_000 + b"]" * 100_000),
        "no facts": column_file({"table": {}}),
        "no columns": column_file({"table": {}, "facts": {"table": []}}),
        "a table that is no table": column_file({"table": 1, "facts": {}}),
        "a run of 2^50 rows": shared_catalog(step=1, length=HUGE),
        "runs of 2^62 rows": shared_catalog(9, length=(1 << 62) - 1),
        "many entries with the same million rows": shared_catalog(5000, length=1 << 20),
        "a run that ends beyond 2^63": shared_catalog(first=1 << 61, step=1 << 61, length=100),
        "a run of numbers that aren't listed": shared_catalog(length=-3),
        "a run of fewer than -2^63 rows": shared_catalog(length=-(1 << 63)),
    }


def shared_catalog(entries: int = 1, first: int = 0, step: int = 0, length: int = 1) -> bytes:
    """A catalog whose entries all have the same run as rows."""
    pool, nothing = RunPool(), np.zeros(entries, np.int64)
    pool.add(np.zeros((1, 1), np.int64))
    one = Properties(
        dtype="torch.uint8", layout="torch.strided", requires_grad=False, pin_memory=False
    )
    sound = Catalog(
        names=list(map(str, range(entries))),
        paths=None,
        table=(one,),
        name=np.arange(entries),
        properties=nothing,
        dimensions=nothing,
        size=nothing[:, None],
        boxes=pool.runs(),
        places=pool.runs(),
        offset_runs=nothing[:, None],
        extent_runs=nothing[:, None],
        writer_runs=nothing,
        number_runs=nothing,
        first_number=nothing,
        ranks=np.zeros(1, np.int64),
        layout_of=np.zeros(1, np.int64),
        layouts=[layout_of(np.zeros((4, 0), np.int64))],
    )
    packed = unpack(sound.to_bytes(), VERSION)
    run = np.array([[first], [step], [length]])
    columns = {**packed.columns, "boxes": run, "places": run}
    return pack(Packed(packed.facts, columns, packed.blobs), VERSION)


def pickles() -> dict[str, bytes]:
    """`.metadata` pickles that ask for the memory of the machine in a few bytes."""
    huge4, huge8 = struct.pack("<I", (1 << 32) - 1), struct.pack("<Q", HUGE)
    return {
        "a memo of 2^32": b"\x80\x02N" + pickle.LONG_BINPUT + huge4 + b".",
        "a memo of 2^50, in text": b"N" + pickle.PUT + str(HUGE).encode() + b"\n.",
        "a byte array of 2^50": b"\x80\x05" + pickle.BYTEARRAY8 + huge8 + b"abc.",
        "bytes of 2^50": b"\x80\x04" + pickle.BINBYTES8 + huge8 + b"abc.",
        "text of 2^32": b"\x80\x04" + pickle.BINUNICODE + huge4 + b"abc.",
        "behind a name with an r in it": pickle.dumps("layers.r", 2)[:-1]
        + pickle.LONG_BINPUT
        + huge4
        + b".",
        "cut short": b"\x80\x04" + pickle.BINBYTES8 + b"\x01",
        "a line without an end": b"\x80\x02ctorch",
    }


def foreign_metadata(length: int, offset: int = 0, nbytes: int = 4) -> bytes:
    """A `.metadata` as torch writes it, of a tensor and a byte item in `__0_0.distcp`."""
    size = torch.Size([nbytes // 4])
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        "w": TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            size,
            [ChunkStorageMetadata(torch.Size([0]), size)],
        ),
        "object": BytesStorageMetadata(),
    }
    storage = {
        MetadataIndex("w", torch.Size([0]), 0): _StorageInfo("__0_0.distcp", offset, length),
        MetadataIndex("object"): _StorageInfo("__0_0.distcp", offset, length),
    }
    return pickle.dumps(Metadata(entries, None, storage))


def packed_stream(make: Callable[[io.BytesIO], None], copies: int = 1) -> bytes:
    """What `make` writes as a `torch.save` stream, with each record compressed."""
    plain, packed = io.BytesIO(), io.BytesIO()
    make(plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record) * copies)
    return packed.getvalue()
