"""`MemoryStorage`: torch_checkpointing's storage of files, kept as checkpoints of dcp_mem.

A rank's files go, one behind the other, into its slot in tmpfs. When all ranks have written
theirs (`complete`), the slots become a checkpoint of dcp_mem, whole or not at all.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from torch_checkpointing.storage.base_storage import ReadArgs, Storage

from dcp_mem.comm import world_size
from dcp_mem.common.log import log
from dcp_mem.common.values import CheckpointStatus
from dcp_mem.config import Settings, is_checkpoint_name
from dcp_mem.errors import (
    CheckpointInUse,
    ConfigError,
    DcpMemError,
    StorageRefused,
    StorageUnavailable,
)
from dcp_mem.operations import housekeeping, inventory
from dcp_mem.operations.streams import OpenStreams, Stream
from dcp_mem.saving.streams import Streams
from dcp_mem.storage import Storage as JobStorage
from dcp_mem.storage.listing import committed_under
from dcp_mem.storage.routes import storage_of
from dcp_mem.writer import MemoryStorageWriter

if TYPE_CHECKING:
    from dcp_mem.integrations.torch_checkpointing.configuration import MemoryStorageConfig


class MemoryStorage(Storage):  # type: ignore[misc]
    """Files of checkpoints in this node's tmpfs, and on storage behind training.

    A path is a checkpoint's name and a file in it ("step-100/model_0.pt"), or the same below the
    job's root. Nothing that isn't complete can be read. Bytes are compared with their checksums.

    Args:
        config: Where it lies.
    """

    def __init__(self, config: MemoryStorageConfig) -> None:
        self._config = config
        self._settings = config.settings()
        self._writer: MemoryStorageWriter | None = None
        self._pending: dict[str, Streams] = {}
        self._writing = _OneFile()
        self._opened: dict[str, OpenStreams] = {}
        self._users: Counter[str] = Counter()
        self._opening = threading.RLock()

    # -- writing, in the order of torch_checkpointing's calls --------------------------------------

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Begin a checkpoint's files anew."""
        name, _ = self._split(path)
        with self._writing:
            self._discard(name)

    def stream_write(self, path: Path) -> io.IOBase:
        """Return a file to write; it counts once it is closed without an error.

        Files are written one after the other: a write to another one waits until this one is
        closed, or raises ConfigError in the thread that has yet to close it. The first file of a
        checkpoint discards those of another one that isn't complete.
        """
        name, file = self._split(path)
        if not name or not file:
            raise ConfigError(f"{path} is no file of a checkpoint: write to <checkpoint>/<file>")
        return _Writing(self, name, file)

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Give files that aren't complete yet their checkpoint's name.

        Raises FileNotFoundError, ConfigError.
        """
        (source, source_file), (target, target_file) = self._split(src_path), self._split(dst_path)
        if source_file or target_file:
            raise ConfigError(f"{src_path}: only a checkpoint's directory can be renamed")
        with self._writing:
            if source not in self._pending:
                if self._names(source):
                    raise ConfigError(f"{src_path} is complete, and keeps its name")
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(src_path))
            moved = self._pending.pop(source)
            self._discard(target)
            self._pending[target] = moved

    def _discard(self, name: str) -> None:
        left = self._pending.pop(name, None)
        if left is not None:
            left.close()

    def _discard_others(self, name: str) -> None:
        """Discard what saves under other names have left: a rank has one save at a time."""
        for other in self._pending.keys() - {name}:
            self._discard(other)

    def complete(self, path: str | os.PathLike[str]) -> None:
        """Make a checkpoint of the files under this name, with all ranks; see `complete`."""
        name, _ = self._split(Path(path))
        ranks = world_size()
        if ranks != self._config.ranks:
            # Else each rank would make a checkpoint of its own, of the same name.
            raise ConfigError(
                f"{self._config.ranks} ranks save {name}, but the group of this process has "
                f"{ranks}: pass all that in_memory() returns, subprocess_init_fn among it"
            )
        with self._writing:
            streams = self._pending.pop(name, None)
            if streams is None:  # On ranks that don't rename.
                streams = self._pending.pop(self._config.temp_dir_prefix + name, None)
            self._discard_others(name)
            writer = self._own_writer()
            writer._saver.save_streams(
                lambda: streams if streams is not None else writer._saver.new_streams(),
                name,
                has_new=streams is not None,
            )

    # -- reading -----------------------------------------------------------------------------------

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Open a file of a complete checkpoint. Raises FileNotFoundError, SegmentCorrupt."""
        stream = self._open(path)
        if read_args is not None and not read_args.pre_read_full_file:
            return stream
        with stream:
            return io.BytesIO(stream.read())  # type: ignore[return-value]

    def getsize(self, path: Path) -> int:
        """Return a file's bytes. Raises FileNotFoundError."""
        with self._open(path) as stream:
            return stream.nbytes

    def exists(self, path: Path) -> bool:
        """Return whether there is a file, a complete checkpoint, or one that is being written."""
        name, file = self._split(path)
        known = self._names(name) if name else []
        return not name or file in known or _has_below(known, file)

    def isdir(self, path: Path) -> bool:
        """Return whether there are files below the path."""
        name, file = self._split(path)
        return not name or _has_below(self._names(name), file)

    def ls(self, path: Path) -> list[str]:
        """List the checkpoints to resume from, newest first, or what lies in one.

        A rejected checkpoint isn't among them; its path can be read.

        Raises FileNotFoundError.
        """
        name, directory = self._split(path)
        if not name:
            return self._checkpoints()
        known, prefix = self._names(name), f"{directory}/" if directory else ""
        if not _has_below(known, directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        below = (one.removeprefix(prefix) for one in known if one.startswith(prefix))
        return sorted({one.partition("/")[0] for one in below})

    def remap_path(self, path: Path) -> str:
        """Return a path's URL under the job's root."""
        name, file = self._split(path)
        return "/".join(part for part in (self._settings.url or "", name, file) if part)

    # -- removing ----------------------------------------------------------------------------------

    def rmdir(self, path: Path) -> None:
        """Delete a checkpoint, from this node's memory and from storage.

        Raises CheckpointInUse, ConfigError.
        """
        name, file = self._split(path)
        if not name or file:
            raise ConfigError(f"{path}: a checkpoint's files are deleted together, by its own path")
        self.mkdir(path)
        _, why_not = housekeeping.evict(self._settings, name)
        if why_not:
            raise CheckpointInUse(name, self._settings.memory_root)
        housekeeping.delete_stored(self._settings, name)

    def delete(self, path: Path) -> None:
        """Refuse: a checkpoint's files are deleted together."""
        raise ConfigError(f"{path}: a checkpoint's files are deleted together, by rmdir")

    def close(self) -> None:
        """Give slots back; the agent goes on flushing. Closing twice is fine."""
        with self._writing:
            for streams in self._pending.values():
                streams.close()
            self._pending.clear()
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close(flush=False)

    # -- inside ------------------------------------------------------------------------------------

    def _split(self, path: Path) -> tuple[str, str]:
        """Return the checkpoint and the file that a path names; "" for what it doesn't name."""
        text, root = str(path), self._settings.url
        if root is not None:
            # A Path has one slash where a URL has two.
            for start in {root, str(Path(root))}:
                if text == start or text.startswith(f"{start}/"):
                    text = text[len(start) :].lstrip("/")
                    break
        name, _, file = ("" if text == "." else text).partition("/")
        if text.startswith("/") or (name and not is_checkpoint_name(name)):
            raise ConfigError(
                f"{path} is no path of this storage: give a checkpoint's name, such as 'step-100', "
                f"or a path directly under {root or 'the job'}"
            )
        return name, file

    def _own_writer(self) -> MemoryStorageWriter:
        if self._writer is None:
            self._writer = MemoryStorageWriter(self._config.path, **self._config.options)
            # In multiprocessing's children no other hook is called at their end.
            Finalize(None, self._close_at_end, exitpriority=10)
        return self._writer

    def _close_at_end(self) -> None:
        with suppress(DcpMemError):
            self.close()

    def _checkpoints(self) -> list[str]:
        known = inventory.in_memory(self._settings)
        storage = storage_of(self._settings)
        if storage is not None:
            known = inventory.merged(known, inventory.on_storage(storage))
        return list(dict.fromkeys(one.name for one in known if inventory.may_be_resumed_from(one)))

    def _names(self, name: str) -> list[str]:
        """Return the files of a checkpoint, complete or not; none where there is no such one."""
        pending = self._pending.get(name)
        if pending is not None:
            return list(pending.extents)
        with self._files(name) as files:
            return [] if files is None else list(files.places)

    def _open(self, path: Path) -> Stream:
        name, file = self._split(path)
        with ExitStack() as stack:
            files = stack.enter_context(self._files(name)) if name else None
            if files is None or file not in files.places:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            stream = files.open(file)
            stream.on_close = stack.pop_all().close
            return stream

    @contextmanager
    def _files(self, name: str) -> Iterator[OpenStreams | None]:
        """Yield a complete checkpoint's files. Who uses them at the same time shares them.

        They aren't kept: a lease would keep memory from being recycled.
        """
        with self._opening:
            files = self._opened.get(name)
            if files is None:
                storage = storage_of(self._settings)
                checkpoint = _found(self._settings, storage, name)
                if checkpoint is not None:
                    files = self._opened[name] = OpenStreams(self._settings, storage, checkpoint)
            self._users[name] += 1
        try:
            yield files
        finally:
            with self._opening:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name]
                    if files is not None:
                        self._opened.pop(name).close()


