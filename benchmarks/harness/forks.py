"""Ranks by the hundred on one machine: processes forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.tables import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.connection import Connection

T = TypeVar("T")
SECONDS = 120.0
RANKS_PER_NODE = 8
MOST_SOCKETS = 64
"""Of a rank, whatever the number of ranks."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process has open: of itself, or more than at an earlier moment.

    Attributes:
        sockets: Its sockets.
        threads: Its threads.
    """

    sockets: int
    threads: int

    def since(self, before: Footprint) -> Footprint:
        """Return how much more that is.

        Args:
            before: Of an earlier moment.
        """
        return Footprint(self.sockets - before.sockets, self.threads - before.threads)


def footprint() -> Footprint:
    """Return what this process has open now."""
    return Footprint(_sockets(), len(os.listdir("/proc/self/task")))


def sockets_row(found: Iterable[Footprint], peer: str = "") -> Row:
    """Return the row that holds the sockets of ranks against their limit.

    Args:
        found: What each rank has opened, at some moment.
        peer: What a peer has opened.
    """
    most = max(one.sockets for one in found)
    return Row(
        "sockets of a rank, at most",
        dcp_mem=f"{most}",
        target=f"≤ {MOST_SOCKETS}",
        met=most <= MOST_SOCKETS,
        peer=peer,
    )


def in_forks(
    act: Callable[..., T], world: int, *args: Any, preload: str, seconds: float = SECONDS
) -> list[T]:
    """Return what `act(rank, world, store, *args)` returns in each of many processes, by rank.

    They are killed at the end, as ranks are whose job is killed.

    Args:
        act: A function of a module.
        world: The number of processes.
        *args: Further arguments, which are pickled.
        preload: A module to import before the first fork.
        seconds: How long the ranks have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", preload])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_live, args=(act, rank, world, store.port, answer, args))
        for rank, (_, answer) in enumerate(pipes)
    ]
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        found: list[T] = []
        for rank, (answers, _) in enumerate(pipes):
            if not answers.poll(max(deadline - time.monotonic(), 0)):
                raise MeasurementFailed(f"rank {rank} of {world} says nothing")
            answer, error = answers.recv()
            if error:
                raise MeasurementFailed(f"rank {rank} of {world}: {error}")
            found.append(answer)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def meet(store: dist.Store, what: str, world: int) -> None:
    """Wait until all ranks have come here.

    Args:
        store: The job's.
        what: A name that was used for no other meeting.
        world: The number of ranks.
    """
    store.add(what, 1)
    while store.add(what, 0) < world:
        time.sleep(0.01)


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        count += os.path.islink(path) and os.readlink(path).startswith("socket:")
    return count


def _live(
    act: Callable[..., T], rank: int, world: int, port: int, answer: Connection, args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    try:
        answer.send((act(rank, world, store, *args), ""))
    except Exception:
        answer.send((None, traceback.format_exc()))
    meet(store, "done", world)
