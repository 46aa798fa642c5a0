"""The bytes that are moved: files of equal size in tmpfs, as the segments of a checkpoint are."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.settings import MIB
from dcp_mem.memory.slot import Mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

OBJECTS = 4
PART_BYTES = 32 * MIB
"""Size of the parts in every route that takes one; dcp_mem chooses it for such objects itself."""
MARK = b"NOT READ"
CONNECTIONS = 8
"""Connections of every route that takes their number."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A file and its mapping.

    Attributes:
        name: Of the object that the file becomes.
    """

    name: str
    path: Path
    map: mmap.mmap

    @property
    def nbytes(self) -> int:
        return len(self.map)

    @property
    def view(self) -> memoryview:
        return memoryview(self.map)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of an object, from `start` on, and where they lie in memory."""

    name: str
    number: int
    start: int
    view: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.view)


def ranges(segments: Sequence[Segment], nbytes: int = PART_BYTES) -> list[Range]:
    """Cut the segments into pieces, numbered from 0 within each segment."""
    return [
        Range(segment.name, number, start, segment.view[start : start + nbytes])
        for segment in segments
        for number, start in enumerate(range(0, segment.nbytes, nbytes))
    ]


def make(directory: Path, nbytes: int) -> str:
    """Make the files as slots are made, on huge pages where the kernel can, of random bytes.

    Args:
        nbytes: Of all files together.

    Returns:
        What the files are made of, for a note.
    """
    directory.mkdir()
    huge_before = _huge_nbytes()
    _have_memory(nbytes)
    block = os.urandom(MIB)
    for index in range(OBJECTS):
        with (directory / f"object-{index}").open("w+b", buffering=0) as file:
            file.truncate(nbytes // OBJECTS)
            Mapping(file.fileno(), nbytes // OBJECTS).populate()
            for _ in range(nbytes // OBJECTS // MIB):
                file.write(block)
    share = (_huge_nbytes() - huge_before) / nbytes
    return f"the objects lie on huge pages, {share:.0%} of them, as slots do"


def _huge_nbytes() -> int:
    """Bytes of all tmpfs on huge pages."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemHugePages")), 0
    )


def _have_memory(nbytes: int) -> None:
    """Touch twice the memory that is needed and free it again, so that huge pages are available.

    A hypervisor takes back memory that has been free for some seconds (free page reporting), large
    blocks first, and returns it at a high price: slots would get the small pages that are left.
    Machines that train have their memory for themselves.
    """
    with mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, 2 * nbytes, mmap.PAGESIZE):
            memory[start] = 1


def mapped(directory: Path, first: int | None = None) -> list[Segment]:
    """Map the files of `make` with every page in place, so that a client's memory is its own.

    The mappings stay: clients may hold views, and each process measures one client.

    Args:
        first: Map only so many bytes of each file, under names of their own.
    """
    segments = []
    for path in sorted(directory.iterdir()):
        with path.open("r+b") as file:
            mapping = mmap.mmap(
                file.fileno(), first or 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
            )
        segments.append(
            Segment(path.name if first is None else f"small-{path.name}", path, mapping)
        )
    return segments


def mark(segments: Sequence[Segment]) -> None:
    """Write marks at both ends of every range, for a read to overwrite."""
    for one in ranges(segments):
        one.view[: len(MARK)] = one.view[-len(MARK) :] = MARK


def check_overwritten(segments: Sequence[Segment]) -> None:
    """Raise AssertionError where a mark has not been overwritten."""
    for one in ranges(segments):
        if MARK in (one.view[: len(MARK)], one.view[-len(MARK) :]):
            raise AssertionError(f"{one.name} was not read from {one.start} on")
