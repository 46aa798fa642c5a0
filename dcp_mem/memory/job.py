"""A job's directory in a node's memory: checkpoints, free slots, and what became of earlier checkpoints.

A checkpoint exists here from the moment its manifest is renamed into place, and not before. Directories are `0700`,
files `0600`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dcp_mem import files
from dcp_mem.errors import DcpMemError, ManifestInvalid, MemoryBudgetExceeded
from dcp_mem.events import log
from dcp_mem.format import histories, names
from dcp_mem.format.histories import Line, line_of
from dcp_mem.format.manifest import (
    FlushRecord,
    ItemTable,
    Manifest,
    NodeManifest,
    ReplicationRecord,
    StripeRecord,
)
from dcp_mem.format.pickled import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import read_catalog
from dcp_mem.memory.locks import end_lease, in_turn, is_leased, open_leased, try_lease
from dcp_mem.memory.root import node_id, open_root, private_directory
from dcp_mem.values import HISTORIES

Record = TypeVar("Record", FlushRecord, ReplicationRecord)
_HISTORY_LINES = 1_000
_SLACK = 64 << 20
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Held:
    """A complete checkpoint in this node's memory, and how far its flush and its copies on other nodes have come."""

    manifest: Manifest
    directory: str
    flush: FlushRecord
    replication: ReplicationRecord

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def pending(self) -> bool:
        """It is meant to reach storage and hasn't (yet)."""
        return self.manifest.persist and self.flush.outcome not in ("durable", "skipped")

    @property
    def manifest_path(self) -> str:
        return os.path.join(self.directory, names.manifest_file(self.manifest.scope))

    @property
    def flushing_path(self) -> str:
        """Whoever flushes this attempt holds a lease on it."""
        return os.path.join(self.directory, names.flushing_file(self.manifest.save_id))

    def segment_path(self, file: str) -> str:
        return os.path.join(self.directory, file)


