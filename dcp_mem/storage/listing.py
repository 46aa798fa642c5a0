"""The committed checkpoints on storage, by listings and manifests alone, without torch."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dcp_mem.common.log import log, log_once
from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, Rejection, why_rejected
from dcp_mem.policy.order import UNNUMBERED, Place
from dcp_mem.storage import Entry, OfOneFile, Storage
from dcp_mem.storage.posix import link_target, name_behind_link

T = TypeVar("T")

_END_OF_METADATA = 4096
_OF_THE_DISK = "lost+found"
_NO_MANIFEST = "its manifest is missing, and the checksums with it (torch's own readers need none)"
_REJECTION = re.compile(r"rejected-([0-9a-f]{8})\.json")
_METADATA = re.compile(r"(?:__(\d+))?\.metadata")
_OWN_SEGMENT = re.compile(names.SEGMENT.pattern.encode())
_OTHERS_SEGMENT = re.compile(rb"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on storage: a name and scope that has a `.metadata`."""

    name: str
    scope: str
    manifest: Manifest | None  # None where no manifest that can be read describes it
    # of its `.metadata`, seconds since the epoch; 0.0 where the storage doesn't tell
    modified: float
    nbytes: int
    metadata: str
    problem: str = ""  # why it can't be loaded from there; "" if it can
    rejected: str = ""  # why it is not to be resumed from; "" if nobody has rejected it
    is_renamed: bool = False  # whether it was saved under another name, and copied or moved since

    @property
    def save_id(self) -> str:
        """Save id; "" where there is no manifest."""
        return "" if self.manifest is None else self.manifest.save_id

    @property
    def created(self) -> float:
        """When it was saved or, without a manifest, committed; seconds since the epoch."""
        return self.modified if self.manifest is None else self.manifest.created

    @property
    def place(self) -> Place:
        """The checkpoint's place in the order of the job's checkpoints."""
        if self.manifest is None:
            return Place(
                number=UNNUMBERED,
                time=self.modified,
                stored_at=self.modified,
                is_foreign=True,
                key=(self.name, self.save_id),
            )
        return replace(self.manifest.place, stored_at=self.modified)


def checkpoint_names(storage: Storage) -> list[str]:
    """Return the names under the root that may be checkpoints.

    Among them are links that lead a checkpoint out of the root: it can't be read, and that is said.
    """
    return [
        entry.name
        for entry in storage.ls("")
        if (entry.is_directory or (entry.what and _leads_astray(storage.url, entry.name)))
        and not entry.name.startswith(".")
        and entry.name != _OF_THE_DISK
    ]


def _leads_astray(url: str, name: str) -> bool:
    """Return whether a name is a link to a checkpoint that isn't beside it, or may have been one.

    What a link that leads nowhere has led to is told by its name, which ends in a number.
    """
    if link_target(url, name) is None or name_behind_link(url, name) != name:
        return False
    if not os.path.exists(os.path.join(url, name)):
        return name[-1:].isdecimal()
    files = (names.metadata_file(scope) for scope in (names.COLLECTIVE, names.rank_scope(0)))
    return any(os.path.exists(os.path.join(url, name, file)) for file in files)


def stored_under(storage: Storage, name: str, scope: str) -> list[StoredCheckpoint]:
    """Return what may be committed under a name, or the name that a link there stands for.

    Nothing where there is no `.metadata`. There is one for each manifest that attempts have left:
    `is_committed` tells them apart. Where others have put files there as well, the `.metadata` may
    be theirs: then it is looked at.
    """
    name = name_behind_link(storage.url, name)
    try:
        entries = {entry.name: entry for entry in storage.ls(name)}
        if not _has(entries, scope):
            return []
        manifests, rejections = _manifests(storage, name)
        if _are_ours(entries):
            return _of_scope(storage, name, scope, entries, manifests, rejections)
        return _committed(storage, name, scope, entries, manifests, rejections)
    except StorageKeyMissing:  # it has gone meanwhile
        return []
    except OfOneFile as error:
        _warn(name, error)
        return [unreadable(name, error, scope)]


def _warn(key: str, error: OfOneFile) -> None:
    """Say once that a checkpoint may be passed over which nobody has found to be damaged."""
    log_once(f"{key} can't be read: {error}", logging.WARNING)


def _are_ours(files: Iterable[str]) -> bool:
    """Return whether all files of a checkpoint's directory have names that only dcp_mem gives."""
    return all(
        file == names.OWN or names.SEGMENT.fullmatch(file) or _METADATA.fullmatch(file)
        for file in files
    )


