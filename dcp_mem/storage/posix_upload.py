"""Uploads into a directory: files that get their names once they are whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from dcp_mem.common.files import remove, sync_directory
from dcp_mem.errors import StorageRefused, StorageUnavailable
from dcp_mem.storage import Copies, InParts, UploadBroken
from dcp_mem.storage.posix_paths import DESCRIPTORS

MODE = 0o666  # less the umask: a checkpoint is for whoever may read the root
_LOST_TEXT = "What was written before may be lost: the file is begun anew"
_CLONE_RANGE = 0x4020940D  # FICLONERANGE: Python has no name for it


class PosixUpload(InParts):
    """A file that gets its name once it is whole.

    Until then it has a name of its own: two flushers of one segment don't write to the same file.

    A copy is a clone of a part's blocks where the file system has that (XFS, btrfs, NFS 4.2 above
    these): it moves no bytes. Elsewhere it is a hard link, and all of the file or nothing. There is
    no `copy_file_range`: where it can't clone, it reads and writes the bytes again.

    `source`: open file that may be copied from. The upload closes it.
    """

    in_order = False

    def __init__(
        self,
        directory: int,
        name: str,
        nbytes: int,
        translated: Callable[[], AbstractContextManager[None]],
        source: int | None = None,
    ) -> None:
        super().__init__(nbytes)
        self._directory, self._path = directory, f"{DESCRIPTORS}/{directory}/{name}"
        self._translated = translated
        self._part = f"{self._path}.{uuid.uuid4().hex[:8]}.part"
        self._descriptor = os.open(
            self._part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE
        )
        self._source = source
        self._is_named = self._is_link = False
        self._loss: tuple[str, str] | None = None  # storage, and why
        if source is not None:
            self.copies = Copies.PARTS if self._clones(0) else Copies.WHOLE

    def put_part(self, number: int, data: memoryview, crc32c: int) -> bool:
        offset = number * self.part_nbytes
        with self._writing():
            while data:
                count = os.pwrite(self._descriptor, data, offset)
                data, offset = data[count:], offset + count
        self._missing.discard(number)
        return True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Translate errors, and raise UploadBroken for good once there was one.

        The error may be of bytes that were written before. The kernel drops those and says so once
        for each descriptor: the next sync would succeed.
        """
        if self._loss is not None:
            raise UploadBroken(*self._loss)
        try:
            with self._translated():
                yield
        except (StorageUnavailable, StorageRefused) as error:
            self._loss = error.url, f"{error.reason.rstrip('.')}. {_LOST_TEXT}"
            if isinstance(error, StorageRefused):
                raise
            raise UploadBroken(*self._loss) from None

    def copy_part(self, number: int, crc32c: int) -> bool:
        is_copied = self._clones(number)
        if is_copied:
            self._missing.discard(number)
        return is_copied

    def _clones(self, number: int) -> bool:
        """Clone the blocks of a part; return whether the file system has done it."""
        if self._source is None:
            return False
        start, nbytes = self._range(number)
        wanted = struct.pack("qQQQ", self._source, start, nbytes, start)
        try:
            fcntl.ioctl(self._descriptor, _CLONE_RANGE, wanted)
        except OSError:
            return False
        return nbytes > 0

    def copy_whole(self) -> bool:
        if self._source is None or _mode_of(self._source) != _mode_of(self._descriptor):
            return False
        try:
            # All names of a file have one time. It must not make what is being put look old: gc
            # and later commits remove old files that belong to no checkpoint.
            os.utime(self._source)
            # By its descriptor, so that it is the file that was looked at. Only with a `dir_fd`
            # does Python follow the link in /proc.
            os.link(f"/proc/self/fd/{self._source}", self._path, src_dir_fd=self._source)
        except FileExistsError:
            # The client's repeated request found the link that the first one had made (NFS), or
            # another process has put the segment meanwhile.
            return self._is_there()
        except OSError:
            return False
        with self._translated():
            sync_directory(os.path.dirname(self._path))
        self._note(self._source)
        self._is_link = True
        return True

    def _is_there(self) -> bool:
        with self._translated():
            facts = os.lstat(self._path)
            self._is_link = stat.S_ISREG(facts.st_mode) and facts.st_size == self._nbytes
            sync_directory(os.path.dirname(self._path))
        return self._is_link

    def _note(self, descriptor: int) -> None:
        with self._translated():
            self._etag = identity_of(os.fstat(descriptor))

    def finish(self) -> None:
        if not self._is_named:
            with self._writing():
                self._check_that_all_were_put()
                os.fsync(self._descriptor)
        with self._translated():
            if not self._is_named:
                self._note(self._descriptor)
                os.rename(self._part, self._path)
                self._is_named = True
            sync_directory(os.path.dirname(self._path))

    def close(self) -> None:
        # An error here was reported by fsync already, or would hide the one that kept it from
        # running.
        for descriptor in (self._descriptor, self._source):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if not self._is_named:
            with contextlib.suppress(OSError):
                remove(self._part)
        with contextlib.suppress(OSError):
            os.close(self._directory)


def _mode_of(descriptor: int) -> int:
    return stat.S_IMODE(os.fstat(descriptor).st_mode)


def identity_of(facts: os.stat_result) -> str:
    """Return what changes where somebody writes to a file, or puts another in its place."""
    return f"{facts.st_ino}-{facts.st_mtime_ns}"
