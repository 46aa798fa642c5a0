"""What the nodes put of a checkpoint before its commit: each its segments, and then what it knows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dcp_mem import faults
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt, StorageKeyMissing
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.uploading import Outgoing, upload_all
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.manifest import ItemTable, Manifest, NodeManifest, items_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.job import Held
from dcp_mem.storage import Storage
from dcp_mem.values import Segment


@dataclass(frozen=True, slots=True)
class FlushJob:
    """What a flush works on.

    lost: nodes that won't do their part any more, so that others do it. damaged: segments whose copies here have turned out
    damaged; it is added to, and kept from one attempt to the next. was_put: this node's part was there already, and a newer
    checkpoint is durable.
    """

    held: Held
    node: str
    storage: Storage
    overwrite: bool
    meter: Meter = field(default_factory=Meter)
    throttle: Throttle = field(default_factory=lambda: Throttle(None))
    lost: frozenset[str] = frozenset()
    damaged: set[str] = field(default_factory=set)
    was_put: bool = False

    @property
    def commits(self) -> bool:
        """Whether the commit is this node's to make, or anybody's."""
        return self.held.manifest.committer in {self.node, *self.lost}

    def key(self, file: str) -> str:
        return f"{self.held.name}/{file}"


@dataclass(frozen=True, slots=True)
class Parts:
    """What storage listed of a checkpoint beside its segments: it comes after them."""

    manifest: Manifest
    listed: frozenset[str]

    def has_node(self, node: str) -> bool:
        """Whether all segments of the node are there."""
        return self._has(names.stored_node_manifest(self.manifest.save_id, node))

    def has_segment(self, rank: int) -> bool:
        """Whether the segment was put there in place of its node."""
        return self._has(names.stored_segment_table(self.manifest.save_id, rank))

    def missing(self) -> list[str]:
        """Nodes whose part isn't there yet."""
        return [node for node in self.manifest.nodes if not self.has_node(node)]

    def other_attempts(self) -> Iterator[str]:
        """Save ids of other attempts under the same name that have come to their commit."""
        for file in self.listed:
            save_id = file.removeprefix("manifest-").removesuffix(".json")
            if file == names.stored_manifest(save_id).rpartition("/")[2] and save_id != self.manifest.save_id:
                yield save_id

    def _has(self, key: str) -> bool:
        return key.rpartition("/")[2] in self.listed


def parts_of(job: FlushJob) -> Parts:
    return Parts(job.held.manifest, frozenset(entry.name for entry in job.storage.ls(job.key(names.OWN))))


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
    """Upload segments that lie here; those that storage has whole already are only read for their checksums."""
    stored, catalog = stored_sizes(job), catalog_of(job.held)
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


def stored_sizes(job: FlushJob) -> dict[str, int]:
    """By segment, how many bytes storage has of it."""
    return {entry.name: entry.nbytes for entry in job.storage.ls(job.held.name)}


def drop_part(job: FlushJob) -> None:
    """Take away what this node has put of a checkpoint that it can't finish, unless that is done, by whomever."""
    parts = parts_of(job)
    if parts.has_node(job.node) or committed_save_id(job.storage, job.held.manifest) == job.held.manifest.save_id:
        return
    for segment in job.held.manifest.of_node(job.node):
        if not parts.has_segment(segment.rank):
            job.storage.drop_unfinished(job.key(segment.file))
            job.storage.delete(job.key(segment.file))


def committed_save_id(storage: Storage, manifest: Manifest) -> str:
    """Save id of the attempt that storage holds committed under this name ("" where there is none of ours)."""
    return manifest.save_id if manifest.save_id.encode() in committed_metadata(storage, manifest) else ""


def committed_metadata(storage: Storage, manifest: Manifest) -> bytes:
    """The `.metadata` that storage has under this name; empty where there is none."""
    try:
        return storage.get(f"{manifest.name}/{names.metadata_file(manifest.scope)}")
    except StorageKeyMissing:
        return b""


def catalog_of(held: Held) -> Catalog:
    """What the checkpoint consists of. Raises SegmentCorrupt where memory has lost that."""
    try:
        return read_catalog(held.directory, held.manifest.catalog)
    except FileNotFoundError:
        raise SegmentCorrupt(held.name, 0, "memory", "its catalog is gone") from None
    except ManifestInvalid as error:
        raise SegmentCorrupt(held.name, 0, "memory", str(error)) from None
