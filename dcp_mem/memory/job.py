"""A job's directory in a node's memory: which checkpoints lie there, how they come and how they go.

A checkpoint exists from the moment its manifest is renamed into place, and not before; it ceases to
exist when its manifest is removed, before anything else of it is. Directories are `0700`, files
`0600`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from dcp_mem.common import files
from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.errors import DcpMemError, ManifestInvalid
from dcp_mem.format import names
from dcp_mem.format.catalog import catalog_key
from dcp_mem.format.history import skipped_row
from dcp_mem.format.manifest import (
    FlushRecord,
    ItemTable,
    Manifest,
    Rejection,
    ReplicationRecord,
    StripeRecord,
)
from dcp_mem.format.metadata_template import MetadataTemplate
from dcp_mem.memory.catalogs import has_stock_metadata, put_stock_metadata
from dcp_mem.memory.checkpoint import (
    LocalCheckpoint,
    check_unchanged,
    checksums_files,
    files_in,
    local_checkpoint,
)
from dcp_mem.memory.generations import Generations, raised
from dcp_mem.memory.links import drop_dead_links
from dcp_mem.memory.locks import end_lease, in_turn, leased_alone, open_leased
from dcp_mem.memory.records import LocalHistory
from dcp_mem.memory.recycling import drop_free_slots, remove_unlisted, retire
from dcp_mem.memory.root import node_id, open_root, private_directory
from dcp_mem.policy.order import UNNUMBERED, SaveNumber, newest_first

_SLACK = 64 << 20
_MOST_COPIED = 16 << 20
"""Bytes of the largest catalog that each checkpoint gets a copy of."""
_TRIES = 5
_REJECTED = "rejected: "
"""Begins the error of a flush that was skipped for a rejection."""


class JobMemory:
    """The directory `<memory root>/<job>` of this node, made where it is missing.

    Any thread may call anything at any time: threads of one process meet here as processes do, by
    renames and leases. What is kept of manifests is looked up anew where the file is another.
    """

    def __init__(self, root: str, job: str) -> None:
        self.root = open_root(root)
        self.job = job
        self.node = node_id(root)
        self.directory = private_directory(os.path.join(root, job))
        self.slots = private_directory(os.path.join(self.directory, ".slots"))
        self.links = os.path.join(self.directory, ".links")
        self.history = LocalHistory(self.directory)
        self.generations = Generations(self.directory)
        self._manifests: dict[str, tuple[tuple[int, ...], Manifest]] = {}
        self._damaged: dict[str, str] = {}  # by path of the manifest, what is wrong with it

    # -- what lies here ---------------------------------------------------------------------------

    def checkpoints(self) -> list[LocalCheckpoint]:
        """Return every complete checkpoint, newest first."""
        generations = self.generations.known()
        found: list[LocalCheckpoint] = []
        for directory in self._checkpoint_directories():
            found += self._complete_in(directory, generations)
        if len(self._manifests) > len(found):
            paths = {checkpoint.manifest_path for checkpoint in found}
            for path in list(self._manifests):  # a copy: another thread may be looking as well
                if path not in paths:
                    self._manifests.pop(path, None)
        return newest_first(found, attrgetter("manifest.place"))

    def manifests(self, *, as_agreed: bool = False) -> list[Manifest]:
        """Return the manifests of all complete checkpoints, in no order; quicker than these.

        `as_agreed`: with the generations that their saves agreed on, whatever their runs got since.
        """
        generations = {} if as_agreed else self.generations.known()
        found: list[Manifest] = []
        for directory in self._checkpoint_directories():
            found += self._manifests_in(
                directory, files_in(f"{directory}/{names.OWN}"), generations
            )
        return found

    def find(self, name: str) -> list[LocalCheckpoint]:
        """Return the complete checkpoints of that name, one for each scope."""
        return self._complete_in(self.checkpoint_directory(name), self.generations.known())

    def damaged_manifests(self, scope: str) -> dict[str, str]:
        """Return why checkpoints that were looked for can't be told of, by name."""
        file = "/" + names.manifest_file(scope)
        return {
            os.path.basename(path.removesuffix(file)): why
            for path, why in list(self._damaged.items())
            if path.endswith(file) and os.path.exists(path)
        }

    def checkpoint_directory(self, name: str) -> str:
        """Return where a checkpoint of that name lies."""
        return os.path.join(self.directory, name)

    def count_segments(self, rank: int) -> int:
        """Return how many segments of a rank lie in checkpoints here, complete or not."""
        prefix = names.segment_file(rank, "").partition("-")[0] + "-"
        return sum(
            entry.startswith(prefix)
            for directory in self._checkpoint_directories()
            for entry in files_in(directory)
        )

    def lists(self, path: str) -> bool:
        """Return whether the file is a segment, or parity, of a complete checkpoint."""
        directory, file = os.path.split(path)
        manifests = self._manifests_in(directory, files_in(f"{directory}/{names.OWN}"), {})
        return names.save_id_of(file) in {manifest.save_id for manifest in manifests}

    def allocated_bytes(self) -> int:
        """Return the memory that the job occupies."""
        return files.allocated_bytes(self.directory)

    def free_bytes(self) -> int:
        """Return the free space of the tmpfs."""
        return files.free_bytes(self.directory)

    def _checkpoint_directories(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return [one.path for one in entries if one.name[0] != "." and one.is_dir()]
        except FileNotFoundError:  # the memory of a job that has ended was reclaimed
            return []

    def _complete_in(self, directory: str, generations: Mapping[str, int]) -> list[LocalCheckpoint]:
        listed = files_in(f"{directory}/{names.OWN}")
        manifests = self._manifests_in(directory, listed, generations)
        return [local_checkpoint(directory, manifest, listed) for manifest in manifests]

    def _manifests_in(
        self, directory: str, listed: Sequence[str], generations: Mapping[str, int]
    ) -> list[Manifest]:
        found = []
        for file in sorted(listed):
            if file.startswith("manifest") and file.endswith(".json"):
                manifest = self._read(f"{directory}/{names.OWN}/{file}")
                if manifest is not None:
                    found.append(raised(manifest, generations) if generations else manifest)
        return found

    def _read(self, path: str) -> Manifest | None:
        """Read a manifest; None where its checkpoint has left memory meanwhile, or is damaged."""
        try:
            version = files.version(os.stat(path))
            known = self._manifests.get(path)
            if known is None or known[0] != version:  # every save looks through all of them
                known = self._manifests[path] = version, Manifest.from_json(files.read_bytes(path))
        except FileNotFoundError:
            self._manifests.pop(path, None)
            return None
        except ManifestInvalid as error:
            self._damaged[path] = str(error)
            log.warning("passing over %s: %s", path, error)
            return None
        self._damaged.pop(path, None)
        return known[1]

    # -- the order of checkpoints -----------------------------------------------------------------

    def newest_number(
        self, manifests: Iterable[Manifest] | None = None, *, without_run: str | None = None
    ) -> SaveNumber:
        """Return the greatest number that this memory knows of."""
        found = self.manifests() if manifests is None else manifests
        numbers = [one.number for one in found if one.run != without_run]
        for run, generation in self.generations.known().items():
            if run != without_run:
                numbers.append(SaveNumber(generation))
        return max(numbers, default=UNNUMBERED)

    # -- staging and completing -------------------------------------------------------------------

    def make_checkpoint_directory(self, name: str) -> str:
        """Make a checkpoint's directory where it is missing, and return it."""
        directory = private_directory(self.checkpoint_directory(name))
        private_directory(os.path.join(directory, names.OWN))
        return directory

    def add_segment(self, name: str, add: Callable[[str], None]) -> None:
        """Have a segment put into a checkpoint's directory, while no other process tidies that.

        All ranks of the node may add theirs at the same time.
        """
        for _ in range(_TRIES - 1):
            # The directory may just have been removed as empty.
            with contextlib.suppress(FileNotFoundError):
                self._add_segment(name, add)
                return
        self._add_segment(name, add)

    def _add_segment(self, name: str, add: Callable[[str], None]) -> None:
        directory = self.make_checkpoint_directory(name)
        with in_turn(directory, is_shared=True):
            add(directory)

    def publish(self, manifest: Manifest, *, sealed: bool = False) -> None:
        """Put the manifest in place: from here on the checkpoint is COMPLETE on this node.

        Where its segments are `sealed`, all of this node's have to lie there. No process takes one
        away meanwhile: what takes away looks for the manifest in a turn of its own.
        """
        directory = self.checkpoint_directory(manifest.name)
        path = os.path.join(directory, names.manifest_file(manifest.scope))
        with in_turn(directory):
            lost = self._lost(manifest, directory) if sealed else ()
            if lost:
                raise DcpMemError(
                    f"{manifest.name} isn't saved: {', '.join(lost)} has left memory before all was"
                    f" there, as a process of the job broke off in the save: save again"
                )
            version = files.version(files.write_atomically(path, manifest.to_json()))
            self._manifests[path] = version, manifest

    def _lost(self, manifest: Manifest, directory: str) -> list[str]:
        """Return the files of this node's segments that don't lie in the checkpoint's directory."""
        own = {one.file for one in manifest.of_node(self.node)}
        return sorted(own.difference(files_in(directory)))

    def promote(self, checkpoint: LocalCheckpoint) -> bool:
        """Have a checkpoint flushed that was to stay in memory.

        Returns False where it has left memory, or was replaced, meanwhile, or is locked just now.
        """
        path = checkpoint.manifest_path
        promoted = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            descriptor = open_leased(path)  # under the lease it can't be evicted
        except (FileNotFoundError, BlockingIOError):
            return False
        try:
            with in_turn(checkpoint.directory):
                files.write_atomically(
                    promoted, replace(checkpoint.manifest, persist=True).to_json()
                )
                files.swap_names(promoted, path)
                replaced = Manifest.from_json(files.read_bytes(promoted))
                is_same = replaced.save_id == checkpoint.manifest.save_id
                # A save of this name may have completed just now; it doesn't look what it replaces.
                if not is_same:
                    files.swap_names(promoted, path)
            return is_same
        except FileNotFoundError:
            return False
        finally:
            files.remove(promoted)
            end_lease(descriptor)
            os.close(descriptor)

    def put_stock_metadata(
        self, manifest: Manifest, template: MetadataTemplate | None = None
    ) -> None:
        """Put `.metadata` beside a complete checkpoint, unless it has left memory by now."""
        directory = self.checkpoint_directory(manifest.name)
        with contextlib.suppress(FileNotFoundError), in_turn(directory):
            found = [
                (one.manifest.save_id, one.manifest.catalog) for one in self.find(manifest.name)
            ]
            # The catalog may have been replaced since: then another call follows.
            if (manifest.save_id, manifest.catalog) in found:
                put_stock_metadata(directory, manifest, template)

    # -- what is added to a complete checkpoint ---------------------------------------------------

    def record_flush(self, checkpoint: LocalCheckpoint, record: FlushRecord) -> None:
        """Write down how a flush goes; nothing, where the checkpoint has left memory meanwhile."""
        path = os.path.join(checkpoint.directory, names.flush_file(checkpoint.manifest.scope))
        try:
            with in_turn(checkpoint.directory):  # who tidies removes temporary files
                files.write_atomically(path, record.to_json())
        except FileNotFoundError:
            return
        # If it has left just now, the record would keep its directory.
        if not os.path.exists(checkpoint.manifest_path):
            self.tidy(checkpoint.directory)

    def record_replication(self, manifest: Manifest, record: ReplicationRecord) -> None:
        """Write down what became of the copies; nothing, where the checkpoint has left memory."""
        with contextlib.suppress(FileNotFoundError):
            self._add(manifest, {names.replication_file(manifest.scope): record.to_json()})

    def reject(self, checkpoint: LocalCheckpoint, why: str) -> None:
        """Mark a checkpoint as not to be resumed from; it isn't flushed any more, either.

        Raises FileNotFoundError.
        """
        manifest, was_pending = checkpoint.manifest, checkpoint.pending
        mark = Rejection(manifest.save_id, why, time.time())
        self._add(manifest, {names.rejection_file(manifest.save_id): mark.to_json()})
        if was_pending:
            skipped = replace(checkpoint.flush, outcome=Outcome.SKIPPED, error=_REJECTED + why)
            self.record_flush(checkpoint, skipped)

    def accept(self, checkpoint: LocalCheckpoint) -> None:
        """Take back a checkpoint's rejection; what was skipped for it awaits its flush again."""
        save_id, flush = checkpoint.manifest.save_id, checkpoint.flush
        files.remove(os.path.join(checkpoint.directory, names.rejection_file(save_id)))
        if flush.outcome == Outcome.SKIPPED and flush.error.startswith(_REJECTED):
            self.record_flush(checkpoint, FlushRecord(save_id=save_id))

    def add_checksums(self, manifest: Manifest, checksums: Mapping[str, ItemTable]) -> None:
        """Put checksums beside segments that have none so far.

        Checksums are made once: others later would bless what has changed meanwhile.

        Raises FileNotFoundError, SegmentCorrupt.
        """
        held = self._held(manifest)
        new = {
            file: table
            for file, table in checksums.items()
            if not check_unchanged(held, file, table, "memory")
        }
        self._add(manifest, checksums_files(manifest, new))

    def _held(self, manifest: Manifest) -> LocalCheckpoint:
        """Return the checkpoint as it lies here. Raises FileNotFoundError."""
        for one in self.find(manifest.name):
            if one.manifest.save_id == manifest.save_id:
                return one
        directory = self.checkpoint_directory(manifest.name)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)

    def copy_catalog(self, checkpoint: LocalCheckpoint) -> None:
        """Give a checkpoint a catalog of its own, in the place of the file that several share.

        Otherwise one flipped bit would damage all checkpoints of a plan. Large ones stay shared.

        Raises FileNotFoundError.
        """
        file = names.catalog_file(checkpoint.manifest.catalog)
        path = os.path.join(checkpoint.directory, file)
        facts = os.stat(path)
        if facts.st_nlink == 1 or facts.st_size > _MOST_COPIED:
            return
        data = files.read_bytes(path)
        if catalog_key(data) == checkpoint.manifest.catalog:
            self._add(checkpoint.manifest, {file: data})

    def add_copy(
        self,
        manifest: Manifest,
        file: str,
        checksums: Mapping[str, ItemTable],
        seal: Callable[[str], None],
        stripe: StripeRecord | None = None,
    ) -> None:
        """Add a copy of another node's segment, or parity: its description first, then the file.

        Raises FileNotFoundError.
        """
        described = checksums_files(manifest, checksums)
        if stripe is not None:
            described[names.stripe_file(file)] = stripe.to_json()
        self._add(manifest, described, lambda directory: seal(f"{directory}/{file}"))

    def _add(
        self,
        manifest: Manifest,
        described: Mapping[str, bytes],
        seal: Callable[[str], None] = lambda directory: None,
    ) -> None:
        directory = self.checkpoint_directory(manifest.name)
        with in_turn(directory):
            self._held(manifest)
            for path, data in described.items():
                files.write_atomically(os.path.join(directory, path), data)
            seal(directory)

    def drop_parity(self, manifest: Manifest, keep: Collection[str]) -> None:
        """Make free slots of a checkpoint's parity that lies here, but for the files to keep."""
        for checkpoint in self.find(manifest.name):
            if checkpoint.manifest.save_id == manifest.save_id:
                for file in checkpoint.segment_files():
                    if names.PARITY.fullmatch(file) and file not in keep:
                        retire(checkpoint.segment_path(file), self.slots)

    # -- leaving memory ---------------------------------------------------------------------------

    def evict(
        self, checkpoint: LocalCheckpoint, why: str = "", outcome: Outcome = Outcome.SKIPPED
    ) -> bool:
        """Take a checkpoint out of memory.

        1. Take an exclusive lease on the manifest: readers and flushers hold shared ones.
        2. Write down in the history that the checkpoint leaves.
        3. Remove the manifest: now the checkpoint doesn't exist any more.
        4. Make free slots of its segments, and remove its other files.

        `why`: the reason that the history gives, if it was still to be flushed. Returns False, with
        nothing done, where somebody reads or flushes it.
        """
        path = checkpoint.manifest_path
        with leased_alone(path) as descriptor:
            if descriptor is None:
                return not os.path.exists(path)
            if files.lies_at(path, os.fstat(descriptor).st_ino):  # else another one was faster
                self.history.add_leaving(checkpoint, why, outcome)
                files.remove(path)
                self._recycle(checkpoint)
        return True

    def retire_replaced(self, checkpoint: LocalCheckpoint) -> None:
        """Recycle a checkpoint whose manifest a newer save's has just replaced.

        Readers and flushers of its segments have leases, under which no slot is claimed.
        """
        why = "replaced by a newer save of the same name"
        self.history.add_leaving(checkpoint, why, Outcome.SUPERSEDED)
        self._recycle(checkpoint)

    def _recycle(self, checkpoint: LocalCheckpoint) -> None:
        metadata = names.metadata_file(checkpoint.manifest.scope)
        files.remove(os.path.join(checkpoint.directory, metadata))  # it names what goes now
        for file in checkpoint.segment_files():
            retire(checkpoint.segment_path(file), self.slots)
        self.tidy(checkpoint.directory)

    def sweep(self) -> None:
        """Make free slots of segments that no manifest lists: remains of incomplete saves.

        A segment that a live process stages or holds is left alone.
        """
        drop_dead_links(self.links)
        for directory in self._checkpoint_directories():
            self.tidy(directory, show=True)

    def tidy(self, directory: str, *, show: bool = False) -> None:
        """Remove from a checkpoint's directory what its manifests don't list.

        `show`: put the `.metadata` for stock readers where it is missing: a kill may have come
        before it.
        """
        with contextlib.suppress(FileNotFoundError), in_turn(directory):
            generations, own = self.generations.known(), files_in(f"{directory}/{names.OWN}")
            manifests = self._manifests_in(directory, own, generations)
            remove_unlisted(directory, self.slots, manifests, own)
            for checkpoint in self._complete_in(directory, generations) if show else ():
                if has_stock_metadata(directory, checkpoint.manifest):
                    continue
                try:
                    put_stock_metadata(directory, checkpoint.manifest)
                except DcpMemError as error:
                    what = "%s has no .metadata for torch's own readers: %s"
                    log.warning(what, checkpoint.name, error)

    def trim(self, nbytes: int) -> None:
        """Drop free slots where the job occupies much more than `nbytes`.

        A larger world may have left them.
        """
        if self.allocated_bytes() > nbytes + nbytes // 8 + _SLACK:
            self.drop_free_slots()

    def drop_free_slots(self) -> None:
        """Give the memory of free slots back to the system, but for those that a process holds."""
        drop_free_slots(self.slots)

    def note_skipped(self, name: str, why: str) -> None:
        """Write down a save that never began."""
        # It has the number of the save before it, and so its place in the order.
        self.history.add(skipped_row(name, self.newest_number(), time.time(), why))


def jobs_in(root: str) -> list[str]:
    """Return the names of the jobs that have a directory in a memory root, in order."""
    if not os.path.isdir(root):
        return []
    open_root(root)
    with os.scandir(root) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(
        name
        for name in found
        if not name.startswith(".") and os.path.isdir(os.path.join(root, name, ".slots"))
    )


def last_use(directory: str) -> float:
    """Return when a job last saved, in seconds since the epoch; 0.0 where its directory is gone."""
    times = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it has gone just now
                    times.append(entry.stat(follow_symlinks=False).st_mtime)
        return max(times, default=os.stat(directory).st_mtime)
    except FileNotFoundError:
        return 0.0
