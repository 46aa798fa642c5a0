"""What connecting and agreeing cost, in jobs of as many ranks as this machine carries.

Every rank is a process of its own, forked from one that has imported torch. The peers are torch's
gloo groups, which connect every rank with every other one: at once, and where they're lazy (torch
2.8) with the first message.

Larger jobs are simulated: ranks are threads of a few processes. Each runs the same code, with its
own connections over loopback; those of a process share one to the store, which the benchmark's own
process serves. Two cores do the work of all ranks then, so seconds are CPU of the busiest ones.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.harness.forks import (
    MOST_SOCKETS,
    RANKS_PER_NODE,
    SECONDS,
    Footprint,
    footprint,
    in_forks,
    meet,
    sockets_row,
)
from benchmarks.harness.processes import MeasurementFailed
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
AGREEMENTS, SIMULATED_AGREEMENTS = 20, 3
SIMULATED_WORLDS, QUICK_SIMULATED_WORLDS = (1024, 4096, 16384), (256,)
RANKS_PER_PROCESS = 1024
SIMULATED_SECONDS = 900.0
STACK_NBYTES = 1 << 20
SETTING_UP_LIMIT, SETTING_UP_WORLD = 2.0, 1024
AGREEMENT_LIMIT = 1e-5
"""Seconds of rank 0, for each rank of the job."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What the ranks of one process measured.

    Attributes:
        connecting: Seconds until all of them have agreed for the first time.
        connecting_cpu: CPU seconds of the process in it.
        first_cpu: CPU seconds of its first rank in it.
        agreement_cpu: CPU seconds of its first rank in a later agreement.
        sockets: Of the rank that has the most, its connection to the store included.
    """

    connecting: float
    connecting_cpu: float
    first_cpu: float
    agreement_cpu: float
    sockets: int


def run(settings: Settings) -> Section:
    worlds = QUICK_WORLDS if settings.quick else WORLDS
    parts = [attempt("connections", f"{world} ranks", partial(_part, world)) for world in worlds]
    for world in QUICK_SIMULATED_WORLDS if settings.quick else SIMULATED_WORLDS:
        title = f"{world:,} ranks, simulated"
        parts.append(attempt("connections", title, partial(_simulated_part, world)))
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
            target=f"≤ {_text(AGREEMENT_LIMIT * world)}",
            met=own[0].agreement_cpu <= AGREEMENT_LIMIT * world,
            peer=f"{_text(gloo[0].agreement_cpu)} (gloo)" if gloo else "",
        ),
    ]
    notes = [f"{way}: {_in_words(ranks)}" for way, ranks in found.items()]
    return Part(rows, notes)


def _simulated_part(world: int) -> Part:
    processes = -(-world // RANKS_PER_PROCESS)
    store_cpu = time.process_time()
    found = in_forks(_simulate, processes, world, preload=__name__, seconds=SIMULATED_SECONDS)
    store_cpu = time.process_time() - store_cpu
    busiest = max(store_cpu, found[0].first_cpu)
    most = max(one.sockets for one in found)
    agreement = found[0].agreement_cpu
    is_limited = world <= SETTING_UP_WORLD
    cpu = sum(one.connecting_cpu for one in found)
    rows = [
        Row(
            "sockets of a rank, at most",
            dcp_mem=f"{most}",
            target=f"≤ {MOST_SOCKETS}",
            met=most <= MOST_SOCKETS,
        ),
        Row("connecting: CPU of the store's host", dcp_mem=_text(store_cpu)),
        Row("connecting: CPU of rank 0", dcp_mem=_text(found[0].first_cpu)),
        Row("connecting: CPU of a rank, on average", dcp_mem=_text(cpu / world)),
        Row(
            "connecting: CPU of the busiest of these",
            dcp_mem=_text(busiest),
            target=f"≤ {SETTING_UP_LIMIT:.0f} s" if is_limited else "",
            met=busiest <= SETTING_UP_LIMIT if is_limited else None,
        ),
        Row(
            "a later agreement: CPU of rank 0",
            dcp_mem=_text(agreement),
            target=f"≤ {_text(AGREEMENT_LIMIT * world)}",
            met=agreement <= AGREEMENT_LIMIT * world,
        ),
    ]
    took = max(one.connecting for one in found)
    return Part(rows, [f"all ranks on this machine's cores: connected in {_text(took)}"])


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


# -- simulated ranks -----------------------------------------------------------------------------


class _Direct:
    """Calls of the store without a thread for each, of which there would be too many."""

    def do(self, act: Callable[[], Any], seconds: float | None = None) -> Any:
        return act()


class _SimulatedRank:
    """A rank in a thread: it agrees when told to."""

    def __init__(self, rank: int, nodes: tuple[str, ...], store: dist.Store) -> None:
        # Shared: a connection for each would take TCPStore 0.2 s, to look for the host's name.
        self._ranks = JobRanks(rank, range(len(nodes)), "simulated", store, SIMULATED_SECONDS)
        self._ranks._timed_store._calls = _Direct()  # type: ignore[assignment]
        self._ranks.set_nodes(nodes)
        self._size = len(nodes)
        self.cpu: list[float] = []

    def agree(self) -> None:
        started = time.thread_time()
        if self._ranks.all_reduce(1, int.__add__) != self._size:
            raise MeasurementFailed("ranks have agreed without one of them")
        self.cpu.append(time.thread_time() - started)

    def sockets(self) -> int:
        """Return its connections, one that listens, and one to the store."""
        peers = self._ranks._in_tree
        assert peers is not None
        return len(peers._links) + (peers._door is not None) + 1


def _simulate(part: int, parts: int, store: dist.Store, world: int) -> Simulated:
    threading.stack_size(STACK_NBYTES)
    nodes = tuple(str(rank // RANKS_PER_NODE) for rank in range(world))
    own = range(part * RANKS_PER_PROCESS, min((part + 1) * RANKS_PER_PROCESS, world))
    ranks = [_SimulatedRank(rank, nodes, store) for rank in own]
    times = []
    for number in range(1 + SIMULATED_AGREEMENTS):
        meet(store, f"before {number}", parts)
        started, cpu = time.perf_counter(), time.process_time()
        threads = [threading.Thread(target=rank.agree) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append((time.perf_counter() - started, time.process_time() - cpu))
    failed = [rank for rank, one in zip(own, ranks, strict=True) if len(one.cpu) != len(times)]
    if failed:
        raise MeasurementFailed(f"ranks {failed[:5]} have failed")
    return Simulated(
        connecting=times[0][0],
        connecting_cpu=times[0][1],
        first_cpu=ranks[0].cpu[0],
        agreement_cpu=median(ranks[0].cpu[1:]),
        sockets=max(rank.sockets() for rank in ranks),
    )
