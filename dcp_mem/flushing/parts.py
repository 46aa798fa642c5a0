"""Each node's part of a flush, up to the commit: its segments, then its node manifest.

The part of a lost node is put by the nodes that hold copies of its segments:

1. Each holder puts the segments whose copies it has, and behind each a table of its items.
2. The holder that finds the tables of all of the node's segments makes the node manifest of them.

Holders don't know of each other. Two that put the same segment put the same bytes under the same
keys, and so does the segment's owner, should that node live after all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import field, replace

import numpy as np

from dcp_mem.common import faults
from dcp_mem.common.files import read_bytes
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Segment
from dcp_mem.errors import (
    CheckpointExists,
    DcpMemError,
    ManifestInvalid,
    MemoryBudgetExceeded,
    SegmentCorrupt,
    StorageKeyMissing,
)
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.orphans import COMMIT, DROP
from dcp_mem.flushing.ownership import Ownership
from dcp_mem.flushing.reuse import Reuse
from dcp_mem.flushing.upload import SegmentUpload, upload_all
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.checkpoint import LocalCheckpoint, checksums_of
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage import OfOneFile, Storage


@value_class(kw_only=True)
class FlushJob:
    checkpoint: LocalCheckpoint
    node: str
    storage: Storage
    overwrite: bool  # whether another checkpoint of the name may be replaced
    meter: Meter = field(default_factory=Meter)
    # limits how fast bytes are sent
    throttle: Throttle = field(default_factory=lambda: Throttle(None))
    # ids of nodes that won't put their parts any more, so that others do it
    lost: frozenset[str] = frozenset()
    # Segments whose copies here have turned out damaged. The attempt adds to it; it is kept from
    # one attempt to the next.
    damaged: set[str] = field(default_factory=set)
    # of the storage; None where there is nobody to share it with
    ownership: Ownership | None = None
    # this node's part was stored by an earlier attempt, and a newer checkpoint is durable
    was_put: bool = False
    memory: JobMemory | None = None
    reuse: Reuse | None = None  # what unchanged parts are copied from; None: everything is sent
    takes_rejected: bool = False  # whether a checkpoint that was rejected is committed all the same

    def check_ownership(self) -> None:
        """Raise StorageTaken where a newer run has taken the storage. Ranks that save alone share a
        storage without agreeing on anything: each owns its files.
        """
        is_shared = self.checkpoint.manifest.scope == names.COLLECTIVE
        if self.ownership is not None and is_shared:
            self.ownership.check()

    def may_commit_now(self) -> bool:
        """Decide that the attempt is committed; False where another run has dropped it."""
        if self.ownership is None or self.checkpoint.manifest.scope != names.COLLECTIVE:
            return True
        return self._settle(self.checkpoint.manifest.save_id, COMMIT) == COMMIT

    def may_drop(self, run: str, save_id: str) -> bool:
        """Decide that an attempt under this checkpoint's name is dropped, if it still can be: False
        where its run ("": unknown) may have committed it, or is about to.
        """
        if self.ownership is None or (run and self.ownership.is_own(run)):
            return True
        return self.storage.has_conditions() and self._settle(save_id, DROP) == DROP

    def _settle(self, save_id: str, wanted: bytes) -> bytes:
        """Settle what becomes of an attempt, once and for all runs; return what that is."""
        key = self.key(names.stored_ticket(save_id))
        try:
            self.storage.put(key, wanted, create=True)
        except CheckpointExists:
            return self.storage.get(key)
        return wanted

    def key(self, file: str) -> str:
        return f"{self.checkpoint.name}/{file}"


@value_class
class Parts:
    """The stored parts of a checkpoint, as storage has listed them under its `.dcp_mem`."""

    manifest: Manifest
    listed: frozenset[str]

    def has_node(self, node: str) -> bool:
        """Return whether all segments of the node are stored."""
        return self._has(names.stored_node_manifest(self.manifest.save_id, node))

    def has_segment(self, rank: int) -> bool:
        """Return whether another node has put the rank's segment, in a takeover."""
        return self._has(names.stored_segment_table(self.manifest.save_id, rank))

    def missing(self) -> list[str]:
        return [node for node in self.manifest.nodes if not self.has_node(node)]

    def other_attempts(self) -> Iterator[str]:
        """Yield save ids of other attempts under the same name that have come to their commit."""
        for file in self.listed:
            save_id = file.removeprefix("manifest-").removesuffix(".json")
            is_manifest = file == names.stored_manifest(save_id).rpartition("/")[2]
            if is_manifest and save_id != self.manifest.save_id:
                yield save_id

    def _has(self, key: str) -> bool:
        return key.rpartition("/")[2] in self.listed


def parts_of(job: FlushJob) -> Parts:
    listed = job.storage.ls(job.key(names.OWN))
    return Parts(job.checkpoint.manifest, frozenset(entry.name for entry in listed))


