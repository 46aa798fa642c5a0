"""What connecting and agreeing cost, in jobs of as many ranks as this machine carries.

Every rank is a process of its own, forked from one that has imported torch. The peers are torch's
gloo groups, which connect every rank with every other one: at once, and where they're lazy (torch
2.8) with the first message.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.harness.forks import (
    RANKS_PER_NODE,
    SECONDS,
    Footprint,
    footprint,
    in_forks,
    meet,
    sockets_row,
)
from benchmarks.harness.tables import Part, Row, Section, attempt
from dcp_mem.comm.job_ranks import JobRanks
from dcp_mem.comm.timed_store import own_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness.settings import Settings

TITLE = "Connections and agreement of many ranks"
WORLDS, QUICK_WORLDS = (16, 64, 128), (16,)
MOST_RANKS_OF_GLOO = 64
"""A group of more of them takes minutes and tens of thousands of sockets on one machine."""
AGREEMENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one rank measured.

    Attributes:
        connecting: Seconds from the start of the first agreement to its end.
        connecting_cpu: CPU seconds of this rank in it.
        agreement: Median seconds of a later agreement.
        agreement_cpu: CPU seconds of this rank in a later agreement.
        opened: By connecting.
    """

    connecting: float
    connecting_cpu: float
    agreement: float
    agreement_cpu: float
    opened: Footprint


def run(settings: Settings) -> Section:
    worlds = QUICK_WORLDS if settings.quick else WORLDS
    parts = [attempt("connections", f"{world} ranks", partial(_part, world)) for world in worlds]
    return Section(TITLE, parts)


def _part(world: int) -> Part:
    ways = ["dcp_mem", *(["gloo", "lazy gloo"] if world <= MOST_RANKS_OF_GLOO else [])]
    found = {way: _measured(way, world) for way in ways}
    own = found["dcp_mem"]
    gloo = found.get("gloo", [])
    rows = [
        sockets_row(
            [one.opened for one in own],
            peer=f"{max(one.opened.sockets for one in gloo)} (gloo)" if gloo else "",
        ),
        Row(
            "connecting, and the first agreement",
            dcp_mem=_text(max(one.connecting for one in own)),
            peer=f"{_text(max(one.connecting for one in gloo))} (gloo)" if gloo else "",
        ),
        Row(
            "the same, CPU of all ranks",
            dcp_mem=_text(sum(one.connecting_cpu for one in own)),
            peer=f"{_text(sum(one.connecting_cpu for one in gloo))} (gloo)" if gloo else "",
        ),
        Row(
            "a later agreement",
            dcp_mem=_text(median(one.agreement for one in own)),
            peer=f"{_text(median(one.agreement for one in gloo))} (gloo)" if gloo else "",
        ),
        Row(
            "the same, CPU of rank 0",
            dcp_mem=_text(own[0].agreement_cpu),
            peer=f"{_text(gloo[0].agreement_cpu)} (gloo)" if gloo else "",
        ),
    ]
    notes = [f"{way}: {_in_words(ranks)}" for way, ranks in found.items()]
    return Part(rows, notes)


def _in_words(ranks: list[Found]) -> str:
    return (
        f"at most {max(one.opened.sockets for one in ranks)} sockets and "
        f"{max(one.opened.threads for one in ranks)} threads more; connecting took "
        f"{_text(max(one.connecting for one in ranks))}, an agreement "
        f"{_text(median(one.agreement for one in ranks))}"
    )


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


# -- the ranks -----------------------------------------------------------------------------------


def _measured(way: str, world: int) -> list[Found]:
    """Return what the ranks of a fresh job found, by rank."""
    return in_forks(_live, world, way, preload=__name__)


def _live(rank: int, world: int, store: dist.Store, way: str) -> Found:
    agree, keep = _agreement(way, rank, world, store)
    meet(store, "ready", world)
    before = footprint()
    started, cpu = time.perf_counter(), time.process_time()
    agree()
    connecting, connecting_cpu = time.perf_counter() - started, time.process_time() - cpu
    opened = footprint().since(before)
    meet(store, "connected", world)
    cpu, seconds = time.process_time(), []
    for _ in range(AGREEMENTS):
        started = time.perf_counter()
        agree()
        seconds.append(time.perf_counter() - started)
    agreement_cpu = (time.process_time() - cpu) / AGREEMENTS
    meet(store, "measured", world)
    del keep
    return Found(
        connecting=connecting,
        connecting_cpu=connecting_cpu,
        agreement=median(seconds),
        agreement_cpu=agreement_cpu,
        opened=opened,
    )


def _agreement(
    way: str, rank: int, world: int, store: dist.Store
) -> tuple[Callable[[], object], list[Any]]:
    """Return what makes all ranks agree, which connects them first, and what has to stay alive."""
    if way == "dcp_mem":
        ranks = JobRanks(rank, range(world), "many", own_connection(store, SECONDS), SECONDS)
        ranks.set_nodes([str(other // RANKS_PER_NODE) for other in range(world)])
        return lambda: ranks.all_reduce(1, int.__add__), [ranks]
    groups: list[Any] = []
    number = torch.ones(1)

    def agree() -> None:
        if not groups:
            groups.append(_group(way, rank, world, dist.PrefixStore(way, store)))
        groups[0].allreduce([number]).wait()

    return agree, groups


def _group(way: str, rank: int, world: int, store: dist.Store) -> Any:
    if way == "gloo":
        return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=SECONDS))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo", lazy_init=True)]
    options._timeout = timedelta(seconds=SECONDS)
    return gloo(store, rank, world, options)
