"""The takeover: nodes that hold copies put the part of a node that is lost.

1. Each holder puts the segments whose copies it has, and behind each a table of its items.
2. The holder that finds the tables of all of the node's segments makes the node manifest of them.

Holders don't know of each other. Two that put the same segment put the same bytes under the same
keys, and so does the segment's owner, should that node live after all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dcp_mem.common.log import log
from dcp_mem.common.values import Segment
from dcp_mem.errors import DcpMemError, ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.parts import FlushJob, parts_of, stored_sizes
from dcp_mem.flushing.upload import SegmentUpload, upload_all
from dcp_mem.format import names
from dcp_mem.format.manifest import ItemTable, NodeManifest
from dcp_mem.memory.checkpoint import checksums_of
from dcp_mem.storage import OfOneFile


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
