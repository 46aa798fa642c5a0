"""What attempts at saving leave on storage, and how it goes again: older attempts, broken-off uploads, whole checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.storage import Storage

_OWN = re.compile(r"(?:node|manifest|segment)-([0-9a-f]{8})(?:-.*)?\.json")
_CATALOG = re.compile(r"catalog-[0-9a-f]+")
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that no checkpoint needs. modified: seconds since the epoch, as storage tells it (0.0: it doesn't)."""

    key: str
    nbytes: int
    modified: float
    save_id: str
    is_unfinished: bool = False

    def remove(self, storage: Storage) -> None:
        """Take it away; that it is gone already is fine."""
        storage.drop_unfinished(self.key) if self.is_unfinished else storage.delete(self.key)


def collect_older_attempts(storage: Storage, manifest: Manifest) -> None:
    """Remove what earlier attempts at a committed checkpoint left under its name, and what our own broke off.

    An attempt is earlier if its manifest says so, or all that it put was put before anything of ours: one that goes on
    meanwhile is left alone.
    """
    found = [one for one in _files(storage, manifest.name) if _is_of_scope(one, manifest.scope)]
    ours = [one.modified for one in found if one.save_id == manifest.save_id and not one.is_unfinished]
    begun = min(ours, default=0.0)
    older = {
        save_id
        for save_id in {one.save_id for one in found} - {manifest.save_id, ""}
        if _is_older(storage, manifest, save_id, [one.modified for one in found if one.save_id == save_id], begun)
    }
    for one in found:
        if one.save_id in older or (one.save_id == manifest.save_id and one.is_unfinished):
            one.remove(storage)
    if manifest.scope == names.COLLECTIVE:
        for one in found:
            is_catalog = not one.save_id and one.key != f"{manifest.name}/{names.catalog_file(manifest.catalog)}"
            if is_catalog and 0.0 < one.modified < begun:
                one.remove(storage)


def delete_checkpoint(storage: Storage, name: str) -> int:
    """Delete everything under a checkpoint's name; returns how many bytes that were.

    What makes it a checkpoint goes first: broken off, this leaves nothing that a reader could take for one.
    """
    found = list(_walk(storage, name))
    for key, _ in sorted(found, key=lambda one: (_METADATA.fullmatch(one[0].rpartition("/")[2]) is None, one[0])):
        storage.delete(key)
    for left in storage.unfinished(name):
        storage.drop_unfinished(left.key)
    return sum(nbytes for _, nbytes in found)


def delete_attempt(storage: Storage, name: str, save_id: str) -> None:
    """Delete what one attempt put under a name, and what attempts have in common if there is no other."""
    # Inner directories first: each goes when its last file does.
    found = sorted(_files(storage, name), key=lambda one: one.key)
    is_alone = {one.save_id for one in found} <= {save_id, ""}
    for one in found:
        if one.save_id == save_id or is_alone:
            one.remove(storage)


def leftovers(storage: Storage, older_than: float) -> list[Leftover]:
    """Files of ours under names without a committed checkpoint, and unfinished uploads, that nobody has touched for so long.

    older_than: seconds. What isn't dcp_mem's is never among them.
    """
    deadline = time.time() - older_than
    names_there = {entry.name for entry in storage.ls("") if entry.is_directory}
    names_there |= {
        left.key.partition("/")[0] for left in storage.unfinished("")
    }  # object stores list no more of these
    found = []
    for name in sorted(name for name in names_there if not name.startswith(".")):
        under = list(_files(storage, name))
        is_committed = any(_METADATA.fullmatch(entry.name) for entry in storage.ls(name))
        is_at_rest = all(0.0 < one.modified < deadline for one in under)
        if not is_committed and is_at_rest:
            found += under
        elif is_committed:
            found += [one for one in under if one.is_unfinished and 0.0 < one.modified < deadline]
    return found


def _files(storage: Storage, name: str) -> Iterator[Leftover]:
    """What attempts have put under a name. save_id: "" for catalogs, which attempts may have in common."""
    for entry in storage.ls(name):
        match = names.SEGMENT.fullmatch(entry.name)
        if match is not None:
            yield Leftover(f"{name}/{entry.name}", entry.nbytes, entry.modified, match[3])
    for entry in storage.ls(f"{name}/{names.OWN}"):
        match = _OWN.fullmatch(entry.name)
        if match is not None or _CATALOG.fullmatch(entry.name):
            save_id = match[1] if match is not None else ""
            yield Leftover(f"{name}/{names.OWN}/{entry.name}", entry.nbytes, entry.modified, save_id)
    for left in storage.unfinished(name):
        match = names.SEGMENT.fullmatch(left.key.rpartition("/")[2])
        if match is not None and left.key.startswith(f"{name}/"):
            yield Leftover(left.key, 0, left.begun, match[3], is_unfinished=True)


def _is_of_scope(one: Leftover, scope: str) -> bool:
    """Whether it may be an attempt of the same ranks: one that saved alone has a file name of its own."""
    match = names.SEGMENT.fullmatch(one.key.rpartition("/")[2])
    return scope == names.COLLECTIVE or (match is not None and names.rank_scope(int(match[1])) == scope)


def _is_older(storage: Storage, ours: Manifest, save_id: str, modified: list[float], begun: float) -> bool:
    try:
        theirs = Manifest.from_json(storage.get(f"{ours.name}/{names.stored_manifest(save_id)}"))
    except (StorageKeyMissing, ManifestInvalid):
        return min(modified) > 0.0 and max(modified) < begun
    return theirs.created < ours.created and theirs.scope == ours.scope


def _walk(storage: Storage, prefix: str) -> Iterator[tuple[str, int]]:
    for entry in storage.ls(prefix):
        key = f"{prefix}/{entry.name}"
        if entry.is_directory:
            yield from _walk(storage, key)
        else:
            yield key, entry.nbytes
