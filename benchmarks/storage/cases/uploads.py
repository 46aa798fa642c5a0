"""What an upload costs, route by route, against the sink."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.report import Part, Row, Section, attempt
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB, MIB
from benchmarks.storage import source
from benchmarks.storage.cost import Spec
from benchmarks.storage.routes import (
    CONNECTOR,
    FLOOR,
    FSSPEC_WRITER,
    OPEN_WRITE,
    OURS,
    PIPE_FILE,
    SDK,
    UPLOADS,
)
from benchmarks.storage.table import Found, beside_floor, beside_peer, take, within_cpu, within_memory
from benchmarks.storage.targets import AZURE, S3, running_sink

if TYPE_CHECKING:
    from benchmarks.settings import Settings

TITLE = "Uploads to a server that drops bodies"
FLOOR_LIMIT = 2.0
CPU_LIMIT = 0.30
MEMORY_LIMIT = 64 * MIB
TIMES_LESS = 4.0
PEER_MEMORY = 8 * GIB
"""What the hungriest peers were seen to take for a GiB, and some room."""

CONNECTIONS_NOTE = (
    f"every route in a process of its own, with {source.CONNECTIONS} connections where it lets itself be told; plain "
    "http; S3's requests are unsigned, because over http their signature would cover a SHA-256 of every part, and over "
    "https it doesn't"
)
CPU_NOTE = (
    "CPU: user and system time of the client's process, all threads, once it has moved everything a first time; over "
    "loopback, part of the receiving side's work is done, and counted, where it is sent"
)
MEMORY_NOTE = (
    "extra RSS: the most that the process had, above what it had when its client was ready and had moved 1 MiB per "
    "object; the objects were mapped before that. Judged is RssAnon: mapped pages of tmpfs are the checkpoint itself"
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
        for kind in (S3, AZURE)
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, kind: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes + PEER_MEMORY)
    routes = [route for route in UPLOADS if kind in route.kinds]
    with scratch(settings.tmpfs) as directory, running_sink() as sink:
        made_of = source.make(directory / "objects", nbytes)
        target = sink.target(kind)
        found = take(routes, lambda route: Spec(route, target, directory / "objects", settings.repeats))
    return Part(
        [*_verdicts(found), *found.failures()],
        [made_of, CONNECTIONS_NOTE, CPU_NOTE, MEMORY_NOTE, SAVE_NOTE],
        tables=[found.table(routes, FLOOR, SDK)],
    )


def _verdicts(found: Found) -> list[Row]:
    """Ours beside its limits, as far as it and what it is compared with were measured."""
    costs, ours = found.costs, found.costs.get(OURS.name)
    if ours is None:
        return []
    rows = [
        within_cpu("CPU of an upload", ours, CPU_LIMIT),
        within_memory("extra memory of an upload", ours, MEMORY_LIMIT),
    ]
    if floor := costs.get(FLOOR.name):
        rows.insert(0, beside_floor("CPU of an upload; floor: raw sockets", floor, ours, FLOOR_LIMIT))
    rows += [
        beside_peer(f"CPU of an upload; peer: {peer.name}", ours, costs[peer.name], TIMES_LESS)
        for peer in (PIPE_FILE, OPEN_WRITE, FSSPEC_WRITER, CONNECTOR)
        if peer.name in costs
    ]
    return rows
