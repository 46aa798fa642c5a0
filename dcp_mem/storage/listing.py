"""The committed checkpoints on storage, by listings and manifests alone, without torch."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dcp_mem.common.log import log, log_once
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest, Rejection, why_rejected
from dcp_mem.policy.order import UNNUMBERED, Place
from dcp_mem.storage import Entry, OfOneFile, Storage, StoredFiles
from dcp_mem.storage.posix_paths import link_target, name_behind_link

T = TypeVar("T")

_END_OF_METADATA = 4096
_MOST_KEYS = 3_000
"""A listing of more keys is slower than a few short ones side by side."""
_OF_THE_DISK = "lost+found"
_NO_MANIFEST = "its manifest is missing, and the checksums with it (torch's own readers need none)"
_REJECTION = re.compile(r"rejected-([0-9a-f]{8})\.json")
_METADATA = re.compile(r"(?:__(\d+))?\.metadata")
_OWN_SEGMENT = re.compile(names.SEGMENT.pattern.encode())
_OTHERS_SEGMENT = re.compile(rb"__\d+_\d+\.distcp")


@value_class(kw_only=True)
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


def checkpoint_names(storage: StoredFiles) -> list[str]:
    """Return the names that may be checkpoints, and links that lead one out of the root."""
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


def stored_under(storage: StoredFiles, name: str, scope: str) -> list[StoredCheckpoint]:
    """Return what may be committed under a name, or the name that a link there stands for.

    Nothing where there is no `.metadata`. There is one for each manifest that attempts have left:
    `is_committed` tells them apart. Where others have put files there as well, the `.metadata` may
    be theirs: then it is looked at.
    """
    name = name_behind_link(storage.url, name)
    try:
        directory = _Directory(storage, name)
        if names.metadata_file(scope) not in directory.entries:
            return []
        look = directory.of_scope if _are_ours(directory.entries) else directory.committed
        return look(scope)
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


def committed_under(storage: StoredFiles, name: str) -> list[StoredCheckpoint]:
    """Return what all ranks, or some alone, have committed under a name, or a link's target."""
    directory = _Directory(storage, name_behind_link(storage.url, name))
    found = [match for match in map(_METADATA.fullmatch, directory.entries) if match is not None]
    scopes = [
        names.COLLECTIVE if match[1] is None else names.rank_scope(int(match[1])) for match in found
    ]
    return [one for scope in scopes for one in directory.committed(scope)]


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


def is_committed(storage: StoredFiles, key: str, nbytes: int, save_id: str) -> bool:
    """Return whether a `.metadata` is a save's: its id mostly stands near the end."""
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


def get_parsed(storage: StoredFiles, key: str, parse: Callable[[bytes], T]) -> T:
    """Return what `parse` makes of the bytes under a key; damaged ones are read once more."""
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


