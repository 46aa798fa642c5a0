"""The commit protocol: one complete checkpoint, from memory to storage, in the order that is safe.

The same order for every storage:

1. Each node puts its segments, under names that are unique to this attempt at saving.
2. Each node puts its node manifest (files, sizes, checksums) once its segments are stored.
3. The committer waits for all node manifests, then puts the catalog and the manifest.
4. The committer lists the segments once more, and puts `.metadata`, in one atomic put. **That put
   is the commit**: readers see no checkpoint before it, and a whole one after it.
5. What older attempts have left under the name is removed.

Invariants:

- What isn't committed doesn't exist for readers: no step before the put of `.metadata` changes
  what a load finds, and that put is atomic. A load never sees a mix of two saves.
- Every step can be repeated, by this process or another one that has the files (an agent's
  successor, or a node that holds copies). A kill between two steps costs time, nothing else.
- A failed or late flush never damages another checkpoint: its files have names of their own, it
  doesn't replace a newer attempt, and only what is older than the commit is removed.
- Where the answer to the commit is ambiguous, it is read back: our own bytes mean success.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dcp_mem.common import faults
from dcp_mem.common.files import read_bytes
from dcp_mem.common.log import log
from dcp_mem.errors import CheckpointExists, ManifestInvalid, StorageKeyMissing, StorageUnavailable
from dcp_mem.flushing.orphans import collect_older_attempts
from dcp_mem.flushing.parts import (
    FlushJob,
    Parts,
    catalog_of,
    committed_metadata,
    drop_part,
    has_new_catalog,
    parts_of,
    put_part,
    stored_sizes,
    take_over,
)
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import template_of
from dcp_mem.memory.checkpoint import LocalCheckpoint, rejection_in
from dcp_mem.memory.locks import end_lease, share, try_lease
from dcp_mem.policy.order import is_newer
from dcp_mem.storage import is_still
from dcp_mem.storage.listing import committed_under

_MOST_RANKS = 8
"""Ranks that a message lists."""


class Evicted(Exception):
    """The checkpoint left memory before it was flushed, or meanwhile."""


class NotYet(Exception):
    """Another node's part is missing, while this node's is done: repeat the flush in a while. A
    flush doesn't wait itself: what other nodes wait for may be next in this node's queue. A
    repeated flush costs little once this node's part is stored.
    """


class SegmentsGone(NotYet):
    """Segments that their node manifests claim have left storage: they are to be put again."""


class AlreadyFlushing(Exception):
    """Another process of this node is flushing the checkpoint: look again in a while."""


class Superseded(Exception):
    """A newer checkpoint is committed already: this one comes too late."""


def flush(job: FlushJob) -> bool:
    """Make a complete checkpoint durable; return whether this node is the one that has committed
    it.
    """
    try:
        with _leased(job.checkpoint):
            return _flush(job)
    except Evicted:
        try:
            drop_part(job)
        except Exception as error:
            name, remedy = job.checkpoint.name, "collect_orphans does"
            log.warning("what was put of %s can't be taken away (%s): %s", name, remedy, error)
        raise


def _flush(job: FlushJob) -> bool:
    """Run the commit protocol, as far as this node can.

    1. Return if this checkpoint is committed already.
    2. Refuse what must not be committed: another checkpoint of the name is, where overwrite=False;
       see `refuse_to_bring_back` and `refuse_to_come_late`, too.
    3. Put this node's part, unless storage has it.
    4. Take over the parts of lost nodes, as far as their copies lie here.
    5. Raise NotYet unless all parts are stored, and the commit is this node's to make.
    6. Commit, and remove what older attempts have left.
    """
    manifest = job.checkpoint.manifest
    faults.point("flush.started")
    own_nbytes = sum(segment.nbytes for segment in manifest.of_node(job.node))
    metadata = committed_metadata(job)
    if _is_committed(job, metadata):
        job.check_ownership()
        if manifest.committer == job.node:
            # The process that committed it may have been killed before it had removed these.
            collect_older_attempts(job.storage, manifest, job.may_drop)
        job.meter.find_stored(own_nbytes)
        return manifest.committer == job.node
    if metadata and manifest.save_id.encode() not in metadata and not job.overwrite:
        raise CheckpointExists(manifest.name, job.storage.url)
    refuse_to_bring_back(job)
    parts = parts_of(job)
    refuse_to_come_late(job, parts)
    # A node that is new in the job may hold nothing but other nodes' segments.
    if job.node in manifest.nodes and not parts.has_node(job.node):
        if job.was_put:
            raise Superseded("it was committed, and has left storage again")
        put_part(job)
        parts = parts_of(job)
    else:
        job.meter.find_stored(own_nbytes)
    lost = [node for node in parts.missing() if node in job.lost]
    for node in lost:
        take_over(job, node)
    if lost:
        parts = parts_of(job)
    _check_that_all_parts_are_stored(job, parts)
    # Looked at again: taking parts over may have taken minutes.
    refuse_to_bring_back(job)
    refuse_to_come_late(job, parts)
    why = rejection_in(job.checkpoint.directory, manifest.save_id)
    if why and not job.takes_rejected:
        raise Superseded(f"rejected: {why}")
    with job.meter.stage("commit"):
        replaced = commit(job)
    # A newer run may have taken the storage meanwhile, and may be replacing what was committed.
    job.check_ownership()
    collect_older_attempts(
        job.storage,
        manifest,
        lambda run, save_id: save_id.encode() in replaced or job.may_drop(run, save_id),
    )
    if has_new_catalog(job.checkpoint):
        raise NotYet("the coordinator has put a new catalog into memory meanwhile")
    return True


def _check_that_all_parts_are_stored(job: FlushJob, parts: Parts) -> None:
    """Raise NotYet unless every node's part is stored, and the commit is this node's to make."""
    missing = parts.missing()
    for node in missing:
        if node in job.lost:
            raise NotYet(_missing_of_lost(job, parts, node))
    if job.checkpoint.manifest.committer not in {job.node, *job.lost}:
        job.check_ownership()  # the committer will not commit it any more, if another run has it
        raise NotYet(f"node {job.checkpoint.manifest.committer} has not committed it yet")
    if missing:
        count = len(job.checkpoint.manifest.nodes)
        raise NotYet(f"{', '.join(missing)} of {count} nodes have not put their segments yet")


def _missing_of_lost(job: FlushJob, parts: Parts, node: str) -> str:
    ranks = [
        segment.rank
        for segment in job.checkpoint.manifest.of_node(node)
        if not parts.has_segment(segment.rank)
    ]
    some = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", …" if len(ranks) > _MOST_RANKS else "")
    return f"node {node} is lost, and no other has put a copy of the segments of ranks {some} yet"


@contextmanager
def _leased(checkpoint: LocalCheckpoint) -> Iterator[None]:
    """Keep eviction, new saves and this node's other flushers from the checkpoint. Raises Evicted
    where it has left memory, before or meanwhile.
    """
    try:
        descriptor = os.open(checkpoint.manifest_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Evicted(checkpoint.name) from None
    try:
        # The lease is on the file that was opened: only then is it known which attempt's it is.
        if not share(descriptor) or not _is_in_memory(checkpoint):
            raise Evicted(checkpoint.name)
        with _only_flusher(checkpoint):
            yield
    except Exception:
        if _is_in_memory(checkpoint):
            raise
        # Whatever has failed, nobody needs it any more.
        raise Evicted(checkpoint.name) from None
    finally:
        end_lease(descriptor)
        os.close(descriptor)


@contextmanager
def _only_flusher(checkpoint: LocalCheckpoint) -> Iterator[None]:
    """Keep out this node's other agents and flush threads: they would write to the same objects."""
    descriptor = os.open(checkpoint.flushing_path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lease(descriptor, exclusive=True):
            raise AlreadyFlushing("another process of this node is flushing it")
        yield
    finally:
        end_lease(descriptor)
        os.close(descriptor)


def _is_in_memory(checkpoint: LocalCheckpoint) -> bool:
    """Return whether this very attempt, and not a newer save of its name, lies in memory."""
    try:
        manifest = Manifest.from_json(read_bytes(checkpoint.manifest_path))
    except FileNotFoundError:
        return False
    return manifest.save_id == checkpoint.manifest.save_id


def refuse_to_bring_back(job: FlushJob) -> None:
    """Raise Superseded unless what the save found and made on storage is still there."""
    manifest = job.checkpoint.manifest
    if manifest.replaces is None:
        return
    entries = {entry.name: entry for entry in job.storage.ls(manifest.name)}
    if not entries:
        raise Superseded("its directory was removed before it got there")
    metadata = entries.get(names.metadata_file(manifest.scope))
    if metadata is None or metadata.identity == manifest.replaces:
        return
    for one in committed_under(job.storage, manifest.name):
        if one.scope == manifest.scope and one.manifest is None and not one.problem:
            raise Superseded("another writer has saved under that name since")


def refuse_to_come_late(job: FlushJob, parts: Parts) -> None:
    """Raise Superseded where a newer attempt of the name is committed, maybe on other nodes."""
    manifest = job.checkpoint.manifest
    others = list(parts.other_attempts())
    committed = committed_metadata(job) if others else b""
    for save_id in others:
        other = _stored_manifest(job, save_id) if save_id.encode() in committed else None
        if other is not None and is_newer(other.place, manifest.place):
            if job.lost:
                lost = ", ".join(sorted(job.lost))
                raise Superseded(f"{lost} lost, and a newer save of that name is durable")
            job.check_ownership()  # it is mostly another run that has committed it
            raise Superseded("a newer save of that name is durable")


def _stored_manifest(job: FlushJob, save_id: str) -> Manifest | None:
    try:
        return Manifest.from_json(job.storage.get(job.key(names.stored_manifest(save_id))))
    except (StorageKeyMissing, ManifestInvalid):
        return None


def commit(job: FlushJob) -> bytes:
    """Publish the catalog, the manifest and last, in one put, `.metadata`; return the one it
    replaced.
    """
    manifest = job.checkpoint.manifest
    catalog = catalog_of(job.checkpoint)
    file = names.catalog_file(manifest.catalog)
    job.storage.put(job.key(file), read_bytes(os.path.join(job.checkpoint.directory, file)))
    metadata = template_of(catalog).render(manifest.save_id, manifest.tails, manifest.name)
    stored = replace(manifest, metadata_md5=_md5(metadata))
    job.storage.put(job.key(names.stored_manifest(manifest.save_id)), stored.to_json())
    faults.point("flush.manifest")
    key = job.key(names.metadata_file(manifest.scope))
    # In this order: what another run commits after the first line lets the put fail, and what it
    # has committed before lets the check fail.
    before = committed_metadata(job)
    job.check_ownership()
    _check_that_all_segments_are_stored(job)
    if not job.may_commit_now():
        raise Superseded("a newer run has dropped it, and has saved under that name")
    faults.point("flush.commit")
    try:
        _put_metadata(job, key, before, metadata)
    except (CheckpointExists, StorageUnavailable):
        # The answer may have been lost on its way, or an earlier attempt of ours has succeeded.
        if not is_still(job.storage, key, metadata):
            raise
    faults.point("flush.committed")
    return before


def _check_that_all_segments_are_stored(job: FlushJob) -> None:
    """Raise SegmentsGone where a segment is missing, or has another length. Whoever collects
    orphans may take a slow flush for one that was given up. The node manifests that claim the
    segments are removed, so that their nodes, or holders of copies, put them again.
    """
    manifest, stored = job.checkpoint.manifest, stored_sizes(job)
    gone = [one for one in manifest.segments if stored.get(one.file) != one.nbytes]
    if not gone:
        return
    for segment in gone:
        job.storage.delete(job.key(names.stored_segment_table(manifest.save_id, segment.rank)))
    for node in {segment.node for segment in gone}:
        job.storage.delete(job.key(names.stored_node_manifest(manifest.save_id, node)))
    raise SegmentsGone(f"{len(gone)} segments have left storage again ({gone[0].file})")


def _put_metadata(job: FlushJob, key: str, before: bytes, metadata: bytes) -> None:
    """Put `.metadata` if storage still has what it had before: nobody's commit is overwritten. What
    this very save has committed is replaced in any case, unless it is the same.
    """
    if before == metadata:
        return
    is_own = job.checkpoint.manifest.save_id.encode() in before
    if is_own or (before and job.overwrite):
        if not job.storage.swap(key, before, metadata):
            raise StorageUnavailable(job.storage.url, f"another process has committed {key}")
        return
    try:
        job.storage.put(key, metadata, create=True)
    except CheckpointExists:
        if not job.overwrite:
            raise
        raise StorageUnavailable(
            job.storage.url, f"another process has committed {key} at the same moment"
        ) from None


def _is_committed(job: FlushJob, metadata: bytes) -> bool:
    """Return whether storage has the checkpoint; on the committer, with the catalog that it has.
    Planners that hand their metadata over only in `finish` have the coordinator replace the catalog
    after the commit. The manifest is put before `.metadata`: only both together show a commit.
    """
    manifest = job.checkpoint.manifest
    if manifest.save_id.encode() not in metadata:
        return False
    if manifest.committer != job.node:
        return True
    stored = _stored_manifest(job, manifest.save_id)
    return (
        stored is not None
        and stored.catalog == manifest.catalog
        and stored.metadata_md5 == _md5(metadata)
    )


def _md5(metadata: bytes) -> str:
    return hashlib.md5(metadata, usedforsecurity=False).hexdigest()
