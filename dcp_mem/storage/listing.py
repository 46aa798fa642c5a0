"""What is committed on storage, by its listings and manifests alone: quickly, several at once, and without torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.storage import Entry, Storage

T = TypeVar("T")
R = TypeVar("R")

_AT_ONCE = 16
_END_OF_METADATA = 4096
_METADATA = re.compile(r"(?:__(\d+))?\.metadata")
_OWN_SEGMENT = re.compile(names.SEGMENT.pattern.encode())
_OTHERS_SEGMENT = re.compile(rb"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint under a name that has a `.metadata`. manifest: None where nothing of ours that can be read describes it.

    modified: of its `.metadata`, seconds since the epoch (0.0: storage doesn't tell). nbytes: of its segments, as storage lists
    them. problem: why it can't be loaded from there ("" if it can).
    """

    name: str
    scope: str
    manifest: Manifest | None
    modified: float
    nbytes: int
    problem: str = ""

    @property
    def save_id(self) -> str:
        return "" if self.manifest is None else self.manifest.save_id

    @property
    def created(self) -> float:
        """Seconds since the epoch: when it was saved or, where nobody has written that down, committed."""
        return self.modified if self.manifest is None else self.manifest.created


def checkpoint_names(storage: Storage) -> list[str]:
    """Names under the root that may be checkpoints'."""
    return [entry.name for entry in storage.ls("") if entry.is_directory and not entry.name.startswith(".")]


def stored_under(storage: Storage, name: str, scope: str) -> list[Stored]:
    """The checkpoint that is committed under a name, if there is one.

    Where attempts have left manifests, each is one: `is_committed` tells them apart.
    """
    entries = {entry.name: entry for entry in storage.ls(name)}
    return _of_scope(storage, name, scope, entries, _manifests(storage, name)) if _has(entries, scope) else []


def committed_under(storage: Storage, name: str) -> list[Stored]:
    """What is really committed under a name: the checkpoint of all ranks, or one of each rank that saved alone."""
    entries = {entry.name: entry for entry in storage.ls(name)}
    scopes = [
        names.COLLECTIVE if match[1] is None else names.rank_scope(int(match[1])) for match in _metadata_of(entries)
    ]
    manifests = _manifests(storage, name) if scopes else []
    found = []
    for scope in scopes:
        candidates = _of_scope(storage, name, scope, entries, manifests)
        file = names.metadata_file(scope)
        ours = [
            one
            for one in candidates
            if one.save_id and is_committed(storage, f"{name}/{file}", entries[file].nbytes, one.save_id)
        ]
        found += ours or [_without_manifest(storage, name, scope, entries, candidates)]
    return found


def is_committed(storage: Storage, key: str, nbytes: int, save_id: str) -> bool:
    """Whether this `.metadata` is that of the save: its id stands at the end, and often enough before that.

    Raises StorageKeyMissing.
    """
    end = bytearray(min(nbytes, _END_OF_METADATA))
    storage.read_into(key, nbytes - len(end), [memoryview(end)])
    return save_id.encode() in end or save_id.encode() in storage.get(key)


def get_parsed(storage: Storage, key: str, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the bytes under a key. Raises ManifestInvalid where they are damaged twice; StorageKeyMissing."""
    try:
        return parse(storage.get(key))
    except ManifestInvalid as error:
        log.warning("%s in %s: %s; reading it once more, for it may have changed on its way", key, storage.url, error)
        return parse(storage.get(key))


def in_parallel(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What `act` returns for each item, several at once. Raises what one of them raised.

    In daemons, where a pool's threads would keep the process from ending for as long as storage keeps them waiting.
    """
    results: dict[int, R] = {}
    errors: list[Exception] = []
    left = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    index, item = next(left, (-1, None))
                if index < 0:
                    return
                results[index] = act(item)  # type: ignore[arg-type]
        except Exception as error:
            errors.append(error)

    for worker in [daemon(work) for _ in items[:_AT_ONCE]]:
        worker.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]


def daemon(act: Callable[[], object]) -> threading.Thread:
    """A thread that has begun with `act`, and keeps no process from ending."""
    thread = threading.Thread(target=act, name="dcp_mem-survey", daemon=True)
    thread.start()
    return thread


# -- one name ------------------------------------------------------------------------------------------------------------


def _has(entries: Mapping[str, Entry], scope: str) -> bool:
    return names.metadata_file(scope) in entries


def _metadata_of(entries: Mapping[str, Entry]) -> list[re.Match[str]]:
    return [match for match in map(_METADATA.fullmatch, entries) if match is not None]


def _of_scope(
    storage: Storage, name: str, scope: str, entries: Mapping[str, Entry], manifests: Sequence[Manifest | str]
) -> list[Stored]:
    metadata = entries[names.metadata_file(scope)]
    ours = [manifest for manifest in manifests if isinstance(manifest, Manifest) and manifest.scope == scope]
    if ours:
        return [_described(manifest, metadata, entries) for manifest in ours]
    damaged = [manifest for manifest in manifests if isinstance(manifest, str)]
    return [Stored(name, scope, None, metadata.modified, _nbytes(entries), damaged[0] if damaged else "")]


def _manifests(storage: Storage, name: str) -> list[Manifest | str]:
    """Those that attempts have put there; in the place of one that can't be read, why."""
    listed = [entry.name for entry in storage.ls(f"{name}/{names.OWN}")]
    keys = [file for file in listed if file.startswith("manifest-") and file.endswith(".json")]
    return [_manifest(storage, f"{name}/{names.OWN}/{file}") for file in keys]


def _manifest(storage: Storage, key: str) -> Manifest | str:
    try:
        return get_parsed(storage, key, Manifest.from_json)
    except (ManifestInvalid, StorageKeyMissing) as error:
        return str(error)


def _described(manifest: Manifest, metadata: Entry, entries: Mapping[str, Entry]) -> Stored:
    problem, nbytes = "", 0
    for segment in manifest.segments:
        entry = entries.get(segment.file)
        nbytes += 0 if entry is None else entry.nbytes
        if not problem and (entry is None or entry.nbytes != segment.nbytes):
            there = "missing" if entry is None else f"{entry.nbytes} of {segment.nbytes} bytes"
            problem = f"segment of rank {segment.rank}: {there}"
    return Stored(manifest.name, manifest.scope, manifest, metadata.modified, nbytes, problem)


def _without_manifest(
    storage: Storage, name: str, scope: str, entries: Mapping[str, Entry], candidates: Sequence[Stored]
) -> Stored:
    """A committed checkpoint that no manifest is of: torch's, or one of ours that has lost it."""
    problem = ""
    if any(names.SEGMENT.fullmatch(file) for file in entries):  # or nothing of ours has ever been here
        metadata = storage.get(f"{name}/{names.metadata_file(scope)}")
        damaged = [one.problem for one in candidates if not one.save_id and one.problem]
        if _OWN_SEGMENT.search(metadata):
            problem = (*damaged, "its manifest is missing, and the checksums with it (torch's own readers need none)")[
                0
            ]
        elif not _OTHERS_SEGMENT.search(metadata):
            problem = "its .metadata is damaged"
    return Stored(name, scope, None, entries[names.metadata_file(scope)].modified, _nbytes(entries), problem)


def _nbytes(entries: Mapping[str, Entry]) -> int:
    return sum(entry.nbytes for entry in entries.values() if entry.name.endswith(".distcp"))
