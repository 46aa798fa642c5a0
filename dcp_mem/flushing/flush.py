"""From memory to storage: one checkpoint, in the order that makes its commit safe.

Segments under names of their own, then what this node knows of them, then the checkpoint's manifest, and last, in one
put, `.metadata`: that put is the commit. Every step can be repeated, by this process or another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcp_mem import faults
from dcp_mem.errors import CheckpointExists, ManifestInvalid, SegmentCorrupt, StorageKeyMissing, StorageUnavailable
from dcp_mem.files import read_bytes
from dcp_mem.flushing.leftovers import collect_older_attempts
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.uploading import Outgoing, upload_all
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest, items_of
from dcp_mem.format.pickled import template_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.job import Held
from dcp_mem.memory.locks import end_lease, share, try_lease
from dcp_mem.storage import Storage
from dcp_mem.values import Segment


class Evicted(Exception):
    """The checkpoint left memory before, or while, it was flushed."""


class NotYet(Exception):
    """This node has done its part, and another one hasn't: repeat the flush in a while, it costs little by now.

    Nobody waits for other nodes here: what they wait for may come behind what this node has in hand.
    """


@dataclass(frozen=True, slots=True)
class FlushJob:
    """What a flush works on."""

    held: Held
    node: str
    storage: Storage
    overwrite: bool
    meter: Meter = field(default_factory=Meter)
    throttle: Throttle = field(default_factory=lambda: Throttle(None))

    def key(self, file: str) -> str:
        return f"{self.held.name}/{file}"


def flush(job: FlushJob) -> None:
    """Make a complete checkpoint durable; on return it is committed, by this node or the one whose part that is.

    Raises StorageUnavailable or StorageRefused (nothing is committed; repeat it), NotYet, CheckpointExists
    (overwrite=False and storage has one of that name), Evicted, SegmentCorrupt (memory lacks bytes).
    """
    with_lease(job.held, lambda: _flush(job))


def _flush(job: FlushJob) -> None:
    manifest = job.held.manifest
    faults.point("flush.started")
    ours = sum(segment.nbytes for segment in manifest.of_node(job.node))
    if committed_save_id(job.storage, manifest) == manifest.save_id and not _is_described_anew(job):
        if manifest.committer == job.node:
            # whoever committed it may have been killed before it came to that
            collect_older_attempts(job.storage, manifest)
        job.meter.find_stored(ours)
        return
    refuse_to_overwrite(job)
    nodes = nodes_done(job)
    if job.node not in nodes:
        put_part(job)
        nodes = nodes_done(job)
    else:
        job.meter.find_stored(ours)
    missing = [node for node in manifest.nodes if node not in nodes]
    if manifest.committer != job.node:
        raise NotYet(f"node {manifest.committer} has not committed it yet")
    if missing:
        raise NotYet(f"{', '.join(missing)} of {len(manifest.nodes)} nodes have not put their segments yet")
    with job.meter.stage("commit"):
        commit(job)
    collect_older_attempts(job.storage, manifest)
    there = Manifest.from_json(read_bytes(job.held.manifest_path))
    if there.save_id == manifest.save_id and there.catalog != manifest.catalog:
        raise NotYet("the coordinator has described it anew meanwhile")


def with_lease(held: Held, act: Callable[[], None]) -> None:
    """Run `act` while neither eviction nor a new save can touch the checkpoint. Raises Evicted if it has left memory."""
    try:
        descriptor = os.open(held.manifest_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Evicted(held.name) from None
    try:
        if not share(descriptor):
            raise Evicted(held.name)
        if Manifest.from_json(read_bytes(held.manifest_path)).save_id != held.manifest.save_id:
            raise Evicted(held.name)
        with _alone_at(held):
            act()
    except Exception:
        if _is_there(held):
            raise
        raise Evicted(held.name) from None  # whatever it was that failed, it is of no use any more
    finally:
        end_lease(descriptor)
        os.close(descriptor)


@contextmanager
def _alone_at(held: Held) -> Iterator[None]:
    """Keep out other flushers of this node, agents or flush threads: they would write to the same objects."""
    descriptor = os.open(held.flushing_path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lease(descriptor, exclusive=True):
            raise NotYet("another process of this node is flushing it")
        yield
    finally:
        end_lease(descriptor)
        os.close(descriptor)


def _is_there(held: Held) -> bool:
    """Whether this very attempt, and not a newer save of the same name, lies in memory."""
    try:
        return Manifest.from_json(read_bytes(held.manifest_path)).save_id == held.manifest.save_id
    except FileNotFoundError:
        return False


def refuse_to_overwrite(job: FlushJob) -> None:
    """Raise CheckpointExists where overwrite=False and another checkpoint is committed under that name."""
    manifest = job.held.manifest
    if job.overwrite or committed_save_id(job.storage, manifest) == manifest.save_id:
        return
    if names.metadata_file(manifest.scope) in {entry.name for entry in job.storage.ls(manifest.name)}:
        raise CheckpointExists(manifest.name, job.storage.url)


def nodes_done(job: FlushJob) -> frozenset[str]:
    """Nodes whose segments are on storage: they have put their manifests, which comes after the segments."""
    manifest = job.held.manifest
    listed = {entry.name for entry in job.storage.ls(job.key(names.OWN))}
    return frozenset(
        node
        for node in manifest.nodes
        if names.stored_node_manifest(manifest.save_id, node).rpartition("/")[2] in listed
    )


def put_part(job: FlushJob) -> None:
    """Upload this node's segments, and then what it knows of them."""
    manifest = job.held.manifest
    with job.meter.stage("segments"):
        tables = put_segments(job, manifest.of_node(job.node))
    faults.point("flush.segments")
    job.storage.put(
        job.key(names.stored_node_manifest(manifest.save_id, job.node)),
        NodeManifest(manifest.save_id, job.node, tables, job.meter.transfer()).to_json(),
    )
    faults.point("flush.node_manifest")


