"""Orphans: what attempts at saving leave on storage. They are found and removed here.

Older attempts at a committed checkpoint, uploads that were broken off, and names without any
committed checkpoint. Nothing that a `.metadata` refers to is removed by another attempt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence

from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.policy.order import is_newer
from dcp_mem.storage import OfOneFile, Storage

_OWN = re.compile(r"(?:node|manifest|segment|ticket|rejected)-([0-9a-f]{8})(?:-.*)?\.json")
_CATALOG = re.compile(r"catalog-[0-9a-f]+")
_METADATA = re.compile(r"(?:__\d+)?\.metadata")


COMMIT, DROP = b'"commit"', b'"drop"'
"""Contents of a ticket: the attempt is about to be committed, or its files are being removed."""

MayDrop = Callable[[str, str], bool]


@value_class(kw_only=True, frozen=True)
class Orphan:
    """A file or an unfinished upload that may belong to no checkpoint.

    Attributes:
        modified: Seconds since the epoch, by the storage's clock; 0.0 where it doesn't tell.
        save_id: Of the attempt; "" for a catalog, which several attempts may share.
        is_unfinished: Whether it is an upload that was begun and neither finished nor dropped.
    """

    key: str
    nbytes: int
    modified: float
    save_id: str
    is_unfinished: bool = False

    @property
    def is_ticket(self) -> bool:
        """Whether it only says what becomes of the attempt."""
        return self.key.endswith(names.stored_ticket(self.save_id))

    def remove(self, storage: Storage) -> None:
        """Remove it; one that is gone already is fine.

        Args:
            storage: The storage that it was found on.
        """
        storage.drop_unfinished(self.key) if self.is_unfinished else storage.delete(self.key)


def collect_older_attempts(
    storage: Storage, manifest: Manifest, may_drop: MayDrop = lambda run, save_id: True
) -> None:
    """Remove what older attempts have left under a committed checkpoint's name. Uploads that this
    checkpoint's own attempts have broken off go, too. An attempt is older if its manifest says so,
    or if all that it has put was put before anything of this one: an attempt that goes on meanwhile
    is left alone. The times compared are all of the storage's one clock. `may_drop` is asked with
    the token of an attempt's run ("": unknown) and its save id.
    """
    found = [one for one in _files(storage, manifest.name) if _is_of_scope(one, manifest.scope)]
    own_times = [
        one.modified for one in found if one.save_id == manifest.save_id and not one.is_unfinished
    ]
    begun = min(own_times, default=0.0)
    older = {
        save_id
        for save_id in {one.save_id for one in found} - {manifest.save_id, ""}
        if _is_older(
            storage,
            manifest,
            [one for one in found if one.save_id == save_id],
            begun,
            may_drop,
        )
    }
    for one in found:
        is_left_over = one.save_id == manifest.save_id and one.is_unfinished
        if is_left_over or (one.save_id in older and not _is_drop(storage, one)):
            one.remove(storage)
    others = {one.save_id for one in found} - older - {manifest.save_id, ""}
    if manifest.scope == names.COLLECTIVE and not others:
        own_catalog = f"{manifest.name}/{names.catalog_file(manifest.catalog)}"
        for one in found:
            is_other_catalog = not one.save_id and one.key != own_catalog
            if is_other_catalog and 0.0 < one.modified < begun:
                one.remove(storage)


def delete_checkpoint(storage: Storage, name: str) -> int:
    """Delete everything under a checkpoint's name; return how many bytes. `.metadata` goes first: a
    deletion that is broken off leaves nothing that readers take for a checkpoint.
    """
    found = list(_walk(storage, name))
    for key, _ in sorted(
        found, key=lambda one: (_METADATA.fullmatch(one[0].rpartition("/")[2]) is None, one[0])
    ):
        storage.delete(key)
    for left in storage.unfinished(name):
        storage.drop_unfinished(left.key)
    return sum(nbytes for _, nbytes in found)


def delete_attempt(storage: Storage, name: str, save_id: str) -> None:
    """Delete what one attempt has put under a name; what attempts share if there is no other."""
    found = sorted(_files(storage, name), key=lambda one: one.key)  # inner directories first
    is_only = {one.save_id for one in found if not one.is_ticket} <= {save_id, ""}
    for one in found:
        if (one.save_id == save_id or is_only) and not _is_drop(storage, one):
            one.remove(storage)


def orphans(storage: Storage, older_than: float) -> list[Orphan]:
    """Return dcp_mem's files under names without a committed checkpoint, and unfinished uploads,
    whose last change is so many seconds ago. Others' files are never among them.
    """
    cutoff = time.time() - older_than
    listed = {entry.name for entry in storage.ls("") if entry.is_directory}
    # Object stores list nothing else of a name under which there are only unfinished uploads.
    listed |= {left.key.partition("/")[0] for left in storage.unfinished("") if "/" in left.key}
    found = []
    for name in sorted(name for name in listed if not name.startswith(".")):
        try:
            under = list(_files(storage, name))
            is_committed = any(_METADATA.fullmatch(entry.name) for entry in storage.ls(name))
        except OfOneFile as error:
            log.warning("%s isn't looked through for orphans: %s", name, error)
            continue
        is_at_rest = all(0.0 < one.modified < cutoff for one in under)
        if not is_committed and is_at_rest:
            found += under
        elif is_committed:
            found += [one for one in under if one.is_unfinished and 0.0 < one.modified < cutoff]
    return sorted(found, key=lambda one: one.key)


def _files(storage: Storage, name: str) -> Iterator[Orphan]:
    for prefix, patterns in ((name, (names.SEGMENT,)), (f"{name}/{names.OWN}", (_OWN, _CATALOG))):
        for entry in storage.ls(prefix):
            if any(pattern.fullmatch(entry.name) for pattern in patterns):
                yield Orphan(
                    key=f"{prefix}/{entry.name}",
                    nbytes=entry.nbytes,
                    modified=entry.modified,
                    save_id=_save_id_of(entry.name) or "",
                )
    for left in storage.unfinished(name):
        attempt = _save_id_of(left.key.rpartition("/")[2])
        if attempt is not None and left.key.startswith(f"{name}/"):
            yield Orphan(
                key=left.key, nbytes=0, modified=left.begun, save_id=attempt, is_unfinished=True
            )


def _save_id_of(file: str) -> str | None:
    """Return the save id in a file's name: "" for what attempts share, None for others' files."""
    segment, own = names.SEGMENT.fullmatch(file), _OWN.fullmatch(file)
    if segment is not None:
        return segment[3]
    if own is not None:
        return own[1]
    return "" if _CATALOG.fullmatch(file) or _METADATA.fullmatch(file) else None


def _is_drop(storage: Storage, one: Orphan) -> bool:
    """Return whether it says that an attempt was dropped: whoever has put that has to find it."""
    try:
        return one.is_ticket and storage.get(one.key) == DROP
    except StorageKeyMissing:
        return False
    except OfOneFile:
        return True


def _is_of_scope(one: Orphan, scope: str) -> bool:
    """Return whether it may be an attempt of the same ranks: one that saved alone has its own
    files.
    """
    match = names.SEGMENT.fullmatch(one.key.rpartition("/")[2])
    return scope == names.COLLECTIVE or (
        match is not None and names.rank_scope(int(match[1])) == scope
    )


def _is_older(
    storage: Storage,
    own: Manifest,
    attempt: Sequence[Orphan],
    begun: float,
    may_drop: MayDrop,
) -> bool:
    key = f"{own.name}/{names.stored_manifest(attempt[0].save_id)}"
    try:
        other = Manifest.from_json(storage.get(key))
    except OfOneFile:
        return False
    except (StorageKeyMissing, ManifestInvalid):
        modified = [one.modified for one in attempt]
        is_older = min(modified) > 0.0 and max(modified) < begun
        return is_older and may_drop("", attempt[0].save_id)
    is_older = is_newer(own.place, other.place) and other.scope == own.scope
    return is_older and may_drop(other.run, other.save_id)


def _walk(storage: Storage, prefix: str) -> Iterator[tuple[str, int]]:
    for entry in storage.ls(prefix):
        key = f"{prefix}/{entry.name}"
        if entry.is_directory:
            yield from _walk(storage, key)
        else:
            yield key, entry.nbytes
