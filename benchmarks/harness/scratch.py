"""Directories to work in, in tmpfs and on disk, which are removed whatever happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.procfs import available_bytes, stop_agents

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_MARGIN = 1 << 30
"""Bytes that stay free for the processes, and for the rest of the machine."""


class Skipped(Exception):
    """The machine can't do this measurement."""


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Make a private directory below `parent`; remove it at the end, and stop its flush agents."""
    path = Path(tempfile.mkdtemp(prefix="dcp_mem-bench-", dir=parent))
    try:
        yield path
    finally:
        stop_agents(path)
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def huge_tmpfs(size: int) -> Iterator[Path]:
    """Mount a tmpfs with huge pages.

    Raises:
        Skipped: Mounting is not permitted.
    """
    with mounted_tmpfs(size, huge="within_size") as path:
        yield path


@contextmanager
def mounted_tmpfs(size: int, *, huge: str) -> Iterator[Path]:
    """Mount a tmpfs, which nodes that are made meanwhile share.

    Args:
        size: Bytes that it may take.
        huge: Its huge pages: "never", "within_size" or "always".

    Raises:
        Skipped: Mounting is not permitted.
    """
    with tempfile.TemporaryDirectory(prefix="dcp_mem-bench-tmpfs-") as directory:
        options = f"size={size},mode=0700,huge={huge}"
        _mount("mount", "-t", "tmpfs", "-o", options, "dcp_mem-bench", directory)
        try:
            with scratch(Path(directory)) as path:
                yield path
        finally:
            _mount("umount", "--lazy", directory)


def need(directory: Path, size: int) -> None:
    """Raise Skipped unless `size` bytes are free, of memory and of the tmpfs at `directory`."""
    free = min(available_bytes(), shutil.disk_usage(directory).free) - MEMORY_MARGIN
    if free < size:
        raise Skipped(f"needs {size / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free")


def file_system(path: Path) -> str:
    """Return the type of file system that `path` lies on."""
    found, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, this_kind, *_ = line.split()
        inside = Path(point) in (path.resolve(), *path.resolve().parents)
        if inside and len(point) >= len(found):
            found, kind = point, this_kind
    return kind


def huge_pages() -> str:
    """Return how the kernel handles huge pages of shared memory."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return path.read_text().strip() if os.access(path, os.R_OK) else "unknown"


def _mount(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise Skipped(f"there is no {command[0]} command") from None
    except subprocess.CalledProcessError as error:
        raise Skipped(f"{command[0]}: {error.stderr.strip()}") from None
