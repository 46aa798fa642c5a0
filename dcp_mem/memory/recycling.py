"""Segments that no checkpoint needs become free slots; files that no manifest lists are removed."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence

from dcp_mem.common import files
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.checkpoint import files_in, own_files
from dcp_mem.memory.locks import in_turn, is_leased, leased_alone


def retire(path: str, slots: str) -> None:
    """Make a free slot of a segment, by rename; one that is gone already is fine.

    A segment that other checkpoints share loses its name only: with its last name it becomes a
    slot. Who claims slots leaves out those with several names, should one be given just now.

    A process that still reads or flushes the segment has a lease, under which no slot is claimed.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.lstat(path).st_nlink > 1:
            os.unlink(path)
        else:
            os.rename(path, os.path.join(slots, f"{uuid.uuid4().hex[:12]}.slot"))


def remove_unlisted(
    directory: str, slots: str, manifests: Sequence[Manifest], own: Sequence[str]
) -> None:
    """Remove from a checkpoint's directory what its manifests don't list.

    1. Segments of other attempts become free slots, unless a live process stages or holds them.
    2. Where some are staged or held, end here: their process needs the files around them.
    3. Other files that no manifest lists are removed, and the directory where nothing is left.

    `directory`: the checkpoint's; the caller holds its turn. `own`: names of the files under
    `.dcp_mem`, as they were before the manifests were read. What has come since is left alone: a
    save may publish at any time.
    """
    save_ids = {manifest.save_id for manifest in manifests}
    # Listed later than `own`: a save puts its segments in place before anything else.
    entries = files_in(directory)
    segments = {entry: save_id for entry in entries if (save_id := names.save_id_of(entry))}
    unlisted = [entry for entry, save_id in segments.items() if save_id not in save_ids]
    are_gone = [_retire_unless_leased(os.path.join(directory, one), slots) for one in unlisted]
    if not all(are_gone):
        return
    here = [entry for entry in segments if entry not in unlisted]
    described = set().union(*(own_files(one, here) for one in manifests))
    _remove_others(os.path.join(directory, names.OWN), own, described)
    metadata = (names.metadata_file(one.scope) for one in manifests)
    _remove_others(directory, entries, {*segments, names.OWN, *metadata})
    if not manifests:
        files.remove_directory_if_empty(os.path.join(directory, names.OWN))
        files.remove_directory_if_empty(directory)


def drop_free_slots(slots: str) -> None:
    """Give the memory of free slots back to the system, but for those that a process holds."""
    with contextlib.suppress(FileNotFoundError), in_turn(slots):
        for entry in files_in(slots):
            path = os.path.join(slots, entry)
            with leased_alone(path, os.O_RDWR) as descriptor:
                if descriptor is not None:
                    files.remove(path)
                    files.give_back_memory(descriptor)


def _retire_unless_leased(path: str, slots: str) -> bool:
    """Make a free slot of a segment; return False where a process stages or holds it."""
    try:
        if is_leased(path):
            return False
    except FileNotFoundError:
        return True
    retire(path, slots)
    return True


def _remove_others(directory: str, entries: Sequence[str], keep: set[str]) -> None:
    for entry in entries:
        if entry not in keep:
            files.remove(os.path.join(directory, entry))