def _found(settings: Settings, storage: JobStorage | None, name: str) -> CheckpointStatus | None:
    """Return the newest whole checkpoint of that name; None where there is none."""
    local = [one for one in inventory.in_memory(settings) if one.name == name]
    known = local
    if storage is not None:
        try:
            known = inventory.merged(local, inventory.stored(committed_under(storage, name)))
        except (StorageUnavailable, StorageRefused) as error:
            if not any(map(inventory.counts, local)):
                raise
            log.warning("%s; reading %s from memory", error, name)
    return next((one for one in known if inventory.counts(one)), None)


def _has_below(known: list[str], directory: str) -> bool:
    prefix = f"{directory}/" if directory else ""
    return any(one.startswith(prefix) for one in known)


class _OneFile:
    """The lock of files that are written: one at a time, from its first byte to its end.

    A thread that waited for its own file would wait for ever. Any thread may release the lock, as
    a file that nobody has closed may be discarded in another thread than it was written in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def acquire(self) -> None:
        if self._holder == threading.get_ident():
            raise ConfigError(
                "close the file that is being written first: files of a rank lie one "
                "behind the other"
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def release(self) -> None:
        self._holder = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Writing(io.RawIOBase):
    """A file that is being written. From its first byte to its end no other file is."""

    def __init__(self, storage: MemoryStorage, name: str, file: str) -> None:
        super().__init__()
        self._storage, self._name, self._file = storage, name, file
        self._block: AbstractContextManager[IO[bytes]] | None = None
        self._stream: IO[bytes] | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at the end. Raises MemoryBudgetExceeded."""
        return self._begun().write(data)

    def _begun(self) -> IO[bytes]:
        if self._stream is None:
            storage = self._storage
            storage._writing.acquire()
            try:
                streams = storage._pending.get(self._name)
                if streams is None:
                    storage._discard_others(self._name)
                    streams = storage._own_writer()._saver.new_streams()
                    storage._pending[self._name] = streams
                block = streams.writing(self._file)
                self._stream, self._block = block.__enter__(), block
            except BaseException:
                storage._writing.release()
                raise
        return self._stream

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end(kind, error, traceback)
            super().close()

    def close(self) -> None:
        """End the file, which counts from now on. Closing twice is fine."""
        if not self.closed:
            self._begun()  # An empty file is a file, too.
            try:
                self._end(None, None, None)
            finally:
                super().close()

    def __del__(self) -> None:
        """Discard what was neither closed nor left; a file that was only made leaves nothing."""
        self._end(EOFError, EOFError("the file was never closed"), None)

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        try:
            with suppress(BaseException) if error is not None else nullcontext():
                block.__exit__(kind, error, traceback)
        finally:
            self._storage._writing.release()
