"""Awkward places: full file systems, directories that are forbidden, users without rights."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

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