def committed_under(storage: Storage, name: str) -> list[StoredCheckpoint]:
    """Return what is committed under a name, or the name that a link there stands for.

    Returns the checkpoint of all ranks, or one for each rank that saved alone.
    """
    name = name_behind_link(storage.url, name)
    entries = {entry.name: entry for entry in storage.ls(name)}
    scopes = [
        names.COLLECTIVE if match[1] is None else names.rank_scope(int(match[1]))
        for match in _metadata_of(entries)
    ]
    manifests, rejections = _manifests(storage, name) if scopes else ([], {})
    return [
        one
        for scope in scopes
        for one in _committed(storage, name, scope, entries, manifests, rejections)
    ]


def unreadable(name: str, error: OfOneFile, scope: str = names.COLLECTIVE) -> StoredCheckpoint:
    """Return what stands for a checkpoint that can't be read, while storage itself can."""
    return StoredCheckpoint(
        name=name,
        scope=scope,
        manifest=None,
        modified=0.0,
        nbytes=0,
        metadata="",
        problem=str(error),
    )


def _committed(
    storage: Storage,
    name: str,
    scope: str,
    entries: Mapping[str, Entry],
    manifests: Sequence[Manifest | str],
    rejections: Mapping[str, str],
) -> list[StoredCheckpoint]:
    """Return the checkpoint whose `.metadata` this is: one of ours, or another writer's."""
    candidates = _of_scope(storage, name, scope, entries, manifests, rejections)
    file = names.metadata_file(scope)
    ours = [
        one
        for one in candidates
        if one.manifest is not None
        and (
            _shows_commit(entries[file], one.manifest)
            or is_committed(storage, f"{name}/{file}", entries[file].nbytes, one.save_id)
        )
    ]
    return ours or [_without_manifest(storage, name, scope, entries, candidates)]


def is_committed(storage: Storage, key: str, nbytes: int, save_id: str) -> bool:
    """Return whether a `.metadata` is that of a save: then it contains the save id.

    The id mostly stands near the end; the whole file is read only where it doesn't.

    Raises StorageKeyMissing.
    """
    end = bytearray(min(nbytes, _END_OF_METADATA))
    storage.read_into(key, nbytes - len(end), [memoryview(end)])
    return save_id.encode() in end or save_id.encode() in storage.get(key)


def _shows_commit(metadata: Entry, manifest: Manifest) -> bool:
    """Tell whether the listing alone proves that the `.metadata` is that of a save."""
    return bool(manifest.metadata_md5) and metadata.md5 == manifest.metadata_md5


def mark_rejected(storage: Storage, manifest: Manifest, why: str) -> None:
    """Mark a committed checkpoint as not to be resumed from."""
    mark = Rejection(manifest.save_id, why, time.time())
    storage.put(f"{manifest.name}/{names.rejection_file(manifest.save_id)}", mark.to_json())


def remove_rejection(storage: Storage, manifest: Manifest) -> None:
    """Take back the mark of a rejected checkpoint."""
    storage.delete(f"{manifest.name}/{names.rejection_file(manifest.save_id)}")


def rejected_saves(storage: Storage, name: str) -> frozenset[str]:
    """Return the ids of those saves of a name that are marked as rejected: one request."""
    return frozenset(_rejected_in(entry.name for entry in storage.ls(f"{name}/{names.OWN}")))


def _rejected_in(files: Iterable[str]) -> list[str]:
    """Return the save ids whose rejections are among the files."""
    return [match[1] for match in map(_REJECTION.fullmatch, files) if match is not None]


def get_parsed(storage: Storage, key: str, parse: Callable[[bytes], T]) -> T:
    """Return what `parse` makes of the bytes under a key; damaged ones are read once more.

    `parse`: raises ManifestInvalid where the bytes are damaged. Raises ManifestInvalid,
    StorageKeyMissing.
    """
    try:
        return parse(storage.get(key))
    except ManifestInvalid as error:
        log.warning(
            "%s in %s: %s; reading it once more, for it may have changed on its way",
            key,
            storage.url,
            error,
        )
        return parse(storage.get(key))


# -- one name -------------------------------------------------------------------------------------


def _has(entries: Mapping[str, Entry], scope: str) -> bool:
    return names.metadata_file(scope) in entries


def _metadata_of(entries: Mapping[str, Entry]) -> list[re.Match[str]]:
    return [match for match in map(_METADATA.fullmatch, entries) if match is not None]