def put_segments(job: FlushJob, segments: Sequence[Segment]) -> dict[str, ItemTable]:
    """Upload this node's segments; those that storage has whole already are only read for their checksums."""
    stored = {entry.name: entry.nbytes for entry in job.storage.ls(job.held.name)}
    catalog = _catalog(job.held)
    outgoing = [
        Outgoing(
            segment,
            items_of(catalog.layout(segment.rank), segment.tail),
            job.key(segment.file),
            is_stored=stored.get(segment.file) == segment.nbytes,
        )
        for segment in segments
    ]
    return upload_all(job.held.directory, outgoing, job.storage, job.meter, job.throttle)


def commit(job: FlushJob) -> None:
    """Publish the checkpoint's manifest and then, last and in one put, its `.metadata`."""
    manifest = job.held.manifest
    catalog = _catalog(job.held)
    file = names.catalog_file(manifest.catalog)
    job.storage.put(job.key(file), read_bytes(os.path.join(job.held.directory, file)))
    job.storage.put(job.key(names.stored_manifest(manifest.save_id)), manifest.to_json())
    faults.point("flush.manifest")
    metadata = template_of(catalog).render(manifest.save_id, manifest.tails)
    key = job.key(names.metadata_file(manifest.scope))
    faults.point("flush.commit")
    try:
        job.storage.put(key, metadata, create=not job.overwrite)
    except (CheckpointExists, StorageUnavailable):
        # The answer may have been lost on its way back, or an earlier attempt of ours did it.
        if not _holds(job.storage, key, metadata):
            raise
    faults.point("flush.committed")


def _catalog(held: Held) -> Catalog:
    try:
        return read_catalog(held.directory, held.manifest.catalog)
    except FileNotFoundError:
        raise SegmentCorrupt(held.name, 0, "memory", "its catalog is gone") from None
    except ManifestInvalid as error:
        raise SegmentCorrupt(held.name, 0, "memory", str(error)) from None


def committed_save_id(storage: Storage, manifest: Manifest) -> str:
    """Save id of the attempt that storage holds committed under this name ("" where there is none of ours)."""
    try:
        metadata = storage.get(f"{manifest.name}/{names.metadata_file(manifest.scope)}")
    except StorageKeyMissing:
        return ""
    return manifest.save_id if manifest.save_id.encode() in metadata else ""


def drop_part(job: FlushJob) -> None:
    """Take away what this node has put of a checkpoint that it can't finish, unless its part is done."""
    if job.node in nodes_done(job) or committed_save_id(job.storage, job.held.manifest) == job.held.manifest.save_id:
        return
    for segment in job.held.manifest.of_node(job.node):
        job.storage.drop_unfinished(job.key(segment.file))
        job.storage.delete(job.key(segment.file))


def _is_described_anew(job: FlushJob) -> bool:
    """Whether the coordinator rewrote the catalog after it had been committed (planners that only then hand it over)."""
    manifest = job.held.manifest
    if manifest.committer != job.node:
        return False
    try:
        return Manifest.from_json(job.storage.get(job.key(names.stored_manifest(manifest.save_id)))) != manifest
    except (StorageKeyMissing, ManifestInvalid):
        return True


def _holds(storage: Storage, key: str, data: bytes) -> bool:
    try:
        return storage.get(key) == data
    except StorageKeyMissing:
        return False
