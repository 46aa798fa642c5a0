"""Bytes that storage has already: parts of earlier checkpoints that haven't changed since (ADR 25).

An agent remembers the parts that it has put. A part with the same hash in the newest durable
checkpoint is copied on storage, instead of being sent. Every checkpoint stays whole by itself.
Nothing here can fail a flush: where storage can't copy, or the source has gone, bytes are sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import HISTORIES, Outcome, Segment
from dcp_mem.errors import DcpMemError, ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.checksums import BLOCK, hasher
from dcp_mem.format.history import from_csv
from dcp_mem.format.manifest import Manifest, NodeManifest, StoredParts
from dcp_mem.policy.order import Place, newest_first
from dcp_mem.storage import OfOneFile, Source, Storage
from dcp_mem.storage.listing import get_parsed, is_committed

_MOST_REMEMBERED = 4
"""Checkpoints: the last ones may still wait for other nodes' parts, or be deleted by now."""
_MOST_TRIED = 4
"""Checkpoints of the history on storage that are looked at."""
_TRUST_SECONDS = 24 * 3600.0
"""For so long bytes on storage are taken to be what was put there, where a copy proves nothing."""
_READ_NBYTES = 4 * BLOCK


@value_class(kw_only=True)
class StoredSegment:
    """A segment of an earlier checkpoint on storage."""

    key: str
    nbytes: int
    parts: StoredParts
    is_trusted: bool  # whether it needn't be read before it is copied, if a copy proves nothing

    @property
    def source(self) -> Source:
        return Source(self.key, self.nbytes, self.parts.etag)

    def may_have(self, number: int, crc32c: int) -> bool:
        """Return whether a part has this checksum: else it needn't be hashed."""
        known = self.parts.crc32c
        return number < len(known) and known[number] == crc32c

    def has(self, number: int, digest: bytes, nbytes: int) -> bool:
        """Return whether a part has this hash and length."""
        start, stop = self._range(number)
        return digest != b"" and self.parts.hash_of(number) == digest and stop - start == nbytes

    def still_has(self, storage: Storage, number: int, digest: bytes) -> bool:
        """Read the part from storage, and compare its hash: it may have rotted there."""
        (start, stop), found = self._range(number), hasher()
        buffer = memoryview(bytearray(min(_READ_NBYTES, max(0, stop - start))))
        try:
            while start < stop:
                piece = buffer[: stop - start]
                if storage.read_into(self.key, start, [piece]) != len(piece):
                    return False
                found.update(piece)
                start += len(piece)
        except DcpMemError:
            return False
        if found.digest() != digest:
            text = "%s in %s isn't what was put there any more: its bytes are sent again"
            log.warning(text, self.key, storage.url)
            return False
        return True

    def _range(self, number: int) -> tuple[int, int]:
        start = number * self.parts.part_nbytes
        return start, min(start + self.parts.part_nbytes, self.nbytes)


@value_class(kw_only=True)
class _Put:
    """Segments of a checkpoint that were put, by the part of their names that doesn't change."""

    name: str
    save_id: str
    scope: str
    run: str
    place: Place
    segments: Mapping[str, tuple[str, int, StoredParts]]


class Reuse:
    """The earlier checkpoints that a job's storage can copy from, kept from flush to flush."""

    def __init__(self) -> None:
        self._remembered: list[_Put] = []
        self._has_looked = False

    def note(self, manifest: Manifest, parts: Mapping[str, StoredParts]) -> None:
        """Remember the segments of a checkpoint that this node has put."""
        if not parts:
            return
        others = [one for one in self._remembered if one.save_id != manifest.save_id]
        known = newest_first([_put_of(manifest, parts), *others], lambda one: one.place)
        self._remembered = known[:_MOST_REMEMBERED]

    def sources(
        self, storage: Storage, manifest: Manifest, segments: Sequence[Segment]
    ) -> dict[str, StoredSegment]:
        """Return what segments may be copied from, by file: the newest checkpoint of the same ranks
        that is durable and not rejected. An agent that has put nothing so far finds it by the
        history on storage.
        """
        try:
            if not self._remembered and not self._has_looked:
                self._remembered = _of_history(storage, manifest, segments)
            self._has_looked = True
            found = next(
                (one for one in self._remembered if _is_usable(storage, manifest, one)), None
            )
        except (DcpMemError, ValueError) as error:  # then everything is sent
            log.debug("nothing to copy from in %s: %s", storage.url, error)
            return {}
        return {} if found is None else _matching(found, manifest, segments)


