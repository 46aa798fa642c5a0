"""The same routes against real servers. No verdicts: the servers take most of the time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.storage import source
from benchmarks.harness.storage.cost import Spec
from benchmarks.harness.storage.routes import (
    CAT_RANGES,
    DCP_MEM,
    FLOOR,
    PIPE_FILE,
    READ_DCP_MEM,
    READ_FLOOR,
    READ_SDK,
    READS,
    SDK,
    UPLOADS,
)
from benchmarks.harness.storage.routing import take
from benchmarks.harness.storage.targets import REAL, running_server
from benchmarks.harness.tables import Part, Section, attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.settings import Settings
    from benchmarks.harness.storage.cost import Route

TITLE = "Real servers"
QUICK = (
    FLOOR,
    SDK,
    DCP_MEM,
    PIPE_FILE,
    READ_FLOOR,
    READ_SDK,
    READ_DCP_MEM,
    CAT_RANGES,
)
LEFT_OUT = {"moto": (FLOOR, READ_FLOOR)}
"""The floor keeps its connections; moto closes some, and was seen to leave parts unanswered."""
SERVER_COPIES = 6
"""Times the objects: a server in memory doesn't free overwritten objects at once."""


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
    """The routes to measure: fewer in a quick run."""
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
        up = take(
            uploads,
            lambda route: Spec(
                route=route, target=target, directory=directory / "objects", repeats=repeats
            ),
        )
        down = take(
            reads,
            lambda route: Spec(
                route=route,
                target=target,
                directory=directory / "objects",
                repeats=repeats,
                fill=SDK,
            ),
        )
    tables = [up.table(uploads, FLOOR, SDK), down.table(reads, READ_FLOOR, READ_SDK)]
    return Part([*up.failures(), *down.failures()], ("first uploads, then reads",), tables=tables)
