"""What an upload to the sink costs, route by route."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.storage import source
from benchmarks.harness.storage.cost import Spec
from benchmarks.harness.storage.routes import (
    CONNECTOR,
    DCP_MEM,
    FLOOR,
    FSSPEC_WRITER,
    OPEN_WRITE,
    PIPE_FILE,
    SDK,
    UPLOADS,
)
from benchmarks.harness.storage.routing import (
    Found,
    beside_floor,
    beside_peer,
    take,
    within_cpu,
    within_memory,
)
from benchmarks.harness.storage.targets import AZURE, GOOGLE, S3, running_sink
from benchmarks.harness.tables import Part, Row, Section, attempt

if TYPE_CHECKING:
    from benchmarks.harness.settings import Settings

TITLE = "Uploads to a server that drops bodies"
FLOOR_LIMIT = 2.0
CPU_LIMIT = 0.30
MEMORY_LIMIT = 64 * MIB
TIMES_LESS = 4.0
PEER_MEMORY = 8 * GIB
"""The most that peers were seen to take for a GiB, and some room."""

CONNECTIONS_NOTE = (
    f"every route in a process of its own, with {source.CONNECTIONS} connections where that can be "
    "set; plain http; S3's requests are unsigned, because over http their signature would cover a "
    "SHA-256 of every part, and over https it doesn't; Google's peers would speak its JSON API, "
    "which the sink doesn't"
)
CPU_NOTE = (
    "CPU: user and system time of the client's process, all threads, once it has moved everything "
    "a first time; over loopback, part of the receiver's work is done, and counted, in the sender"
)
MEMORY_NOTE = (
    "extra RSS: the most that the process had, above what it had when its client was ready and had "
    "moved 1 MiB per object; the objects were mapped before that. RssAnon is what is judged: "
    "mapped pages of tmpfs are the checkpoint itself"
)
SAVE_NOTE = "dcp.save: a whole save of as many bytes, as tensors that lie in the same tmpfs"


def run(settings: Settings) -> Section:
    nbytes = GIB if settings.quick else 4 * GIB
    parts = [
        attempt(
            "uploads",
            f"{kind}, {source.OBJECTS} objects, {nbytes / GIB:g} GiB in all",
            partial(_part, settings, kind, nbytes),
        )
        for kind in (S3, AZURE, GOOGLE)
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, kind: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes + PEER_MEMORY)
    routes = [route for route in UPLOADS if kind in route.kinds]
    with scratch(settings.tmpfs) as directory, running_sink() as sink:
        made_of = source.make(directory / "objects", nbytes)
        target = sink.target(kind)
        found = take(
            routes,
            lambda route: Spec(
                route=route,
                target=target,
                directory=directory / "objects",
                repeats=settings.repeats,
            ),
        )
    return Part(
        [*_verdicts(found), *found.failures()],
        [made_of, CONNECTIONS_NOTE, CPU_NOTE, MEMORY_NOTE, SAVE_NOTE],
        tables=[found.table(routes, FLOOR, SDK)],
    )


def _verdicts(found: Found) -> list[Row]:
    """Judge dcp_mem's route, as far as it and the routes beside it were measured."""
    costs, measured = found.costs, found.costs.get(DCP_MEM.name)
    if measured is None:
        return []
    rows = [
        within_cpu("CPU of an upload", measured, CPU_LIMIT),
        within_memory("extra memory of an upload", measured, MEMORY_LIMIT),
    ]
    if floor := costs.get(FLOOR.name):
        rows.insert(
            0, beside_floor("CPU of an upload; floor: raw sockets", floor, measured, FLOOR_LIMIT)
        )
    rows += [
        beside_peer(f"CPU of an upload; peer: {peer.name}", measured, costs[peer.name], TIMES_LESS)
        for peer in (PIPE_FILE, OPEN_WRITE, FSSPEC_WRITER, CONNECTOR)
        if peer.name in costs
    ]
    return rows