def stem_of(file: str) -> str:
    """Return the part of a segment's name that is the same in every checkpoint."""
    return file.rpartition("-")[0]


def _put_of(manifest: Manifest, parts: Mapping[str, StoredParts]) -> _Put:
    sizes = {one.file: one.nbytes for one in manifest.segments if one.file in parts}
    return _Put(
        name=manifest.name,
        save_id=manifest.save_id,
        scope=manifest.scope,
        run=manifest.run,
        place=manifest.place,
        segments={stem_of(file): (file, sizes[file], parts[file]) for file in sizes},
    )


def _matching(
    found: _Put, manifest: Manifest, segments: Sequence[Segment]
) -> dict[str, StoredSegment]:
    is_own = found.run == manifest.run != ""
    matching = {}
    for segment in segments:
        if stem_of(segment.file) in found.segments:
            file, nbytes, parts = found.segments[stem_of(segment.file)]
            age = time.time() - parts.checked
            matching[segment.file] = StoredSegment(
                key=f"{found.name}/{file}",
                nbytes=nbytes,
                parts=parts,
                is_trusted=is_own and 0 <= age < _TRUST_SECONDS,
            )
    return matching


def _is_usable(storage: Storage, manifest: Manifest, one: _Put) -> bool:
    """Return whether it is of the same ranks, committed and not rejected."""
    if one.save_id == manifest.save_id or one.scope != manifest.scope:
        return False
    file = names.metadata_file(one.scope)
    try:
        entries = {entry.name: entry for entry in storage.ls(one.name)}
        if file not in entries or not is_committed(
            storage, f"{one.name}/{file}", entries[file].nbytes, one.save_id
        ):
            return False
        rejection = names.rejection_file(one.save_id).rpartition("/")[2]
        return rejection not in {entry.name for entry in storage.ls(f"{one.name}/{names.OWN}")}
    except (StorageKeyMissing, OfOneFile):
        return False


# -- by what is on storage -------------------------------------------------------------------------


def _of_history(storage: Storage, manifest: Manifest, segments: Sequence[Segment]) -> list[_Put]:
    """Return the newest durable checkpoint with hashes of its parts, put by any process."""
    try:
        rows = from_csv(storage.get(names.job_file(HISTORIES)))
    except (StorageKeyMissing, ManifestInvalid, OfOneFile):
        return []
    durable = [row for row in rows if row.outcome == Outcome.DURABLE and row.save_id]
    for row in newest_first(durable, lambda one: one.place)[:_MOST_TRIED]:
        found = _read(storage, row.name, row.save_id, {stem_of(one.file) for one in segments})
        if found is not None and _is_usable(storage, manifest, found):
            return [found]
    return []


def _read(storage: Storage, name: str, save_id: str, stems: set[str]) -> _Put | None:
    try:
        key = f"{name}/{names.stored_manifest(save_id)}"
        manifest = get_parsed(storage, key, Manifest.from_json)
        nodes = {one.node for one in manifest.segments if stem_of(one.file) in stems}
        parts: dict[str, StoredParts] = {}
        for node in nodes:
            key = f"{name}/{names.stored_node_manifest(save_id, node)}"
            parts.update(get_parsed(storage, key, NodeManifest.from_json).parts)
    except (StorageKeyMissing, ManifestInvalid, OfOneFile):
        return None
    return _put_of(manifest, parts) if parts else None
