"""Object stores that are mounted as directories (FUSE): what they lack, and what to use instead."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid

from dcp_mem.common.files import remove
from dcp_mem.common.mounts import mount_of
from dcp_mem.errors import StorageRefused

_PROTOCOLS = {
    "blobfuse": "abfs",
    "blobfuse2": "abfs",
    "gcsfuse": "gs",
    "goofys": "s3",
    "mountpoint-s3": "s3",
    "s3fs": "s3",
}
_LACKING = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.ESPIPE}


def native_url(path: str) -> str:
    """Return the URL of what is mounted there, as far as the mount tells; "" where it doesn't."""
    mount = mount_of(path)
    protocol = _PROTOCOLS.get(mount.program)
    if protocol is None:
        return ""
    bucket = "BUCKET" if mount.source in (*_PROTOCOLS, "fuse") else mount.source
    below = os.path.relpath(os.path.realpath(path), mount.directory)
    return f"{protocol}://{bucket}" + (f"/{below}" if below != "." else "")


def has_links(directory: str, root: str) -> bool:
    """Return whether a directory has hard links; on a FUSE mount try what else a commit needs.

    Raises StorageRefused where parts can't be written in any order, or files not be renamed.
    """
    mount = mount_of(directory)
    if not mount.program:
        return True
    trials = [f"{directory}/trial.{uuid.uuid4().hex[:8]}.tmp" for _ in "12"]  # as of a put, if left
    try:
        for trial in trials:
            descriptor = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, b"2", 1)
                os.pwrite(descriptor, b"1", 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.rename(*trials)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        url = native_url(root) or "s3://…, abfs://… or gs://…"
        raise StorageRefused(
            root,
            f"a commit needs parts written in any order, and a rename; {mount.program} "
            f"({mount.directory}) refuses one of them ({error.strerror}). Mount it with a cache of "
            f"files on disk, or give the store's own URL: {url}",
        ) from None
    else:
        try:
            os.link(trials[1], trials[0])
        except OSError:
            return False
        return True
    finally:
        for trial in trials:
            with contextlib.suppress(OSError):
                remove(trial)
