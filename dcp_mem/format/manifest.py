"""Our own records of a checkpoint: JSON, versioned, checked, free of pickle and of secrets.

In memory each node holds a `Manifest`: its presence is what COMPLETE means. On storage the
committing node puts the same manifest, and every node puts a `NodeManifest` with the checksums of
its segments.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from dcp_mem.common.sendable import sendable
from dcp_mem.common.values import Segment, Transfer
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.checksums import HASH, HASH_NBYTES, Crcs, block_count
from dcp_mem.format.layout import Columns, Layout
from dcp_mem.format.segments import Segments, Tail
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.parity import Share, Stripe

VERSION = 3
_BODY = ', "body": '
_MOST = 1 << 50
"""The largest offset or length in a segment."""
_LEAST_UNPACKED, _MOST_RATIO = 64 << 20, 64
"""Limit for unpacked columns: this many bytes or, if more, this many times the file's size."""
_KEPT = 4
"""Manifests that stay parsed: a load looks at the same one several times, and waits for that."""
_DAMAGE = (TypeError, ValueError, AttributeError, OverflowError, zlib.error)
"""Errors of reading fields, besides missing ones, that show a file to be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One complete checkpoint."""

    name: str
    save_id: str
    scope: str  # "" where all ranks saved together; else the scope of the rank that saved alone
    job: str
    created: float  # seconds since the epoch on the coordinator's clock: for people
    world_size: int
    persist: bool  # whether the checkpoint is meant to reach storage
    committer: str
    segments: Segments
    catalog: str  # key of the catalog that describes the checkpoint
    stage_seconds: float = 0.0  # from the start of the save to this manifest
    step: int | None = None  # as the training loop gave it; None if it didn't
    metrics: Mapping[str, float] = field(default_factory=dict)
    # of the run that saved it, and its place in the job's order with `count`; 0 where an older
    # dcp_mem saved it
    generation: int = 0
    count: int = 0
    run: str = ""
    # On storage: of the `.metadata` that commits it, in hexadecimal digits. A listing that shows it
    # proves the commit without a read.
    metadata_md5: str = ""
    # Where the save made the checkpoint's directory on storage: the identity (`Entry.identity`) of
    # the `.metadata` that lay there then, "" for none. None where it made none.
    replaces: str | None = None

    @property
    def number(self) -> SaveNumber:
        """The number of the save: its place in the job's order."""
        return SaveNumber(self.generation, self.count)

    @property
    def place(self) -> Place:
        """The checkpoint's place in the order of the job's checkpoints."""
        return Place(
            number=self.number,
            run=self.run,
            time=self.created,
            step=self.step,
            key=(self.name, self.save_id),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.segments.nbytes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose ranks saved, each once."""
        return tuple(dict.fromkeys(self.segments.node))

    @property
    def tails(self) -> dict[int, Tail]:
        """By rank, offset and length of each item of its segment's tail."""
        return dict(zip(self.segments.rank, self.segments.tail, strict=True))

    def of_node(self, node: str) -> tuple[Segment, ...]:
        """Return the segments that a node's ranks saved."""
        return tuple(
            self.segments[number]
            for number, other in enumerate(self.segments.node)
            if other == node
        )

    def to_json(self) -> bytes:
        """Return the record as a file."""
        scalars = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "segments"
        }
        return _dump("manifest", {**scalars, "segments": self.segments.to_fields()})

    @staticmethod
    @lru_cache(maxsize=_KEPT)
    def from_json(data: bytes) -> Manifest:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("manifest", data)
        try:
            segments = Segments.from_fields(body["save_id"], **body["segments"])
            manifest = Manifest(**{**body, "segments": segments})
            _refuse_odd_fields(manifest)
            return manifest
        except (LookupError, *_DAMAGE) as error:
            raise ManifestInvalid(f"a manifest lacks or misnames a field: {error}") from None