def put_part(job: FlushJob) -> None:
    """Upload this node's segments, and then its node manifest, which says that all are stored.

    What has changed since its checksums were made isn't put. Where none have been made so far,
    those of the bytes that were put are kept beside the segment, if memory has room.
    """
    manifest, reuse = job.checkpoint.manifest, job.reuse
    segments = manifest.of_node(job.node)
    with job.meter.stage("segments"):
        stored, catalog = stored_sizes(job), catalog_of(job.checkpoint)
        sources = {} if reuse is None else reuse.sources(job.storage, manifest, segments)
        outgoing = [
            SegmentUpload(
                segment=segment,
                table=_table(job, catalog, segment),
                key=job.key(segment.file),
                is_stored=stored.get(segment.file) == segment.nbytes,
                is_hashed=reuse is not None,
                stored=sources.get(segment.file),
            )
            for segment in segments
        ]
        uploaded = upload_all(
            job.checkpoint.directory, outgoing, job.storage, job.meter, job.throttle
        )
    tables = {file: one.table for file, one in uploaded.items()}
    if job.memory is not None:
        try:
            job.memory.add_checksums(manifest, tables)
        except MemoryBudgetExceeded as error:  # storage has them all the same
            log.warning("%s has no checksums in memory: %s", manifest.name, error)
    faults.point("flush.segments")
    parts = {file: one.parts for file, one in uploaded.items() if one.parts is not None}
    job.storage.put(
        job.key(names.stored_node_manifest(manifest.save_id, job.node)),
        NodeManifest(
            save_id=manifest.save_id,
            node=job.node,
            tables=tables,
            transfer=job.meter.transfer(),
            parts=parts,
        ).to_json(),
    )
    if reuse is not None:
        reuse.note(manifest, parts)
    faults.point("flush.node_manifest")


def _table(job: FlushJob, catalog: Catalog, segment: Segment) -> ItemTable:
    """Return a segment's items, with the checksums beside it in memory if there are any."""
    table = items_of(catalog.layout(segment.rank), segment.tail)
    try:
        return replace(table, crc32c=checksums_of(job.checkpoint, segment.file).crc32c)
    except FileNotFoundError:
        return table
    except ManifestInvalid as error:
        name, why = job.checkpoint.name, f"its checksums: {error}"
        raise SegmentCorrupt(name, segment.rank, "memory", why) from None


def stored_sizes(job: FlushJob) -> dict[str, int]:
    listed = job.storage.ls(job.checkpoint.name)
    return {entry.name: entry.nbytes for entry in listed if not entry.what}


def drop_part(job: FlushJob) -> None:
    """Remove what this node has put of a checkpoint that it can't finish. What is stored whole
    stays: this node's finished part, a segment that another node has put, and everything once the
    checkpoint is committed.
    """
    parts, manifest = parts_of(job), job.checkpoint.manifest
    if parts.has_node(job.node) or manifest.save_id.encode() in committed_metadata(job):
        return
    for segment in manifest.of_node(job.node):
        if not parts.has_segment(segment.rank):
            job.storage.drop_unfinished(job.key(segment.file))
            job.storage.delete(job.key(segment.file))


def committed_metadata(job: FlushJob) -> bytes:
    """Return the `.metadata` that storage has under the name; empty where there is none."""
    try:
        return job.storage.get(job.key(names.metadata_file(job.checkpoint.manifest.scope)))
    except StorageKeyMissing:
        return b""


def has_new_catalog(checkpoint: LocalCheckpoint) -> bool:
    """Return whether the coordinator has replaced the catalog in memory meanwhile."""
    try:
        now = Manifest.from_json(read_bytes(checkpoint.manifest_path))
    except (FileNotFoundError, ManifestInvalid):
        return False
    known = checkpoint.manifest
    return now.save_id == known.save_id and now.catalog != known.catalog


def catalog_of(checkpoint: LocalCheckpoint) -> Catalog:
    """Return the catalog that lies beside a checkpoint in memory, or raise SegmentCorrupt."""
    try:
        return read_catalog(checkpoint.directory, checkpoint.manifest.catalog)
    except FileNotFoundError:
        raise SegmentCorrupt(checkpoint.name, 0, "memory", "its catalog is gone") from None
    except ManifestInvalid as error:
        raise SegmentCorrupt(checkpoint.name, 0, "memory", str(error)) from None


# -- for a lost node ------------------------------------------------------------------------------


def take_over(job: FlushJob, node: str) -> None:
    """Put the copies that lie here of a lost node's segments; with the last, its node manifest.
    What this node can't put isn't its failure: another holder may have it.
    """
    for segment in _in_order(job, node):
        is_here = os.path.exists(job.checkpoint.segment_path(segment.file))
        if segment.file not in job.damaged and is_here:
            _put_copy(job, segment)
    parts, segments = parts_of(job), job.checkpoint.manifest.of_node(node)
    if not parts.has_node(node) and all(parts.has_segment(segment.rank) for segment in segments):
        _put_node_manifest(job, node)


