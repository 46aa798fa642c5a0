"""The part of a node that is lost, done by those that hold copies of its segments.

Each holder puts what lies here, segment by segment, and a manifest of each behind it; whoever then finds all of them there puts
the node's own manifest, made of these. Holders don't know of each other: two at one segment put the same bytes under the same
keys, and so does its owner, should it live after all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from dcp_mem.errors import DcpMemError, ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.events import log
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.parts import FlushJob, parts_of, stored_sizes
from dcp_mem.flushing.uploading import Outgoing, upload_all
from dcp_mem.format import names
from dcp_mem.format.manifest import ItemTable, NodeManifest
from dcp_mem.memory.job import checksums_of
from dcp_mem.values import Segment


def stand_in(job: FlushJob, node: str) -> None:
    """Put what lies here of a lost node's segments, and the node's manifest if all of them are on storage then.

    Raises StorageUnavailable, StorageRefused. What this node can't do isn't its failure: another one may.
    """
    for segment in _in_turn(job, node):
        if segment.file not in job.damaged and os.path.exists(job.held.segment_path(segment.file)):
            _put(job, segment)
    parts = parts_of(job)
    if not parts.has_node(node) and all(parts.has_segment(segment.rank) for segment in job.held.manifest.of_node(node)):
        _put_together(job, node)


def _in_turn(job: FlushJob, node: str) -> Sequence[Segment]:
    """The lost node's segments; neighbours in the order of the nodes, who mostly hold the same, begin at opposite ends."""
    nodes = job.held.manifest.nodes
    segments = job.held.manifest.of_node(node)
    # A node that is new in the job, and got the lost one's segments after the loss, has no place among them.
    is_odd = job.node in nodes and (nodes.index(job.node) - nodes.index(node)) % len(nodes) % 2
    return segments if is_odd else segments[::-1]


def _put(job: FlushJob, segment: Segment) -> None:
    """Put a segment of another node and what is known of it, unless somebody has done so."""
    if parts_of(job).has_segment(segment.rank):
        return
    try:
        table = _verified(job, segment)
    except SegmentCorrupt as error:
        job.damaged.add(segment.file)
        log.warning("%s; another node may have a better copy of what node %s can't flush", error, segment.node)
        return
    log.info("%s: the segment of rank %d goes up for node %s, which is lost", job.held.name, segment.rank, segment.node)
    try:
        _upload(job, segment, table)
    except DcpMemError:
        if not parts_of(job).has_segment(segment.rank):  # or another holder was quicker, and what we had begun is gone
            raise
        return
    save_id = job.held.manifest.save_id
    job.storage.put(
        job.key(names.stored_segment_table(save_id, segment.rank)),
        NodeManifest(save_id, segment.node, {segment.file: table}).to_json(),
    )


def _upload(job: FlushJob, segment: Segment, table: ItemTable) -> None:
    if stored_sizes(job).get(segment.file) != segment.nbytes:
        outgoing = Outgoing(segment, table, job.key(segment.file), is_stored=False)
        with job.meter.stage("segments"):
            upload_all(job.held.directory, [outgoing], job.storage, job.meter, job.throttle)


def _verified(job: FlushJob, segment: Segment) -> ItemTable:
    """The segment's items, with the checksums that came with its copy. Raises SegmentCorrupt where its bytes have others.

    It is read before any of it is sent: what isn't right may not lie under the segment's name on storage for a moment.
    """
    known = _known_table(job, segment)
    outgoing = Outgoing(segment, known, job.key(segment.file), is_stored=True)
    found = upload_all(job.held.directory, [outgoing], job.storage, Meter(), Throttle(None))[segment.file].crc32c
    if len(found) != len(known.crc32c):
        raise _corrupt(job, segment, f"{len(known.crc32c)} checksums for {len(found)} blocks")
    wrong = int(np.count_nonzero(found != known.crc32c))
    if wrong:
        raise _corrupt(job, segment, f"{wrong} of {len(found)} blocks aren't what was copied")
    return known


def _known_table(job: FlushJob, segment: Segment) -> ItemTable:
    try:
        return checksums_of(job.held, segment.file)
    except (FileNotFoundError, ManifestInvalid) as error:
        raise _corrupt(job, segment, f"its checksums: {error}") from None


def _corrupt(job: FlushJob, segment: Segment, detail: str) -> SegmentCorrupt:
    return SegmentCorrupt(job.held.name, segment.rank, f"memory (a copy, node {job.node})", detail)


def _put_together(job: FlushJob, node: str) -> None:
    """Put the node's manifest, so that its segments are to readers what those of any node are."""
    manifest, tables = job.held.manifest, dict[str, ItemTable]()
    stored = stored_sizes(job)
    for segment in manifest.of_node(node):
        table = _stored_table(job, segment) if stored.get(segment.file) == segment.nbytes else None
        if table is None:  # an owner that was thought lost has taken its segment away, or the table is damaged
            log.warning("%s: the segment of rank %d has to be put again", job.held.name, segment.rank)
            job.storage.delete(job.key(names.stored_segment_table(manifest.save_id, segment.rank)))
            return
        tables[segment.file] = table
    data = NodeManifest(manifest.save_id, node, tables).to_json()
    job.storage.put(job.key(names.stored_node_manifest(manifest.save_id, node)), data)


def _stored_table(job: FlushJob, segment: Segment) -> ItemTable | None:
    try:
        data = job.storage.get(job.key(names.stored_segment_table(job.held.manifest.save_id, segment.rank)))
        return NodeManifest.from_json(data).tables.get(segment.file)
    except (StorageKeyMissing, ManifestInvalid):
        return None