def _refuse_odd_fields(manifest: Manifest) -> None:
    """Raise ValueError where a field holds what no manifest has."""
    texts = (manifest.name, manifest.save_id, manifest.scope, manifest.job, manifest.committer)
    if {type(one) for one in (*texts, manifest.catalog, manifest.metadata_md5)} != {str}:
        raise ValueError("a name that is no text")
    if type(manifest.replaces) not in (str, type(None)):
        raise ValueError("an identity that is no text")
    if any("/" in one for one in (*texts, *manifest.segments.node)):
        raise ValueError("a name with a slash")
    figures = (manifest.created, manifest.stage_seconds, *manifest.metrics.values())
    if not {type(one) for one in figures} <= {int, float} or type(manifest.persist) is not bool:
        raise ValueError("a figure that is no number")
    if type(manifest.world_size) is not int or type(manifest.step) not in (int, type(None)):
        raise ValueError("a count that is no number")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ItemTable:
    """The items of one stored segment."""

    offsets: Columns  # where each item begins in the segment, in bytes
    lengths: Columns
    payload_offsets: Columns  # where its raw data begins; -1 where it has no plain payload
    payload_nbytes: Columns
    crc32c: Crcs  # of each block of each item (see `checksums.Blocks`); empty if none were computed

    def has_items_of(self, other: ItemTable) -> bool:
        """Return whether another table has the same items in the same places.

        `other`: of a segment with the same bytes; its checksums don't count.
        """
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.lengths, other.lengths
        )


