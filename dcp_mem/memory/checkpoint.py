"""One complete checkpoint as it lies in this node's memory: its manifest, records and files."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome, Segment
from dcp_mem.errors import ManifestInvalid, SegmentCorrupt
from dcp_mem.format import names
from dcp_mem.format.manifest import (
    FlushRecord,
    ItemTable,
    Manifest,
    NodeManifest,
    ReplicationRecord,
    StripeRecord,
    why_rejected,
)
from dcp_mem.policy.facts import SharedBytes

Record = TypeVar("Record", FlushRecord, ReplicationRecord)
_FileFacts = tuple[str, os.stat_result]


@value_class(kw_only=True)
class LocalCheckpoint:
    """A complete checkpoint in this node's memory."""

    manifest: Manifest
    directory: str
    flush: FlushRecord
    replication: ReplicationRecord  # what became of its copies on other nodes
    rejected: str = ""  # why it is not to be resumed from; "" if nobody has rejected it

    @property
    def name(self) -> str:
        """The checkpoint id."""
        return self.manifest.name

    @property
    def pending(self) -> bool:
        """Whether it is meant to reach storage, and still may."""
        ended = (Outcome.DURABLE, Outcome.SKIPPED)
        return self.manifest.persist and not self.rejected and self.flush.outcome not in ended

    @property
    def manifest_path(self) -> str:
        """Path of its manifest: the file exists for as long as the checkpoint does."""
        return os.path.join(self.directory, names.manifest_file(self.manifest.scope))

    @property
    def flushing_path(self) -> str:
        """Path of the file on which the process that flushes this attempt holds a lease."""
        return os.path.join(self.directory, names.flushing_file(self.manifest.save_id))

    def segment_path(self, file: str) -> str:
        """Return the path of a segment, or of parity."""
        return os.path.join(self.directory, file)

    def segment_files(self) -> list[str]:
        """Return the names of the segments, and of the parity, that lie here."""
        return [
            entry
            for entry in files_in(self.directory)
            if names.save_id_of(entry) == self.manifest.save_id
        ]

    def segments_here(
        self, node: str, damaged: Collection[int] = ()
    ) -> tuple[list[Segment], dict[int, str]]:
        """Return the segments that lie here whole, and by rank why others that should don't.

        Nothing is opened or leased. `damaged`: ranks whose segments are of no use here.
        """
        here, lacking, listed = list[Segment](), dict[int, str](), set(files_in(self.directory))
        for segment in self.manifest.segments:
            facts = _facts(self.segment_path(segment.file)) if segment.file in listed else None
            if segment.rank in damaged:
                why = "it is damaged"
            elif facts is not None and facts.st_size >= segment.nbytes:
                here.append(segment)
                continue
            elif facts is not None:
                why = f"{facts.st_size} of {segment.nbytes} bytes"
            elif segment.node == node:
                why = f"{segment.file}: {os.strerror(errno.ENOENT)}"
            else:
                continue
            lacking[segment.rank] = f"segment of rank {names.home_rank(segment.rank)}: {why}"
        return here, lacking

    def local_nbytes(self) -> int:
        """Return the bytes that lie here: own segments, and copies or parity of other nodes'.

        Segments that other checkpoints share don't count: their bytes stay when this one leaves.
        """
        sizes = dict(zip(self.manifest.segments.rank, self.manifest.segments.nbytes, strict=True))
        total = 0
        for file, facts in self._unshared_and_shared()[0]:
            is_segment = names.SEGMENT.fullmatch(file)
            total += sizes.get(names.rank_of(file), 0) if is_segment else facts.st_size
        return total

    def slot_bytes(self) -> tuple[int, tuple[SharedBytes, ...]]:
        """Return the memory of the slots that nobody shares, and of each that others share.

        A slot may be much larger than the segment that lies in it.
        """
        unshared, shared = self._unshared_and_shared()
        return sum(_occupied(facts) for _, facts in unshared), tuple(
            SharedBytes(facts.st_ino, _occupied(facts), facts.st_nlink) for _, facts in shared
        )

    def _unshared_and_shared(self) -> tuple[list[_FileFacts], list[_FileFacts]]:
        found = [(file, _facts(self.segment_path(file))) for file in self.segment_files()]
        here = [(file, facts) for file, facts in found if facts is not None]
        return (
            [one for one in here if one[1].st_nlink <= 1],
            [one for one in here if one[1].st_nlink > 1],
        )

    def records_nbytes(self) -> int:
        """Return the memory of all files here but segments and parity."""
        own = os.path.join(self.directory, names.OWN)
        paths = [
            *(os.path.join(own, file) for file in files_in(own)),
            os.path.join(self.directory, names.metadata_file(self.manifest.scope)),
        ]
        return sum(_occupied(facts) for facts in map(_facts, paths) if facts is not None)

    def stripes(self) -> dict[str, StripeRecord]:
        """Return the parity that lies here, by file, without what is damaged."""
        found = {}
        for file in filter(names.PARITY.fullmatch, self.segment_files()):
            path = os.path.join(self.directory, names.stripe_file(file))
            try:
                record = StripeRecord.from_json(files.read_bytes(path))
            except (FileNotFoundError, ManifestInvalid) as error:
                log.warning("passing over %s: %s", self.segment_path(file), error)
                continue
            facts = _facts(self.segment_path(file))
            if facts is not None and facts.st_size >= record.stripe.nbytes:
                found[file] = record
        return found