class JobMemory:
    """The directory `<memory root>/<job>` of this node."""

    def __init__(self, root: str, job: str) -> None:
        self.root = open_root(root)
        self.job = job
        self.node = node_id(root)
        self.directory = private_directory(os.path.join(root, job))
        self.slots = private_directory(os.path.join(self.directory, ".slots"))
        self._manifests: dict[str, tuple[tuple[int, ...], Manifest]] = {}

    # -- what is there ------------------------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """Every complete checkpoint, newest first."""
        found = [held for directory in self._checkpoint_directories() for held in self._held_in(directory)]
        there = {held.manifest_path for held in found}
        for path in list(self._manifests):  # a copy: another thread may be looking as well
            if path not in there:
                self._manifests.pop(path, None)
        return sorted(found, key=lambda held: held.manifest.created, reverse=True)

    def find(self, name: str) -> list[Held]:
        """The complete checkpoints of that name (one for each scope)."""
        return list(self._held_in(self.checkpoint_directory(name)))

    def checkpoint_directory(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def count_segments(self, rank: int) -> int:
        """How many segments of a rank lie in checkpoints here, complete or not."""
        prefix = names.segment_file(rank, "").partition("-")[0] + "-"
        return sum(
            entry.startswith(prefix) for directory in self._checkpoint_directories() for entry in _listdir(directory)
        )

    def lists(self, path: str) -> bool:
        """Whether this is a segment of a complete checkpoint, or parity of such."""
        directory, file = os.path.split(path)
        return names.save_id_of(file) in {held.manifest.save_id for held in self._held_in(directory)}

    def allocated_bytes(self) -> int:
        return files.allocated_bytes(self.directory)

    def free_bytes(self) -> int:
        return files.free_bytes(self.directory)

    def _checkpoint_directories(self) -> Iterator[str]:
        with os.scandir(self.directory) as entries:
            yield from (entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir())

    def _held_in(self, directory: str) -> Iterator[Held]:
        try:
            listed = os.listdir(os.path.join(directory, names.OWN))
        except FileNotFoundError:
            return
        for entry in sorted(listed):
            if _is_manifest(entry):
                held = self._read(directory, os.path.join(directory, names.OWN, entry))
                if held is not None:
                    yield held

    def _read(self, directory: str, path: str) -> Held | None:
        try:
            version = _version(os.stat(path))
            known = self._manifests.get(path)
            if known is None or known[0] != version:  # every save looks through all of them
                known = self._manifests[path] = version, Manifest.from_json(files.read_bytes(path))
            manifest = known[1]
        except FileNotFoundError:
            self._manifests.pop(path, None)
            return None  # evicted meanwhile
        except ManifestInvalid as error:
            log.warning("passing over %s: %s", path, error)
            return None
        return Held(
            manifest,
            directory,
            _record(FlushRecord, os.path.join(directory, names.flush_file(manifest.scope)), manifest),
            _record(ReplicationRecord, os.path.join(directory, names.replication_file(manifest.scope)), manifest),
        )

    def nbytes_of(self, held: Held) -> int:
        """Bytes that lie here: segments of this node's ranks, and copies or parity of others'."""
        here = self._segments_of(held)
        ranks = {names.rank_of(file) for file in here if names.SEGMENT.fullmatch(file)}
        segments = held.manifest.segments
        own = sum(nbytes for rank, nbytes in zip(segments.rank, segments.nbytes, strict=True) if rank in ranks)
        return own + sum(_size(held.segment_path(file)) for file in here if names.PARITY.fullmatch(file))

    def _segments_of(self, held: Held) -> list[str]:
        """Names of the segments, and of the parity, of an attempt that lie in its directory."""
        return [entry for entry in _listdir(held.directory) if names.save_id_of(entry) == held.manifest.save_id]

    def stripes_of(self, held: Held) -> dict[str, StripeRecord]:
        """The parity of a checkpoint that lies here, by file; what is damaged is left out."""
        found = {}
        for file in filter(names.PARITY.fullmatch, self._segments_of(held)):
            try:
                record = StripeRecord.from_json(files.read_bytes(os.path.join(held.directory, names.stripe_file(file))))
            except (FileNotFoundError, ManifestInvalid) as error:
                log.warning("passing over %s: %s", held.segment_path(file), error)
                continue
            if _size(held.segment_path(file)) >= record.stripe.nbytes:
                found[file] = record
        return found

    # -- staging and completing ---------------------------------------------------------------------------------

    def make_checkpoint_directory(self, name: str) -> str:
        directory = private_directory(self.checkpoint_directory(name))
        private_directory(os.path.join(directory, names.OWN))
        return directory

    def add_segment(self, name: str, add: Callable[[str], None]) -> None:
        """Have `add` put a segment, and what belongs to it, into a checkpoint's directory, while nobody tidies that up."""
        for left in reversed(range(_TRIES)):
            directory = self.make_checkpoint_directory(name)
            try:
                with in_turn(directory):
                    add(directory)
                    return
            except FileNotFoundError:  # it may just have been removed as empty
                if not left:
                    raise

    def publish(self, manifest: Manifest) -> None:
        """Put the manifest in place: from here on the checkpoint is COMPLETE on this node."""
        path = os.path.join(self.checkpoint_directory(manifest.name), names.manifest_file(manifest.scope))
        self._manifests[path] = _version(files.write_atomically(path, manifest.to_json())), manifest

    def promote(self, held: Held) -> bool:
        """Have storage get a checkpoint that was to stay in memory; False where it has left, or was replaced, meanwhile."""
        path, promoted = held.manifest_path, f"{held.manifest_path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            descriptor = open_leased(path)  # nobody evicts it meanwhile
        except FileNotFoundError:
            return False
        try:
            with in_turn(held.directory):
                files.write_atomically(promoted, replace(held.manifest, persist=True).to_json())
                files.exchange(promoted, path)
                is_same = Manifest.from_json(files.read_bytes(promoted)).save_id == held.manifest.save_id
                if not is_same:  # a save of this name has completed just now, and doesn't look what it replaces
                    files.exchange(promoted, path)
            return is_same
        except FileNotFoundError:
            return False
        finally:
            files.remove(promoted)
            end_lease(descriptor)
            os.close(descriptor)

    def show_to_stock_readers(self, manifest: Manifest, template: MetadataTemplate | None = None) -> None:
        """Put `.metadata` beside a complete checkpoint, for torch's own readers, unless it has left memory by now.

        Nothing of ours depends on it. template: of the checkpoint's catalog, made anew by default.
        """
        with contextlib.suppress(FileNotFoundError), in_turn(self.checkpoint_directory(manifest.name)):
            found = [(held.manifest.save_id, held.manifest.catalog) for held in self.find(manifest.name)]
            if (manifest.save_id, manifest.catalog) in found:  # or it has been described anew since
                self._show(manifest, template)

    def _show(self, manifest: Manifest, template: MetadataTemplate | None = None) -> None:
        if len(manifest.nodes) > 1:
            return  # no other reader gets at the other nodes' segments
        directory = self.checkpoint_directory(manifest.name)
        own = os.path.join(directory, names.own_metadata_file(manifest.save_id, manifest.catalog))
        if not os.path.exists(own):
            template = template or template_of(read_catalog(directory, manifest.catalog))
            files.write_atomically(own, template.render(manifest.save_id, manifest.tails))
        target = os.path.join(directory, names.metadata_file(manifest.scope))
        temporary = f"{target}.{uuid.uuid4().hex[:8]}"
        os.link(own, temporary)
        os.rename(temporary, target)
        files.remove(temporary)  # renaming onto another name of the same file leaves both

    def _is_shown(self, manifest: Manifest) -> bool:
        directory = self.checkpoint_directory(manifest.name)
        own = os.path.join(directory, names.own_metadata_file(manifest.save_id, manifest.catalog))
        try:
            return os.path.samefile(own, os.path.join(directory, names.metadata_file(manifest.scope)))
        except FileNotFoundError:
            return False

    def record_flush(self, held: Held, record: FlushRecord) -> None:
        """Write down how a flush went. Nothing is written for a checkpoint that has left memory meanwhile."""
        try:
            path = os.path.join(held.directory, names.flush_file(held.manifest.scope))
            files.write_atomically(path, record.to_json())
        except FileNotFoundError:
            return
        if not os.path.exists(held.manifest_path):  # it left just now, and this would keep its directory
            self.tidy(held.directory)

    def add_checksums(self, manifest: Manifest, checksums: Mapping[str, ItemTable]) -> None:
        """Put segments' checksums beside them. Raises FileNotFoundError where the checkpoint has left memory."""
        self._add(manifest, _checksums_files(manifest, checksums))

    def add_segment_copy(
        self, manifest: Manifest, file: str, checksums: ItemTable, seal: Callable[[str], None]
    ) -> None:
        """Put a copy of a segment beside what lies here of its checkpoint: its checksums, then, by `seal`, the segment itself.

        Raises FileNotFoundError where the checkpoint has left memory.
        """
        self._add(
            manifest, _checksums_files(manifest, {file: checksums}), lambda directory: seal(f"{directory}/{file}")
        )

    def add_parity(
        self,
        manifest: Manifest,
        file: str,
        record: StripeRecord,
        checksums: Mapping[str, ItemTable],
        seal: Callable[[str], None],
    ) -> None:
        """The same for parity. checksums: of all segments that it is of."""
        described = {names.stripe_file(file): record.to_json(), **_checksums_files(manifest, checksums)}
        self._add(manifest, described, lambda directory: seal(f"{directory}/{file}"))

    def _add(
        self, manifest: Manifest, described: Mapping[str, bytes], seal: Callable[[str], None] | None = None
    ) -> None:
        directory = self.checkpoint_directory(manifest.name)
        with in_turn(directory):
            if manifest.save_id not in {held.manifest.save_id for held in self.find(manifest.name)}:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
            for path, data in described.items():
                files.write_atomically(os.path.join(directory, path), data)
            if seal is not None:
                seal(directory)

    def drop_parity(self, manifest: Manifest, keep: Collection[str]) -> None:
        """Make free slots of a checkpoint's parity that lies here, but for these files."""
        for held in self.find(manifest.name):
            if held.manifest.save_id == manifest.save_id:
                for file in self._segments_of(held):
                    if names.PARITY.fullmatch(file) and file not in keep:
                        self._retire(held.segment_path(file))

    def record_replication(self, manifest: Manifest, record: ReplicationRecord) -> None:
        """Write down what became of the copies. Nothing is written for a checkpoint that has left memory meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            self._add(manifest, {names.replication_file(manifest.scope): record.to_json()})

    # -- leaving memory -----------------------------------------------------------------------------------------

    def evict(self, held: Held, why: str = "") -> bool:
        """Take a checkpoint out of memory: it ceases to exist first, then its files become free slots.

        False, and nothing is done, where somebody reads or flushes it.
        """
        try:
            descriptor = os.open(held.manifest_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            if not try_lease(descriptor, exclusive=True):
                return False
            self._remember(held, why)
            files.remove(held.manifest_path)
            files.remove(os.path.join(held.directory, names.metadata_file(held.manifest.scope)))
            for file in self._segments_of(held):
                self._retire(held.segment_path(file))
            self.tidy(held.directory)
        finally:
            end_lease(descriptor)
            os.close(descriptor)
        return True

    def retire_replaced(self, held: Held) -> None:
        """Make free slots of a checkpoint's segments, now that a newer save's manifest has taken the place of its own.

        Whoever still reads or flushes it has leases on them, under which they aren't claimed.
        """
        self._remember(held, "replaced by a newer save of the same name")
        files.remove(os.path.join(held.directory, names.metadata_file(held.manifest.scope)))  # it names what goes now
        for file in self._segments_of(held):
            self._retire(held.segment_path(file))
        self.tidy(held.directory)

    def sweep(self) -> None:
        """Make free slots of segments that no manifest lists: remains of saves that didn't complete.

        A segment that a live process is staging or holds is left alone.
        """
        for directory in list(self._checkpoint_directories()):
            self.tidy(directory, show=True)

    def tidy(self, directory: str, *, show: bool = False) -> None:
        """Remove from a checkpoint's directory whatever its manifests don't list, and the directory when it is empty.

        show: give a checkpoint the `.metadata` that its writer was killed before it made.
        """
        with contextlib.suppress(FileNotFoundError), in_turn(directory):
            self._tidy(directory)
            for held in self._held_in(directory) if show else ():
                if not self._is_shown(held.manifest):
                    self._show_if_possible(held.manifest)

    def _show_if_possible(self, manifest: Manifest) -> None:
        try:
            self._show(manifest)
        except DcpMemError as error:  # its catalog is damaged, or memory is full; the save that sweeps goes on
            log.warning("%s has no .metadata for torch's own readers: %s", manifest.name, error)

    def _tidy(self, directory: str) -> None:
        manifests = [held.manifest for held in self._held_in(directory)]
        save_ids = {manifest.save_id for manifest in manifests}

        def abandoned() -> list[str]:
            ids = ((entry, names.save_id_of(entry)) for entry in _listdir(directory))
            return [entry for entry, save_id in ids if save_id and save_id not in save_ids]

        for entry in abandoned():
            self._retire_if_abandoned(os.path.join(directory, entry))
        if abandoned():
            return  # somebody is staging here, and needs what lies around
        here = [entry for entry in _listdir(directory) if names.save_id_of(entry)]
        _remove_others(os.path.join(directory, names.OWN), set().union(*(_own_files(one, here) for one in manifests)))
        _remove_others(directory, {*here, names.OWN, *(names.metadata_file(one.scope) for one in manifests)})
        if not manifests:
            files.remove_directory_if_empty(os.path.join(directory, names.OWN))
            files.remove_directory_if_empty(directory)

    def _retire_if_abandoned(self, path: str) -> None:
        try:
            if not is_leased(path):
                self._retire(path)
        except FileNotFoundError:
            return

    def _retire(self, path: str) -> None:
        try:
            os.rename(path, os.path.join(self.slots, f"{uuid.uuid4().hex[:12]}.slot"))
        except FileNotFoundError:
            return

    def trim(self, nbytes: int) -> None:
        """Drop free slots that nobody holds while the job occupies much more than `nbytes`: a larger world left them."""
        if self.allocated_bytes() > nbytes + nbytes // 8 + _SLACK:
            self.drop_free_slots()

    def drop_free_slots(self) -> None:
        """Give the memory of free slots back to the system, but for those that a live process holds."""
        with in_turn(self.slots):
            for entry in _listdir(self.slots):
                _remove_unless_held(os.path.join(self.slots, entry))

    # -- history ------------------------------------------------------------------------------------------------

    def _remember(self, held: Held, why: str) -> None:
        """Write down that a checkpoint leaves memory."""
        flush = held.flush
        if held.pending:
            flush = replace(flush, outcome="skipped", error=flush.error or why)
        elif flush.outcome == "skipped":
            flush = replace(flush, error=flush.error or why)
        self.add_to_history(line_of(held.manifest, flush))

    def note_deleted(self, names_gone: Collection[str]) -> None:
        """Write down that these have left storage."""
        for line in self.history() if names_gone else ():
            if line.name in names_gone and line.outcome == "durable":
                self.add_to_history(replace(line, outcome="deleted"))

    def add_to_history(self, line: Line) -> None:
        """Write down what became of a checkpoint, in the place of what was known of it. Where memory is full, that is lost."""
        path = os.path.join(self.directory, HISTORIES)
        try:
            with in_turn(self.directory):  # the agent and the trainers all write to it
                before = _read_if_there(path)
                try:
                    after = histories.with_line(before, line, _HISTORY_LINES)
                except ManifestInvalid:  # there is none yet, or somebody overwrote it
                    after = histories.to_csv([line])
                if after != before:
                    files.write_atomically(path, after)
        except (OSError, MemoryBudgetExceeded) as error:
            log.warning("what became of %s can't be written down: %s", line.name, error)

    def history(self) -> list[Line]:
        """What became of checkpoints, oldest first: of those that have left memory, and of those whose flush has ended."""
        try:
            return histories.from_csv(_read_if_there(os.path.join(self.directory, HISTORIES)))
        except ManifestInvalid:
            return []


def jobs_in(root: str) -> list[str]:
    """Names of the jobs that have a directory in a memory root, in order. Raises MemoryRootRefused, MemoryUnavailable."""
    if not os.path.isdir(root):
        return []
    open_root(root)
    with os.scandir(root) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(
        name for name in found if not name.startswith(".") and os.path.isdir(os.path.join(root, name, ".slots"))
    )


def last_use(directory: str) -> float:
    """When a job last saved, in seconds since the epoch."""
    try:
        with os.scandir(directory) as entries:
            return max(
                (entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=os.stat(directory).st_mtime
            )
    except FileNotFoundError:
        return 0.0


def checksums_of(held: Held, file: str) -> ItemTable:
    """What was put down beside a segment, or its parity, in memory. Raises FileNotFoundError, ManifestInvalid."""
    manifest = NodeManifest.from_json(files.read_bytes(os.path.join(held.directory, names.checksums_file(file))))
    if file not in manifest.tables:
        raise ManifestInvalid(f"the checksums of {file} are those of another segment")
    return manifest.tables[file]


def _record(kind: type[Record], path: str, manifest: Manifest) -> Record:
    """What was written down there of this very save; a blank one where that is nothing."""
    try:
        record = kind.from_json(files.read_bytes(path))
    except (FileNotFoundError, ManifestInvalid):
        return kind(manifest.save_id)
    return record if record.save_id == manifest.save_id else kind(manifest.save_id)


def _read_if_there(path: str) -> bytes:
    try:
        return files.read_bytes(path)
    except FileNotFoundError:
        return b""


def _remove_unless_held(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if try_lease(descriptor, exclusive=True):
            files.remove(path)
            end_lease(descriptor)
    finally:
        os.close(descriptor)


def _version(facts: os.stat_result) -> tuple[int, ...]:
    """Tells a file from those that had its name before."""
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _is_manifest(entry: str) -> bool:
    return entry.startswith("manifest") and entry.endswith(".json")


def _checksums_files(manifest: Manifest, checksums: Mapping[str, ItemTable]) -> dict[str, bytes]:
    """What lies in memory beside segments whose checksums are known, by path."""
    node_of = dict(zip(manifest.segments.rank, manifest.segments.node, strict=True))
    return {
        names.checksums_file(file): NodeManifest(
            manifest.save_id, node_of[names.rank_of(file)], {file: table}
        ).to_json()
        for file, table in checksums.items()
    }


def _own_files(manifest: Manifest, here: Collection[str]) -> set[str]:
    """Names, under `.dcp_mem`, of what belongs to a complete checkpoint, of which these files lie here."""
    parity = list(filter(names.PARITY.fullmatch, here))
    checked = [segment.file for segment in manifest.segments] if parity else here
    paths = [
        names.manifest_file(manifest.scope),
        names.flush_file(manifest.scope),
        names.own_metadata_file(manifest.save_id, manifest.catalog),
        names.flushing_file(manifest.save_id),
        names.catalog_file(manifest.catalog),
        names.replication_file(manifest.scope),
        *map(names.checksums_file, checked),
        *map(names.stripe_file, parity),
    ]
    return {path.rpartition("/")[2] for path in paths}


def _remove_others(directory: str, keep: set[str]) -> None:
    for entry in _listdir(directory):
        if entry not in keep:
            files.remove(os.path.join(directory, entry))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _listdir(path: str) -> Sequence[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return ()