def items_of(layout: Layout, tail: Tail) -> ItemTable:
    """Return the items of a segment, in the order of their offsets, without checksums."""
    columns = (layout.offsets, layout.lengths, layout.payload_offsets, layout.payload_nbytes)
    rest = np.array([(offset, nbytes, -1, 0) for offset, nbytes in tail], dtype="<i8").reshape(
        -1, 4
    )
    joined: list[Columns] = [np.concatenate([dense, rest[:, i]]) for i, dense in enumerate(columns)]
    return ItemTable(
        offsets=joined[0],
        lengths=joined[1],
        payload_offsets=joined[2],
        payload_nbytes=joined[3],
        crc32c=np.zeros(0, dtype="<u4"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParts:
    """The parts of a stored segment, for later checkpoints that have the same bytes."""

    part_nbytes: int  # length of each part; the last one may be shorter
    crc32c: tuple[int, ...]
    hashes: bytes  # of each part (`checksums.hasher`), joined; zeros where a part wasn't hashed
    etag: str  # as `Upload.etag` returned it: a later upload needs it to copy from this segment
    # when all its bytes were last known to be right, as they were sent or read then, in seconds
    # since the epoch
    checked: float

    def hash_of(self, number: int) -> bytes:
        """Return the hash of a part; b"" where there is no such part."""
        return self.hashes[number * HASH_NBYTES :][:HASH_NBYTES]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "hash": HASH,
            "part_nbytes": self.part_nbytes,
            "crc32c": list(self.crc32c),
            "hashes": base64.b64encode(self.hashes).decode(),
            "etag": self.etag,
            "checked": self.checked,
        }

    @staticmethod
    def from_fields(facts: Any) -> StoredParts | None:
        """Read what `to_fields` returned; None where it is of another kind, or damaged."""
        try:
            found = StoredParts(
                part_nbytes=int(facts["part_nbytes"]),
                crc32c=tuple(map(int, facts["crc32c"])),
                hashes=base64.b64decode(facts["hashes"], validate=True),
                etag=str(facts["etag"]),
                checked=float(facts["checked"]),
            )
            return found if facts["hash"] == HASH and found.part_nbytes > 0 else None
        except (LookupError, *_DAMAGE):
            return None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeManifest:
    """The manifest of one node's segments of one checkpoint on storage.

    In memory there is one for each segment that is copied to another node.
    """

    save_id: str
    node: str
    tables: Mapping[str, ItemTable]
    transfer: Transfer = field(default_factory=Transfer)
    # By segment file, for the segments that later checkpoints may be made from. Versions that don't
    # know it leave it out.
    parts: Mapping[str, StoredParts] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the record as a file."""
        tables = {
            file: {name: _pack(getattr(table, name)) for name in _DTYPES}
            for file, table in self.tables.items()
        }
        # Apart from the other figures: versions that don't know this one would refuse it there.
        transfer = asdict(self.transfer)
        reused = {"reused_nbytes": transfer.pop("reused_nbytes")}
        parts = {file: one.to_fields() for file, one in self.parts.items()}
        facts = {"save_id": self.save_id, "node": self.node, "transfer": transfer, **reused}
        return _dump("node", {**facts, "tables": tables, "parts": parts})

    @staticmethod
    def from_json(data: bytes) -> NodeManifest:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("node", data)
        try:
            columns = _Columns(len(data))
            tables = {file: columns.table(packed) for file, packed in body["tables"].items()}
            reused = int(body.get("reused_nbytes", 0))
            transfer = Transfer(**{**body.get("transfer", {}), "reused_nbytes": reused})
            parts = {
                str(file): one
                for file, facts in dict(body.get("parts", {})).items()
                if (one := StoredParts.from_fields(facts)) is not None
            }
            return NodeManifest(
                save_id=body["save_id"],
                node=body["node"],
                tables=tables,
                transfer=transfer,
                parts=parts,
            )
        except (LookupError, *_DAMAGE) as error:
            raise ManifestInvalid(f"a node manifest is damaged: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRecord:
    """The progress and outcome of one checkpoint's flush.

    The agent rewrites the record now and then while a flush runs.
    """

    save_id: str
    # "" (none yet), "durable", "failed" (tried again later), "refused" (tried again, but rarely) or
    # "skipped". It stays while the next attempt runs.
    outcome: str = ""
    error: str = ""
    attempts: int = 0
    # when the checkpoint became durable, in seconds since the epoch; 0.0 if it hasn't
    durable: float = 0.0
    seconds: float = 0.0
    stage: str = ""
    again: float = 0.0
    transfer: Transfer = field(default_factory=Transfer)

    def to_json(self) -> bytes:
        """Return the record as a file."""
        return _dump("flush", asdict(self))

    @staticmethod
    def from_json(data: bytes) -> FlushRecord:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("flush", data)
        try:
            return FlushRecord(**{**body, "transfer": Transfer(**body.get("transfer", {}))})
        except (TypeError, AttributeError) as error:
            raise ManifestInvalid(f"a flush record is damaged: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationRecord:
    """The outcome of one checkpoint's replication, as one node recorded it."""

    save_id: str
    outcome: str = ""  # "" (it hasn't ended), "replicated", "failed" or "skipped"
    copies: int = 0  # verified copies of each segment, each on another node
    # over how many other nodes there is verified parity of each node's segments, where there are no
    # copies
    parity: int = 0
    seconds: float = 0.0
    error: str = ""  # why there is neither, or less than wanted
    sent_nbytes: int = 0
    reused_nbytes: int = 0  # bytes of copies that weren't sent: an earlier copy had them

    def to_json(self) -> bytes:
        """Return the record as a file."""
        return _dump("replication", asdict(self))

    @staticmethod
    def from_json(data: bytes) -> ReplicationRecord:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("replication", data)
        try:
            return ReplicationRecord(**body)
        except TypeError as error:
            raise ManifestInvalid(f"a replication record is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class Rejection:
    """The mark of a checkpoint that is not to be resumed from, in memory and on storage."""

    save_id: str
    why: str
    # when it was rejected, in seconds since the epoch; 0.0 where that isn't known
    time: float = 0.0

    def to_json(self) -> bytes:
        """Return the mark as a file."""
        return _dump("rejection", asdict(self))

    @staticmethod
    def from_json(save_id: str, data: bytes) -> Rejection:
        """Read what `to_json` returned; a mark that is damaged is one all the same."""
        try:
            body = _parse("rejection", data)
            return Rejection(save_id, str(body["why"]), float(body["time"]))
        except (ManifestInvalid, KeyError, TypeError, ValueError):
            return Rejection(save_id, "for a reason that can't be read any more")


@sendable
@dataclass(frozen=True, slots=True)
class Resumes:
    """How often in a row a job has resumed from one checkpoint and ended soon afterwards."""

    save_id: str = ""  # of the checkpoint; "" for none
    name: str = ""
    count: int = 0

    def to_json(self) -> bytes:
        """Return the record as a file."""
        return _dump("resumes", asdict(self))

    @staticmethod
    def from_json(data: bytes) -> Resumes:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("resumes", data)
        try:
            return Resumes(str(body["save_id"]), str(body["name"]), int(body["count"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestInvalid(f"a record of resumes is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class StripeRecord:
    """The stripe and the checksums of a parity file in memory."""

    save_id: str
    stripe: Stripe  # bytes of which ranks' segments, and where in the file
    crc32c: tuple[int, ...]  # of each `checksums.BLOCK` bytes of the file

    def to_json(self) -> bytes:
        """Return the record as a file."""
        shares = [[one.rank, one.start, one.stop, one.place] for one in self.stripe.shares]
        facts = {
            "save_id": self.save_id,
            "keeper": self.stripe.keeper,
            "nbytes": self.stripe.nbytes,
        }
        return _dump("parity", {**facts, "shares": shares, "crc32c": self.crc32c})

    @staticmethod
    def from_json(data: bytes) -> StripeRecord:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        body = _parse("parity", data)
        try:
            shares = tuple(Share(*one) for one in body["shares"])
            return StripeRecord(
                body["save_id"],
                Stripe(body["keeper"], body["nbytes"], shares),
                tuple(body["crc32c"]),
            )
        except (TypeError, KeyError) as error:
            raise ManifestInvalid(f"what parity is of is damaged: {error}") from None


_DTYPES = {
    "offsets": "<i8",
    "lengths": "<i8",
    "payload_offsets": "<i8",
    "payload_nbytes": "<i8",
    "crc32c": "<u4",
}


def _dump(kind: str, body_fields: Mapping[str, Any]) -> bytes:
    body = json.dumps(body_fields, separators=(",", ":"), sort_keys=True)
    head = {"format": f"dcp_mem/{kind}", "version": VERSION, "crc": zlib.crc32(body.encode())}
    return (json.dumps(head)[:-1] + f"{_BODY}{body}}}").encode()


def _parse(kind: str, data: bytes) -> dict[str, Any]:
    head, _, body = data.partition(_BODY.encode())
    try:
        document = json.loads(head + b"}")
        version, form, crc = document["version"], document["format"], document["crc"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestInvalid(f"no record of dcp_mem's ({kind}): {error}") from None
    if form != f"dcp_mem/{kind}" or version != VERSION:
        raise ManifestInvalid(
            f"{form} version {version} is not {kind} version {VERSION}: use a newer dcp_mem"
        )
    if body[-1:] != b"}" or zlib.crc32(body[:-1]) != crc:
        raise ManifestInvalid(f"a record of dcp_mem's ({kind}) is damaged (checksum)")
    try:
        found = json.loads(body[:-1])
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"a record of dcp_mem's ({kind}) is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ManifestInvalid(
            f"a record of dcp_mem's ({kind}) is damaged: it holds a {type(found).__name__}"
        )
    return found


def _pack(column: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


class _Columns:
    """Unpacks the columns of one file, up to a total that its size allows.

    `nbytes`: of the file. Columns of many items take less than a tenth of what they unpack to; of
    items that are all alike, a thousandth.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = max(_LEAST_UNPACKED, _MOST_RATIO * nbytes)

    def table(self, packed: Mapping[str, str]) -> ItemTable:
        """Return a segment's items.

        Raises ValueError, KeyError, TypeError, zlib.error.
        """
        table = ItemTable(**{name: self._column(packed[name], _DTYPES[name]) for name in _DTYPES})
        _refuse_contradictions(table)
        return table

    def _column(self, text: str, dtype: str) -> np.ndarray[Any, Any]:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text), max(1, self._left))
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("a column is cut short, or unpacks to more than its file could hold")
        self._left -= len(data)
        return np.frombuffer(data, dtype=dtype)


def _refuse_contradictions(table: ItemTable) -> None:
    """Raise ValueError where the items of a table, or their checksums, don't fit together."""
    columns = [table.offsets, table.lengths, table.payload_offsets, table.payload_nbytes]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of items differ in length")
    offsets, lengths, payload_offsets, payload_nbytes = columns
    if not all(((one >= 0) & (one <= _MOST)).all() for one in (offsets, lengths, payload_nbytes)):
        raise ValueError("items lie outside of any segment")
    inside = (payload_offsets >= offsets) & (payload_nbytes <= lengths)
    inside &= payload_offsets - offsets <= lengths - payload_nbytes
    if not (inside | (payload_offsets < 0)).all():
        raise ValueError("payloads reach out of their items")
    if len(table.crc32c) and len(table.crc32c) != block_count(lengths):
        raise ValueError("checksums of other blocks")
