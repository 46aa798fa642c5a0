"""Our own description of a checkpoint: JSON, versioned, free of pickle and of secrets.

In memory each node holds one (`Manifest`): its presence is what COMPLETE means. On storage the committing node puts
the same manifest, and every node puts a `NodeManifest` with the checksums of its own segments.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.checksums import Crcs
from dcp_mem.format.layout import Columns, Layout
from dcp_mem.format.segments import Segments, Tail
from dcp_mem.policy.parity import Share, Stripe
from dcp_mem.values import Segment, Transfer

VERSION = 3
_BODY = ', "body": '


@dataclass(frozen=True, slots=True)
class Manifest:
    """One complete checkpoint.

    created: seconds since the epoch on the coordinator's clock, but never earlier than an older checkpoint's: it
    orders checkpoints. scope: "" or the rank that saved alone. committer: the node that publishes `.metadata`.
    catalog: key of the catalog that describes it. step, metrics: what the training loop said of it, if anything.
    """

    name: str
    save_id: str
    scope: str
    job: str
    created: float
    world_size: int
    persist: bool
    committer: str
    segments: Segments
    catalog: str
    stage_seconds: float = 0.0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.segments.nbytes)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.segments.node))

    @property
    def tails(self) -> dict[int, Tail]:
        """By rank, where the items behind the layout of its segment lie."""
        return dict(zip(self.segments.rank, self.segments.tail, strict=True))

    def of_node(self, node: str) -> tuple[Segment, ...]:
        return tuple(self.segments[number] for number, other in enumerate(self.segments.node) if other == node)

    def to_json(self) -> bytes:
        scalars = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "segments"}
        return _dump("manifest", {**scalars, "segments": self.segments.to_fields()})

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read what `to_json` wrote. Raises ManifestInvalid."""
        body = _parse("manifest", data)
        try:
            return Manifest(**{**body, "segments": Segments.from_fields(body["save_id"], **body["segments"])})
        except (TypeError, LookupError, ValueError) as error:
            raise ManifestInvalid(f"a manifest lacks or misnames a field: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class ItemTable:
    """The items of one stored segment; payload_offsets are -1 where there is no plain payload.

    crc32c: of each block of each item (see `checksums.Blocks`); none where nothing was computed.
    """

    offsets: Columns
    lengths: Columns
    payload_offsets: Columns
    payload_nbytes: Columns
    crc32c: Crcs


def items_of(layout: Layout, tail: Tail) -> ItemTable:
    """A segment's items, dense ones and tail, in the order of their offsets, without checksums."""
    columns = (layout.offsets, layout.lengths, layout.payload_offsets, layout.payload_nbytes)
    rest = np.array([(offset, nbytes, -1, 0) for offset, nbytes in tail], dtype="<i8").reshape(-1, 4)
    joined: list[Columns] = [np.concatenate([dense, rest[:, i]]) for i, dense in enumerate(columns)]
    return ItemTable(joined[0], joined[1], joined[2], joined[3], np.zeros(0, dtype="<u4"))


@dataclass(frozen=True, slots=True, eq=False)
class NodeManifest:
    """What one node put on storage for one checkpoint: items by segment file. transfer: what that took.

    In memory, where segments are copied to other nodes, there is one for each segment.
    """

    save_id: str
    node: str
    tables: Mapping[str, ItemTable]
    transfer: Transfer = field(default_factory=Transfer)

    def to_json(self) -> bytes:
        tables = {file: {name: _pack(getattr(table, name)) for name in _DTYPES} for file, table in self.tables.items()}
        facts = {"save_id": self.save_id, "node": self.node, "transfer": asdict(self.transfer)}
        return _dump("node", {**facts, "tables": tables})

    @staticmethod
    def from_json(data: bytes) -> NodeManifest:
        """Read what `to_json` wrote. Raises ManifestInvalid."""
        body = _parse("node", data)
        try:
            tables = {
                file: ItemTable(**{name: _unpack(packed[name], dtype) for name, dtype in _DTYPES.items()})
                for file, packed in body["tables"].items()
            }
            return NodeManifest(body["save_id"], body["node"], tables, Transfer(**body.get("transfer", {})))
        except (TypeError, KeyError, ValueError, AttributeError, zlib.error) as error:
            raise ManifestInvalid(f"a node manifest is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class FlushRecord:
    """What the agent wrote down about one checkpoint's way to storage.

    outcome: "" (none yet), "durable", "failed" (tried again later), "refused" (tried again, but rarely), "skipped".
    While it is tried again, what came of the last attempt stays. attempts: those that have ended.
    stage, seconds, again: as in `CheckpointStatus`. Rewritten now and then while a flush runs.
    """

    save_id: str
    outcome: str = ""
    error: str = ""
    attempts: int = 0
    durable: float = 0.0
    seconds: float = 0.0
    stage: str = ""
    again: float = 0.0
    transfer: Transfer = field(default_factory=Transfer)

    def to_json(self) -> bytes:
        return _dump("flush", asdict(self))

    @staticmethod
    def from_json(data: bytes) -> FlushRecord:
        """Read what `to_json` wrote. Raises ManifestInvalid."""
        body = _parse("flush", data)
        try:
            return FlushRecord(**{**body, "transfer": Transfer(**body.get("transfer", {}))})
        except TypeError as error:
            raise ManifestInvalid(f"a flush record is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class ReplicationRecord:
    """What a node wrote down about one checkpoint's copies on other nodes, once that had ended.

    outcome: "" (not yet), "replicated", "failed", "skipped". copies: of each segment, verified, on nodes of their own. parity:
    over how many other nodes there is verified parity of each node's segments, where there are no copies.
    """

    save_id: str
    outcome: str = ""
    copies: int = 0
    parity: int = 0
    seconds: float = 0.0
    error: str = ""

    def to_json(self) -> bytes:
        return _dump("replication", asdict(self))

    @staticmethod
    def from_json(data: bytes) -> ReplicationRecord:
        """Read what `to_json` wrote. Raises ManifestInvalid."""
        body = _parse("replication", data)
        try:
            return ReplicationRecord(**body)
        except TypeError as error:
            raise ManifestInvalid(f"a replication record is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class StripeRecord:
    """What parity in memory is the parity of. crc32c: of each BLOCK of it."""

    save_id: str
    stripe: Stripe
    crc32c: tuple[int, ...]

    def to_json(self) -> bytes:
        shares = [[one.rank, one.start, one.stop, one.place] for one in self.stripe.shares]
        facts = {"save_id": self.save_id, "keeper": self.stripe.keeper, "nbytes": self.stripe.nbytes}
        return _dump("parity", {**facts, "shares": shares, "crc32c": self.crc32c})

    @staticmethod
    def from_json(data: bytes) -> StripeRecord:
        """Read what `to_json` wrote. Raises ManifestInvalid."""
        body = _parse("parity", data)
        try:
            shares = tuple(Share(*one) for one in body["shares"])
            return StripeRecord(body["save_id"], Stripe(body["keeper"], body["nbytes"], shares), tuple(body["crc32c"]))
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
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestInvalid(f"not a {kind} manifest of dcp_mem: {error}") from None
    if form != f"dcp_mem/{kind}" or version != VERSION:
        raise ManifestInvalid(f"{form} version {version} is not {kind} version {VERSION}: use a newer dcp_mem")
    if body[-1:] != b"}" or zlib.crc32(body[:-1]) != crc:
        raise ManifestInvalid(f"a {kind} manifest is damaged (checksum)")
    found = json.loads(body[:-1])
    if not isinstance(found, dict):
        raise ManifestInvalid(f"a {kind} manifest is damaged: it holds a {type(found).__name__}")
    return found


def _pack(column: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()


def _unpack(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)
