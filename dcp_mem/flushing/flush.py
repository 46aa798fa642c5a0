"""From memory to storage: one checkpoint, in the order that makes its commit safe.

Segments under names of their own, then what this node knows of them, then the checkpoint's manifest, and last, in one
put, `.metadata`: that put is the commit. Every step can be repeated, by this process or another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dcp_mem import faults
from dcp_mem.errors import CheckpointExists, ManifestInvalid, StorageKeyMissing, StorageUnavailable
from dcp_mem.files import read_bytes
from dcp_mem.flushing.leftovers import collect_older_attempts
from dcp_mem.flushing.parts import (
    FlushJob,
    Parts,
    catalog_of,
    committed_metadata,
    committed_save_id,
    parts_of,
    put_part,
)
from dcp_mem.flushing.standing_in import stand_in
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.pickled import template_of
from dcp_mem.memory.job import Held
from dcp_mem.memory.locks import end_lease, share, try_lease
from dcp_mem.storage import Storage

T = TypeVar("T")
_MOST_RANKS = 8


class Evicted(Exception):
    """The checkpoint left memory before, or while, it was flushed."""


class NotYet(Exception):
    """This node has done its part, and another one hasn't: repeat the flush in a while, it costs little by now.

    Nobody waits for other nodes here: what they wait for may come behind what this node has in hand.
    """


class Superseded(Exception):
    """What is newer is committed already: this one has come too late."""


def flush(job: FlushJob) -> bool:
    """Make a complete checkpoint durable; on return it is committed, by this node or another.

    Returns whether it is for this node to tell of it. Raises StorageUnavailable or StorageRefused (nothing is committed; repeat
    it), NotYet, CheckpointExists (overwrite=False and storage has one of that name), Evicted, Superseded, SegmentCorrupt (memory
    lacks bytes).
    """
    return with_lease(job.held, lambda: _flush(job))


def _flush(job: FlushJob) -> bool:
    manifest = job.held.manifest
    faults.point("flush.started")
    ours = sum(segment.nbytes for segment in manifest.of_node(job.node))
    if committed_save_id(job.storage, manifest) == manifest.save_id and not _is_described_anew(job):
        if manifest.committer == job.node:
            # whoever committed it may have been killed before it came to that
            collect_older_attempts(job.storage, manifest)
        job.meter.find_stored(ours)
        return manifest.committer == job.node
    refuse_to_overwrite(job)
    parts = parts_of(job)
    refuse_to_come_late(job, parts)
    if job.was_put and not parts.has_node(job.node):
        raise Superseded("it was committed, and has left storage again")
    if job.node in manifest.nodes and not parts.has_node(job.node):  # a new node may hold others' segments alone
        put_part(job)
        parts = parts_of(job)
    else:
        job.meter.find_stored(ours)
    lost = [node for node in parts.missing() if node in job.lost]
    for node in lost:
        stand_in(job, node)
    if lost:
        parts = parts_of(job)
    _check_that_all_is_there(job, parts)
    refuse_to_come_late(job, parts)
    with job.meter.stage("commit"):
        commit(job)
    collect_older_attempts(job.storage, manifest)
    there = Manifest.from_json(read_bytes(job.held.manifest_path))
    if there.save_id == manifest.save_id and there.catalog != manifest.catalog:
        raise NotYet("the coordinator has described it anew meanwhile")
    return True


def _check_that_all_is_there(job: FlushJob, parts: Parts) -> None:
    """Raise NotYet unless every node's part is on storage, and the commit is this node's to make."""
    missing = parts.missing()
    for node in missing:
        if node in job.lost:
            raise NotYet(_not_put(job, parts, node))
    if not job.commits:
        raise NotYet(f"node {job.held.manifest.committer} has not committed it yet")
    if missing:
        count = len(job.held.manifest.nodes)
        raise NotYet(f"{', '.join(missing)} of {count} nodes have not put their segments yet")


def _not_put(job: FlushJob, parts: Parts, node: str) -> str:
    ranks = [segment.rank for segment in job.held.manifest.of_node(node) if not parts.has_segment(segment.rank)]
    some = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", …" if len(ranks) > _MOST_RANKS else "")
    return f"node {node} is lost, and no other has put a copy of the segments of ranks {some} yet"


def with_lease(held: Held, act: Callable[[], T]) -> T:
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
            return act()
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


def refuse_to_come_late(job: FlushJob, parts: Parts) -> None:
    """Raise Superseded where this node acts in place of others, and a newer attempt is committed under that name.

    Its job may have gone on elsewhere by then: nothing in this node's memory tells.
    """
    manifest = job.held.manifest
    if not job.lost:
        return
    committed = committed_metadata(job.storage, manifest)
    for save_id in parts.other_attempts():
        if save_id.encode() in committed and _created(job, save_id) > manifest.created:
            raise Superseded(f"{', '.join(sorted(job.lost))} lost, and a newer save of that name is durable")


def _created(job: FlushJob, save_id: str) -> float:
    try:
        return Manifest.from_json(job.storage.get(job.key(names.stored_manifest(save_id)))).created
    except (StorageKeyMissing, ManifestInvalid):
        return 0.0


def commit(job: FlushJob) -> None:
    """Publish the checkpoint's manifest and then, last and in one put, its `.metadata`."""
    manifest = job.held.manifest
    catalog = catalog_of(job.held)
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


def _is_described_anew(job: FlushJob) -> bool:
    """Whether the coordinator rewrote the catalog after it had been committed (planners that only then hand it over)."""
    manifest = job.held.manifest
    if manifest.committer != job.node:
        return False
    try:
        stored = Manifest.from_json(job.storage.get(job.key(names.stored_manifest(manifest.save_id))))
        return stored.catalog != manifest.catalog
    except (StorageKeyMissing, ManifestInvalid):
        return True


def _holds(storage: Storage, key: str, data: bytes) -> bool:
    try:
        return storage.get(key) == data
    except StorageKeyMissing:
        return False
