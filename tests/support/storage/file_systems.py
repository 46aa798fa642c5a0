"""Awkward places: full file systems, directories that are forbidden, users without rights."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.launch import TETHER

NOBODY = 65534
_XFS_NBYTES = 400 << 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may do this")


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size ("64m") on a new directory; unmounted at the end."""
    directory.mkdir(mode=0o700)
    options = f"size={size},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    mounting = subprocess.run(command, capture_output=True, check=False)
    if mounting.returncode:
        directory.rmdir()
        pytest.skip(f"a tmpfs can't be mounted here: {mounting.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()


@contextlib.contextmanager
def mounted_xfs(directory: Path) -> Iterator[Path]:
    """A small XFS, which can clone blocks, on a new directory; unmounted at the end."""
    image = directory.with_suffix(".image")
    directory.mkdir(mode=0o700)
    with image.open("wb") as stream:
        stream.truncate(_XFS_NBYTES)
    steps = (
        ["mkfs.xfs", "-q", "-m", "reflink=1", str(image)],
        ["mount", "-o", "loop", str(image), str(directory)],
    )
    try:
        for step in steps:
            subprocess.run(step, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        image.unlink()
        directory.rmdir()
        pytest.skip(f"an XFS can't be mounted here: {error}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()
        image.unlink()


@contextlib.contextmanager
def mounted_s3fs(directory: Path, bucket: str, options: Mapping[str, Any]) -> Iterator[int]:
    """A bucket as s3fs mounts it on a new directory; yields the process that serves it."""
    directory.mkdir(mode=0o700)
    keys = directory.with_suffix(".keys")
    keys.touch(0o600)
    keys.write_text(f"{options['key']}:{options['secret']}")
    chosen = f"url={options['endpoint_url']},use_path_request_style,passwd_file={keys},retries=1"
    with _mounted_by_fuse(directory, ["s3fs", bucket, str(directory), "-f", "-o", chosen]) as pid:
        yield pid


@contextlib.contextmanager
def mounted_rclone(directory: Path, below: Path) -> Iterator[int]:
    """A directory as rclone mounts it without a cache: it takes no parts in any order."""
    directory.mkdir(mode=0o700)
    command = ["rclone", "mount", str(below), str(directory), "--config", os.devnull]
    with _mounted_by_fuse(directory, command) as pid:
        yield pid


@contextlib.contextmanager
def _mounted_by_fuse(directory: Path, command: list[str]) -> Iterator[int]:
    if shutil.which(command[0]) is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip(f"{command[0]} or /dev/fuse is missing: `bash .ci/test` installs it, as root")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*TETHER, *command], stdout=log, stderr=log)
        try:
            for _ in range(600):
                if os.path.ismount(directory) or process.poll() is not None:
                    break
                time.sleep(0.05)
            if not os.path.ismount(directory):
                log.seek(0)
                pytest.skip(f"{command[0]} can't be mounted here: {log.read()[-400:].decode()}")
            yield process.pid
        finally:
            subprocess.run(["umount", "--lazy", directory], check=False, capture_output=True)
            process.kill()
            process.wait()


def fill(path: Path, spare: int = 0) -> None:
    """Take what space is left on a file system, but for `spare` bytes, with a file."""
    facts = os.statvfs(path.parent)
    wanted = max(facts.f_bavail * facts.f_frsize - spare, 1)
    with path.open("wb") as stream:
        with contextlib.suppress(OSError):  # another has taken space since
            os.posix_fallocate(stream.fileno(), 0, wanted)
        with contextlib.suppress(OSError):
            while not spare:
                os.write(stream.fileno(), bytes(4096))


def become_nobody() -> None:
    """Give up root's rights, for good; another user keeps his own."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
