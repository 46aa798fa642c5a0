"""What it costs to read objects from the sink into existing memory, route by route."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.storage import source
from benchmarks.harness.storage.cost import Spec
from benchmarks.harness.storage.routes import (
    CAT_RANGES,
    READ_DCP_MEM,
    READ_FLOOR,
    READ_SDK,
    READS,
    SDK,
)
from benchmarks.harness.storage.routing import Found, beside_peer, take, within_cpu
from benchmarks.harness.storage.targets import AZURE, S3, running_sink
from benchmarks.harness.tables import Part, Row, Section, attempt

if TYPE_CHECKING:
    from benchmarks.harness.settings import Settings

TITLE = "Reads into preallocated memory, from a server that serves zeros"
CPU_LIMIT = 0.45
TIMES_LESS = 3.0
PEER_MEMORY = 2
"""Times the bytes that are read: what cat_ranges holds, and some room."""
CONNECTIONS_NOTE = (
    f"ranges of {source.PART_BYTES >> 20} MiB, {source.CONNECTIONS} connections where that can be "
    "set; S3's requests are unsigned"
)
COPIES_NOTE = (
    "routes that return buffers of their own (cat_ranges, get_ranges) are charged for the copy to "
    "where the bytes belong"
)


def run(settings: Settings) -> Section:
    nbytes = GIB if settings.quick else 4 * GIB
    parts = [
        attempt(
            "reads",
            f"{kind}, {source.OBJECTS} objects, {nbytes / GIB:g} GiB in all",
            partial(_part, settings, kind, nbytes),
        )
        for kind in (S3, AZURE)
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, kind: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes * (1 + PEER_MEMORY))
    routes = [route for route in READS if kind in route.kinds]
    with scratch(settings.tmpfs) as directory, running_sink() as sink:
        source.make(directory / "objects", nbytes)
        target, repeats = sink.target(kind), settings.repeats
        found = take(
            routes,
            lambda route: Spec(
                route=route,
                target=target,
                directory=directory / "objects",
                repeats=repeats,
                fill=SDK,
            ),
        )
    return Part(
        [*_verdicts(found), *found.failures()],
        [CONNECTIONS_NOTE, COPIES_NOTE],
        tables=[found.table(routes, READ_FLOOR, READ_SDK)],
    )


def _verdicts(found: Found) -> list[Row]:
    measured, peer = found.costs.get(READ_DCP_MEM.name), found.costs.get(CAT_RANGES.name)
    if measured is None:
        return []
    rows = [within_cpu("CPU of a read", measured, CPU_LIMIT)]
    if peer is not None:
        rows.append(
            beside_peer(f"CPU of a read; peer: {CAT_RANGES.name}", measured, peer, TIMES_LESS)
        )
    return rows
