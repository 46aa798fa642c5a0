"""The same routes against real servers, which do something with what they get. No verdicts: they are what takes the time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.report import Part, Section, attempt
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB, MIB
from benchmarks.storage import source
from benchmarks.storage.cost import Spec
from benchmarks.storage.routes import (
    CAT_RANGES,
    FLOOR,
    OURS,
    PIPE_FILE,
    READ_FLOOR,
    READ_OURS,
    READ_SDK,
    READS,
    SDK,
    UPLOADS,
)
from benchmarks.storage.table import take
from benchmarks.storage.targets import REAL, running_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.settings import Settings
    from benchmarks.storage.cost import Route

TITLE = "Real servers"
QUICK = (FLOOR, SDK, OURS, PIPE_FILE, READ_FLOOR, READ_SDK, READ_OURS, CAT_RANGES)
LEFT_OUT = {"moto": (FLOOR, READ_FLOOR)}
"""The floor keeps its connections; moto closes some, and some parts it was seen to leave without an answer."""
SERVER_COPIES = 6
"""Of the objects: a server in memory doesn't let go at once of what was overwritten."""


def run(settings: Settings) -> Section:
    nbytes = 64 * MIB if settings.quick else 512 * MIB
    parts = [
        attempt(
            "servers",
            f"{name}, {source.OBJECTS} objects, {nbytes // MIB} MiB in all",
            partial(_part, settings, name, nbytes),
        )
        for name in REAL
    ]
    return Section(TITLE, parts)


def _chosen(settings: Settings, name: str, kind: str, routes: Sequence[Route]) -> list[Route]:
    """In a quick run what matters most."""
    left_out = LEFT_OUT.get(name, ())
    return [
        route
        for route in routes
        if kind in route.kinds and route not in left_out and (route in QUICK or not settings.quick)
    ]


def _part(settings: Settings, name: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes * SERVER_COPIES + GIB)
    with scratch(settings.tmpfs) as directory, running_server(name) as target:
        source.make(directory / "objects", nbytes)
        repeats = 2 if settings.quick else settings.repeats
        uploads = _chosen(settings, name, target.kind, UPLOADS)
        reads = _chosen(settings, name, target.kind, READS)
        up = take(uploads, lambda route: Spec(route, target, directory / "objects", repeats))
        down = take(reads, lambda route: Spec(route, target, directory / "objects", repeats, fill=SDK))
    tables = [up.table(uploads, FLOOR, SDK), down.table(reads, READ_FLOOR, READ_SDK)]
    return Part([*up.failures(), *down.failures()], ("first uploads, then reads",), tables=tables)