class _Directory:
    """What lies under one name: files and, once they are asked for, manifests and rejections."""

    def __init__(self, storage: StoredFiles, name: str) -> None:
        self._storage, self._name = storage, name
        self.entries = {entry.name: entry for entry in storage.ls(name)}
        self._known: tuple[list[Manifest | str], dict[str, str]] | None = None

    # No cached_property: before Python 3.12 it has one lock for all objects of a class, and names
    # are looked at by many threads.
    def _records(self) -> tuple[list[Manifest | str], dict[str, str]]:
        """Return the manifests that attempts have put, or for one that can't be read the reason;
        and by save id, why saves were rejected.
        """
        if self._known is None:
            storage, own = self._storage, f"{self._name}/{names.OWN}"
            files = [entry.name for entry in storage.ls(own)]
            manifests = [
                _manifest(storage, f"{own}/{file}")
                for file in files
                if file.startswith("manifest-") and file.endswith(".json")
            ]
            rejected = _rejected_in(files)
            rejections = {one: _rejection(storage, self._name, one) for one in rejected}
            self._known = manifests, rejections
        return self._known

    def of_scope(self, scope: str) -> list[StoredCheckpoint]:
        """Return what the manifests of a scope describe; where none can be read, one without."""
        metadata = self.entries[names.metadata_file(scope)]
        manifests, rejections = self._records()
        read = [one for one in manifests if isinstance(one, Manifest)]
        if ours := [manifest for manifest in read if manifest.scope == scope]:
            return [
                replace(
                    _described(manifest, self._name, metadata, self.entries),
                    rejected=rejections.get(manifest.save_id, ""),
                )
                for manifest in ours
            ]
        damaged = [manifest for manifest in manifests if isinstance(manifest, str)]
        return [self._undescribed(scope, damaged[0] if damaged else "")]

    def committed(self, scope: str) -> list[StoredCheckpoint]:
        """Return the checkpoint whose `.metadata` this is: one of ours, or another writer's."""
        candidates = self.of_scope(scope)
        file = names.metadata_file(scope)
        metadata, key = self.entries[file], f"{self._name}/{file}"
        ours = [
            one
            for one in candidates
            if one.manifest is not None
            and (
                _shows_commit(metadata, one.manifest)
                or is_committed(self._storage, key, metadata.nbytes, one.save_id)
            )
        ]
        return ours or [self._without_manifest(scope, candidates)]

    def _without_manifest(
        self, scope: str, candidates: Sequence[StoredCheckpoint]
    ) -> StoredCheckpoint:
        """Return a committed checkpoint without a manifest: torch's, or one that has lost it."""
        problem = ""
        # Without segments of ours, it is torch's.
        if any(names.SEGMENT.fullmatch(file) for file in self.entries):
            metadata = self._storage.get(f"{self._name}/{names.metadata_file(scope)}")
            damaged = [one.problem for one in candidates if not one.save_id and one.problem]
            named = {match[0].decode() for match in _OWN_SEGMENT.finditer(metadata)}
            if named - self.entries.keys():
                problem = _lost(named, self.entries)
            elif named:
                problem = (*damaged, _NO_MANIFEST)[0]
            elif not _OTHERS_SEGMENT.search(metadata):
                problem = "its .metadata is damaged"
        return self._undescribed(scope, problem)

    def _undescribed(self, scope: str, problem: str) -> StoredCheckpoint:
        metadata = self.entries[names.metadata_file(scope)]
        files = [entry for entry in self.entries.values() if entry.name.endswith(".distcp")]
        return StoredCheckpoint(
            name=self._name,
            scope=scope,
            manifest=None,
            modified=metadata.modified,
            nbytes=sum(entry.nbytes for entry in files),
            metadata=metadata.identity,
            problem=problem,
        )


def _rejection(storage: StoredFiles, name: str, save_id: str) -> str:
    try:
        data = storage.get(f"{name}/{names.rejection_file(save_id)}")
    except StorageKeyMissing:
        return ""
    except OfOneFile as error:  # that it is rejected is known
        return str(error)
    return why_rejected(data)


def _manifest(storage: StoredFiles, key: str) -> Manifest | str:
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


def _lost(named: Collection[str], entries: Mapping[str, Entry]) -> str:
    """Return what to say of a checkpoint whose `.metadata` names segments that aren't there."""
    missing = sorted(file for file in named if file not in entries)
    return f"lost: {len(missing)} of {len(named)} segments are missing ({missing[0]})"


# -- many names -----------------------------------------------------------------------------------


class Snapshot:
    """A storage as it is listed once, for who looks at many checkpoints and changes nothing.

    One listing serves all checkpoints, where it isn't too long.
    """

    def __init__(self, storage: Storage) -> None:
        self.url, self.get, self.read_into = storage.url, storage.get, storage.read_into
        self._storage, self._directories = storage, _by_directory(storage.tree(_MOST_KEYS))

    def ls(self, prefix: str) -> list[Entry]:
        if self._directories is None:
            return self._storage.ls(prefix)
        return self._directories.get(prefix, [])


def _by_directory(tree: Sequence[tuple[str, Entry]] | None) -> dict[str, list[Entry]] | None:
    """Return a tree's entries by their directory, with directories as entries of those above."""
    if tree is None:
        return None
    found: dict[str, list[Entry]] = {"": []}
    for directory, entry in tree:
        _add_directory(found, directory)
        found[directory].append(entry)
    return found


def _add_directory(found: dict[str, list[Entry]], directory: str) -> None:
    if directory not in found:
        found[directory] = []
        above, _, name = directory.rpartition("/")
        _add_directory(found, above)
        found[above].append(Entry(name, 0, is_directory=True))
