"""What it costs to read objects into memory that is there already, route by route, from the sink."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.report import Part, Row, Section, attempt
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB
from benchmarks.storage import source
from benchmarks.storage.cost import Spec
from benchmarks.storage.routes import CAT_RANGES, READ_FLOOR, READ_OURS, READ_SDK, READS, SDK
from benchmarks.storage.table import Found, beside_peer, take, within_cpu
from benchmarks.storage.targets import AZURE, S3, running_sink

if TYPE_CHECKING:
    from benchmarks.settings import Settings

TITLE = "Reads into preallocated memory, from a server that serves zeros"
CPU_LIMIT = 0.45
TIMES_LESS = 3.0
PEER_MEMORY = 2
"""Of the bytes that are read: what cat_ranges holds, and some room."""
CONNECTIONS_NOTE = (
    f"ranges of {source.PART_BYTES >> 20} MiB, {source.CONNECTIONS} connections where a route lets itself be told; S3's "
    "requests are unsigned"
)
COPIES_NOTE = (
    "what hands out buffers of its own (cat_ranges, get_ranges) is charged for the copy to where the bytes belong"
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
        found = take(routes, lambda route: Spec(route, target, directory / "objects", repeats, fill=SDK))
    return Part(
        [*_verdicts(found), *found.failures()],
        [CONNECTIONS_NOTE, COPIES_NOTE],
        tables=[found.table(routes, READ_FLOOR, READ_SDK)],
    )


def _verdicts(found: Found) -> list[Row]:
    ours, peer = found.costs.get(READ_OURS.name), found.costs.get(CAT_RANGES.name)
    if ours is None:
        return []
    rows = [within_cpu("CPU of a read", ours, CPU_LIMIT)]
    if peer is not None:
        rows.append(beside_peer(f"CPU of a read; peer: {CAT_RANGES.name}", ours, peer, TIMES_LESS))
    return rows
