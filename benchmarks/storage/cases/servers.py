"""The same routes against real servers, which do something with what they get. No verdicts: they are what takes the time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.report import Part, Section, attempt
from benchmarks.scratch import need, scratch
from benchmarks.settings import GIB, MIB
from benchmarks.storage import source
from benchmarks.storage.cost import Spec
from benchmarks.storage.routes import FLOOR, READ_FLOOR, READ_SDK, READS, SDK, UPLOADS
from benchmarks.storage.table import take
from benchmarks.storage.targets import REAL, running_server

if TYPE_CHECKING:
    from benchmarks.settings import Settings

TITLE = "Real servers"
SERVER_COPIES = 6
"""Of the objects: several of each route's, before a server in memory lets go of them."""


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


def _part(settings: Settings, name: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes * SERVER_COPIES + GIB)
    with scratch(settings.tmpfs) as directory, running_server(name) as target:
        source.make(directory / "objects", nbytes)
        uploads = [route for route in UPLOADS if target.kind in route.kinds]
        reads = [route for route in READS if target.kind in route.kinds]
        up = take(uploads, lambda route: Spec(route, target, directory / "objects", settings.repeats))
        down = take(reads, lambda route: Spec(route, target, directory / "objects", settings.repeats, fill=SDK))
    tables = [up.table(uploads, FLOOR, SDK), down.table(reads, READ_FLOOR, READ_SDK)]
    return Part([*up.failures(), *down.failures()], ("first uploads, then reads",), tables=tables)
