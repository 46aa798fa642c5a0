"""Our own records of a checkpoint: JSON, versioned, checked, free of pickle and of secrets.

In memory each node holds a `Manifest`: its presence is what COMPLETE means. On storage the
committing node puts the same manifest, and every node puts a `NodeManifest` with the checksums of
its segments.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment, Transfer
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.checksums import HASH, HASH_NBYTES, Crcs, block_count
from dcp_mem.format.layout import ItemColumns, Layout, refuse_outside
from dcp_mem.format.records import DAMAGE, Record, made
from dcp_mem.format.segments import Segments, Tail
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.parity import Stripe
from dcp_mem.policy.persistence import Persisted

_LEAST_UNPACKED, _MOST_RATIO = 64 << 20, 64
"""Limit for unpacked columns: this many bytes or, if more, this many times the file's size."""
_KEPT = 4
"""Manifests that stay parsed: a load looks at the same one several times, and waits for that."""


@value_class(kw_only=True)
class Manifest(Record):
    """One complete checkpoint."""

    form = "manifest"

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
    # how far the counts of `persist=` were; None where it has chosen no save yet
    persisted: Persisted | None = None

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

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        return _manifest(data)

    @classmethod
    def _unpacked(cls, facts: dict[str, Any], file_nbytes: int) -> dict[str, Any]:
        segments = Segments.from_fields(facts["save_id"], **facts["segments"])
        return {**facts, "segments": segments}

    def _refuse_odd_fields(self) -> None:
        names = (self.name, self.save_id, self.scope, self.job, self.committer)
        if any("/" in one for one in (*names, *self.segments.node)):
            raise ValueError("a name with a slash")


@lru_cache(maxsize=_KEPT)
def _manifest(data: bytes) -> Manifest:
    return super(Manifest, Manifest).from_json(data)


@value_class(eq=False)
class ItemTable(ItemColumns):
    """The items of one stored segment."""

    crc32c: Crcs  # of each block of each item (see `checksums.Blocks`); empty if none were computed

    def to_fields(self) -> dict[str, str]:
        """Return the columns for JSON: deflated, and coded as text."""
        return {"items": _pack(self.columns), "crc32c": _pack(self.crc32c)}

    def has_items_of(self, other: ItemTable) -> bool:
        """Return whether another table has the same items in the same places.

        `other`: of a segment with the same bytes; its checksums don't count.
        """
        return np.array_equal(self.columns[:2], other.columns[:2])


def items_of(layout: Layout, tail: Tail) -> ItemTable:
    """Return the items of a segment, in the order of their offsets, without checksums."""
    rest = np.array([(offset, nbytes, -1, 0) for offset, nbytes in tail], np.int64).reshape(-1, 4)
    return ItemTable(np.concatenate([layout.columns, rest.T], axis=1), np.zeros(0, "<u4"))


@value_class(kw_only=True)
class StoredParts:
    """The parts of a stored segment, for later checkpoints that have the same bytes."""

    part_nbytes: int  # length of each part; the last one may be shorter
    crc32c: tuple[int, ...]
    hashes: bytes  # of each part (`checksums.hasher`), joined; zeros where a part wasn't hashed
    etag: str  # as `Upload.etag` returned it: a later upload needs it to copy from this segment
    # when all its bytes were last known to be right, as they were sent or read then, in seconds
    # since the epoch
    checked: float
    hash: str = HASH  # the kind of hash

    def hash_of(self, number: int) -> bytes:
        """Return the hash of a part; b"" where there is no such part."""
        return self.hashes[number * HASH_NBYTES :][:HASH_NBYTES]

    @staticmethod
    def from_fields(facts: Any) -> StoredParts | None:
        """Read what was written of parts; None where it is of another kind, or damaged."""
        try:
            found = made(StoredParts, facts)
        except DAMAGE:
            return None
        return found if found.hash == HASH and found.part_nbytes > 0 else None


@value_class(eq=False, kw_only=True)
class NodeManifest(Record):
    """The manifest of one node's segments of one checkpoint on storage.

    In memory there is one for each segment that is copied to another node.
    """

    form = "node"

    save_id: str
    node: str
    tables: Mapping[str, ItemTable]
    transfer: Transfer = field(default_factory=Transfer)
    # by segment file, for the segments that later checkpoints may be made from
    parts: Mapping[str, StoredParts] = field(default_factory=dict)

    @classmethod
    def _unpacked(cls, facts: dict[str, Any], file_nbytes: int) -> dict[str, Any]:
        columns = _Columns(file_nbytes)
        tables = {file: columns.table(packed) for file, packed in facts["tables"].items()}
        parts = {
            file: one
            for file, found in facts.get("parts", {}).items()
            if (one := StoredParts.from_fields(found)) is not None
        }
        return {**facts, "tables": tables, "parts": parts}


@value_class(kw_only=True)
class FlushRecord(Record):
    """The progress and outcome of one checkpoint's flush.

    The agent rewrites the record now and then while a flush runs.
    """

    form = "flush"

    save_id: str
    # "" (none yet), "durable", "failed" (tried again later), "refused" (tried again, but rarely) or
    # "skipped". It stays while the next attempt runs.
    outcome: str = ""
    error: str = ""
    attempts: int = 0
    begun: float = 0.0  # when the last attempt that has ended began, by this node's monotonic clock
    # when the checkpoint became durable, in seconds since the epoch; 0.0 if it hasn't
    durable: float = 0.0
    seconds: float = 0.0
    stage: str = ""
    again: float = 0.0
    transfer: Transfer = field(default_factory=Transfer)


@value_class(kw_only=True)
class ReplicationRecord(Record):
    """The outcome of one checkpoint's replication, as one node recorded it."""

    form = "replication"

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


@value_class
class Rejection(Record):
    """The mark of a checkpoint that is not to be resumed from, in memory and on storage."""

    form = "rejection"

    save_id: str
    why: str
    # when it was rejected, in seconds since the epoch; 0.0 where that isn't known
    time: float = 0.0


def why_rejected(mark: bytes) -> str:
    """Return the reason in a mark's file; a mark that is damaged is one all the same."""
    try:
        return Rejection.from_json(mark).why or "no reason given"
    except ManifestInvalid:
        return "for a reason that can't be read any more"


@sendable
@value_class
class Resumes(Record):
    """How often in a row a job has resumed from one checkpoint and ended soon afterwards."""

    form = "resumes"

    save_id: str = ""  # of the checkpoint; "" for none
    name: str = ""
    count: int = 0


@value_class
class StripeRecord(Record):
    """The stripe and the checksums of a parity file in memory."""

    form = "parity"

    save_id: str
    stripe: Stripe  # bytes of which ranks' segments, and where in the file
    crc32c: tuple[int, ...]  # of each `checksums.BLOCK` bytes of the file


def _pack(columns: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(columns.tobytes(), 1)).decode()


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
        items = self._column(packed["items"], "<i8").reshape(4, -1)
        table = ItemTable(items, self._column(packed["crc32c"], "<u4"))
        refuse_outside(table.columns)
        if len(table.crc32c) and len(table.crc32c) != block_count(table.lengths):
            raise ValueError("checksums of other blocks")
        return table

    def _column(self, text: str, dtype: str) -> np.ndarray[Any, Any]:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text), max(1, self._left))
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("a column is cut short, or unpacks to more than its file could hold")
        self._left -= len(data)
        return np.frombuffer(data, dtype=dtype)