def _in_order(job: FlushJob, node: str) -> Sequence[Segment]:
    """Return the lost node's segments, reversed on every other node. Neighbours in the order of the
    nodes mostly hold the same copies: they begin at opposite ends.
    """
    nodes = job.checkpoint.manifest.nodes
    segments = job.checkpoint.manifest.of_node(node)
    # A node that is new in the job, and got the copies after the loss, isn't among the nodes.
    is_odd = job.node in nodes and (nodes.index(job.node) - nodes.index(node)) % len(nodes) % 2
    return segments if is_odd else segments[::-1]


def _put_copy(job: FlushJob, segment: Segment) -> None:
    """Put a segment of another node, and its table, unless another holder has done so."""
    if parts_of(job).has_segment(segment.rank):
        return
    try:
        table = _verified_table(job, segment)
    except SegmentCorrupt as error:
        job.damaged.add(segment.file)
        log.warning(
            "%s; another node may have a better copy of what node %s can't flush",
            error,
            segment.node,
        )
        return
    log.info(
        "%s: the segment of rank %d goes up for node %s, which is lost",
        job.checkpoint.name,
        segment.rank,
        segment.node,
    )
    outgoing = SegmentUpload(
        segment=segment, table=table, key=job.key(segment.file), is_stored=False
    )
    try:
        if stored_sizes(job).get(segment.file) != segment.nbytes:
            with job.meter.stage("segments"):
                upload_all(
                    job.checkpoint.directory, [outgoing], job.storage, job.meter, job.throttle
                )
    except DcpMemError:
        # If another holder was quicker, the upload that this node had begun is gone.
        if not parts_of(job).has_segment(segment.rank):
            raise
        return
    save_id = job.checkpoint.manifest.save_id
    job.storage.put(
        job.key(names.stored_segment_table(save_id, segment.rank)),
        NodeManifest(save_id=save_id, node=segment.node, tables={segment.file: table}).to_json(),
    )


def _verified_table(job: FlushJob, segment: Segment) -> ItemTable:
    """Return the segment's items with the checksums that came with its copy, once they hold. All of
    the copy is read before any of it is sent: damaged bytes must never lie under the segment's name
    on storage (a load returns what was saved, or raises).
    """
    try:
        known = checksums_of(job.checkpoint, segment.file)
    except (FileNotFoundError, ManifestInvalid) as error:
        raise _corrupt(job, segment, f"its checksums: {error}") from None
    table = replace(known, crc32c=known.crc32c[:0])  # compared below, for an error of its own
    outgoing = SegmentUpload(segment=segment, table=table, key="", is_stored=True)
    tables = upload_all(job.checkpoint.directory, [outgoing], job.storage, Meter(), Throttle(None))
    found = tables[segment.file].table.crc32c
    if len(found) != len(known.crc32c):
        raise _corrupt(job, segment, f"{len(known.crc32c)} checksums for {len(found)} blocks")
    wrong = int(np.count_nonzero(found != known.crc32c))
    if wrong:
        raise _corrupt(job, segment, f"{wrong} of {len(found)} blocks aren't what was copied")
    return known


def _corrupt(job: FlushJob, segment: Segment, detail: str) -> SegmentCorrupt:
    source = f"memory (a copy, node {job.node})"
    return SegmentCorrupt(job.checkpoint.name, segment.rank, source, detail)


def _put_node_manifest(job: FlushJob, node: str) -> None:
    """Put the lost node's manifest: to readers its segments are then like those of any node."""
    manifest, tables = job.checkpoint.manifest, dict[str, ItemTable]()
    stored = stored_sizes(job)
    for segment in manifest.of_node(node):
        table = _stored_table(job, segment) if stored.get(segment.file) == segment.nbytes else None
        if table is None:
            # The table is damaged; or the owner, thought lost, has removed its segment.
            log.warning(
                "%s: the segment of rank %d has to be put again",
                job.checkpoint.name,
                segment.rank,
            )
            job.storage.delete(job.key(names.stored_segment_table(manifest.save_id, segment.rank)))
            return
        tables[segment.file] = table
    data = NodeManifest(save_id=manifest.save_id, node=node, tables=tables).to_json()
    job.storage.put(job.key(names.stored_node_manifest(manifest.save_id, node)), data)


def _stored_table(job: FlushJob, segment: Segment) -> ItemTable | None:
    key = job.key(names.stored_segment_table(job.checkpoint.manifest.save_id, segment.rank))
    try:
        return NodeManifest.from_json(job.storage.get(key)).tables.get(segment.file)
    except (StorageKeyMissing, ManifestInvalid, OfOneFile):
        return None