def _of_scope(
    storage: Storage,
    name: str,
    scope: str,
    entries: Mapping[str, Entry],
    manifests: Sequence[Manifest | str],
    rejections: Mapping[str, str],
) -> list[StoredCheckpoint]:
    metadata = entries[names.metadata_file(scope)]
    ours = [
        manifest
        for manifest in manifests
        if isinstance(manifest, Manifest) and manifest.scope == scope
    ]
    if ours:
        return [
            replace(
                _described(manifest, name, metadata, entries),
                rejected=rejections.get(manifest.save_id, ""),
            )
            for manifest in ours
        ]
    damaged = [manifest for manifest in manifests if isinstance(manifest, str)]
    problem = damaged[0] if damaged else ""
    return [_undescribed(name, scope, entries, problem)]


def _manifests(storage: Storage, name: str) -> tuple[list[Manifest | str], dict[str, str]]:
    """Return the manifests that attempts have put, and why saves were rejected, by save id.

    For a manifest that can't be read, the reason stands in its place.
    """
    listed = [entry.name for entry in storage.ls(f"{name}/{names.OWN}")]
    keys = [file for file in listed if file.startswith("manifest-") and file.endswith(".json")]
    return (
        [_manifest(storage, f"{name}/{names.OWN}/{file}") for file in keys],
        {save_id: _rejection(storage, name, save_id) for save_id in _rejected_in(listed)},
    )


def _rejection(storage: Storage, name: str, save_id: str) -> str:
    try:
        data = storage.get(f"{name}/{names.rejection_file(save_id)}")
    except StorageKeyMissing:
        return ""
    except OfOneFile as error:  # that it is rejected is known
        return str(error)
    return why_rejected(data)


def _manifest(storage: Storage, key: str) -> Manifest | str:
    try:
        return get_parsed(storage, key, Manifest.from_json)
    except (ManifestInvalid, StorageKeyMissing) as error:
        return str(error)
    except OfOneFile as error:
        _warn(key, error)
        return str(error)


def _described(
    manifest: Manifest, name: str, metadata: Entry, entries: Mapping[str, Entry]
) -> StoredCheckpoint:
    problem, nbytes = "", 0
    for segment in manifest.segments:
        entry = entries.get(segment.file)
        nbytes += 0 if entry is None else entry.nbytes
        if not problem and (entry is None or entry.what or entry.nbytes != segment.nbytes):
            sizes = "" if entry is None else f"{entry.nbytes} of {segment.nbytes} bytes"
            there = "missing" if entry is None else entry.what or sizes
            problem = f"segment of rank {names.home_rank(segment.rank)}: {there}"
    return StoredCheckpoint(
        name=name,
        scope=manifest.scope,
        manifest=replace(manifest, name=name),
        is_renamed=manifest.name != name,
        modified=metadata.modified,
        nbytes=nbytes,
        metadata=metadata.identity,
        problem=problem,
    )


def _without_manifest(
    storage: Storage,
    name: str,
    scope: str,
    entries: Mapping[str, Entry],
    candidates: Sequence[StoredCheckpoint],
) -> StoredCheckpoint:
    """Return a committed checkpoint without a manifest: torch's, or one that has lost it."""
    problem = ""
    # Without segments of ours, it is torch's.
    if any(names.SEGMENT.fullmatch(file) for file in entries):
        metadata = storage.get(f"{name}/{names.metadata_file(scope)}")
        damaged = [one.problem for one in candidates if not one.save_id and one.problem]
        named = {match[0].decode() for match in _OWN_SEGMENT.finditer(metadata)}
        if named - entries.keys():
            problem = _lost(named, entries)
        elif named:
            problem = (*damaged, _NO_MANIFEST)[0]
        elif not _OTHERS_SEGMENT.search(metadata):
            problem = "its .metadata is damaged"
    return _undescribed(name, scope, entries, problem)


def _lost(named: Collection[str], entries: Mapping[str, Entry]) -> str:
    """Return what to say of a checkpoint whose `.metadata` names segments that aren't there."""
    missing = sorted(file for file in named if file not in entries)
    return f"lost: {len(missing)} of {len(named)} segments are missing ({missing[0]})"


def _undescribed(
    name: str, scope: str, entries: Mapping[str, Entry], problem: str
) -> StoredCheckpoint:
    metadata = entries[names.metadata_file(scope)]
    return StoredCheckpoint(
        name=name,
        scope=scope,
        manifest=None,
        modified=metadata.modified,
        nbytes=_nbytes(entries),
        metadata=metadata.identity,
        problem=problem,
    )


def _nbytes(entries: Mapping[str, Entry]) -> int:
    return sum(entry.nbytes for entry in entries.values() if entry.name.endswith(".distcp"))