def local_checkpoint(
    directory: str, manifest: Manifest, listed: Collection[str]
) -> LocalCheckpoint:
    """Return the checkpoint of a manifest that lies in a directory, with its records.

    `listed`: names of the files beside the manifest. Others aren't looked for.
    """
    save_id, own = manifest.save_id, [f"{names.OWN}/{file}" for file in listed]
    flush, replication = names.flush_file(manifest.scope), names.replication_file(manifest.scope)
    is_rejected = names.rejection_file(save_id) in own
    return LocalCheckpoint(
        manifest=manifest,
        directory=directory,
        flush=_record(FlushRecord, f"{directory}/{flush}", manifest)
        if flush in own
        else FlushRecord(save_id=save_id),
        replication=_record(ReplicationRecord, f"{directory}/{replication}", manifest)
        if replication in own
        else ReplicationRecord(save_id=save_id),
        rejected=rejection_in(directory, save_id) if is_rejected else "",
    )


def rejection_in(directory: str, save_id: str) -> str:
    """Return why a checkpoint in memory was rejected; "" if it wasn't."""
    try:
        return why_rejected(
            files.read_bytes(os.path.join(directory, names.rejection_file(save_id)))
        )
    except FileNotFoundError:
        return ""


def _record(kind: type[Record], path: str, manifest: Manifest) -> Record:
    """Return what was recorded of this very save; a blank record where there is nothing."""
    try:
        record = kind.from_json(files.read_bytes(path))
    except (FileNotFoundError, ManifestInvalid):
        return kind(save_id=manifest.save_id)
    return record if record.save_id == manifest.save_id else kind(save_id=manifest.save_id)


def checksums_of(checkpoint: LocalCheckpoint, file: str) -> ItemTable:
    """Return the items and checksums that lie beside a segment, or beside its parity."""
    path = os.path.join(checkpoint.directory, names.checksums_file(file))
    manifest = NodeManifest.from_json(files.read_bytes(path))
    if file not in manifest.tables:
        raise ManifestInvalid(f"the checksums of {file} are those of another segment")
    return manifest.tables[file]


def has_checksums(checkpoint: LocalCheckpoint, file: str) -> bool:
    """Return whether checksums lie beside a segment."""
    return os.path.exists(os.path.join(checkpoint.directory, names.checksums_file(file)))


def check_unchanged(checkpoint: LocalCheckpoint, file: str, found: ItemTable, source: str) -> bool:
    """Make sure that a segment has the checksums that were made once it was complete.

    Returns False where none have been made so far. Raises SegmentCorrupt.
    """
    try:
        known = checksums_of(checkpoint, file)
    except FileNotFoundError:
        return False
    except ManifestInvalid as error:
        why = f"its checksums: {error}"
    else:
        if np.array_equal(known.crc32c, found.crc32c):
            return True
        is_alike = len(known.crc32c) == len(found.crc32c)
        wrong = np.count_nonzero(known.crc32c != found.crc32c) if is_alike else "some"
        why = f"{wrong} of {len(found.crc32c)} blocks of {file} have changed since they were saved"
    raise SegmentCorrupt(checkpoint.name, names.rank_of(file), source, why)


def checksums_files(manifest: Manifest, checksums: Mapping[str, ItemTable]) -> dict[str, bytes]:
    """Return the files that hold segments' checksums in memory, by path in the directory."""
    node_of = dict(zip(manifest.segments.rank, manifest.segments.node, strict=True))
    return {
        names.checksums_file(file): NodeManifest(
            save_id=manifest.save_id, node=node_of[names.rank_of(file)], tables={file: table}
        ).to_json()
        for file, table in checksums.items()
    }


def own_files(manifest: Manifest, here: Collection[str]) -> set[str]:
    """Return the names, under `.dcp_mem`, of all that belongs to a complete checkpoint."""
    parity = list(filter(names.PARITY.fullmatch, here))
    checked = [segment.file for segment in manifest.segments] if parity else here
    paths = [
        names.manifest_file(manifest.scope),
        names.flush_file(manifest.scope),
        names.own_metadata_file(manifest.save_id, manifest.catalog),
        names.flushing_file(manifest.save_id),
        names.catalog_file(manifest.catalog),
        names.replication_file(manifest.scope),
        names.rejection_file(manifest.save_id),
        *map(names.checksums_file, checked),
        *map(names.stripe_file, parity),
    ]
    return {path.rpartition("/")[2] for path in paths}


def files_in(directory: str) -> Sequence[str]:
    """Return the names in a directory; none where it is gone."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return ()


def _facts(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _occupied(facts: os.stat_result) -> int:
    return max(facts.st_blocks * 512, facts.st_size)
