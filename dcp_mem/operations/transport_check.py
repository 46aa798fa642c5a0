"""Measure what copies go by between a job's nodes, and judge whether it works there.

In a ring: each node reads from the one before it while the next one reads from it.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

from dcp_mem.comm.addresses import rdma_devices
from dcp_mem.comm.collectives import Channel, PendingMessage, Ranks
from dcp_mem.comm.timed_store import MeetingPlace, TimedStore, own_connection
from dcp_mem.comm.transports import Pair, TransportUnusable, transport
from dcp_mem.common.sendable import sendable
from dcp_mem.format.checksums import checksum
from dcp_mem.operations.doctor import Check, Severity, judged

_NBYTES, _MESSAGE, _IN_FLIGHT = 1 << 30, 16 << 20, 4
_ROUNDS = 3
_TIMEOUT = 120.0
_SLOW = 0.5
"""A node below this part of the best rate is called slow."""
_MOST_NAMED = 5


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTransport:
    """One node's figures."""

    rank: int
    host: str
    trouble: str  # why the transport doesn't work between this node and a neighbour; "" if it does
    devices: Sequence[str] = ()  # its cards that do RDMA and have a link
    # bytes that this process may lock, as a card needs; None: as many as it likes
    locked_nbytes: int | None = None
    rate: float = 0.0  # bytes per second from the node before it, while the next one reads from it
    cpu: float = 0.0  # CPU seconds of this process per byte that it sends and receives
    is_equal: bool = True  # whether the bytes that came are those that were sent


def measure_transport(ranks: Ranks, store: dist.Store, choice: str) -> Sequence[NodeTransport]:
    """Measure together with the other ranks.

    Returns what every rank found, by rank; on all of them. Raises ConfigError, RankFailed.
    """
    return ranks.exchange(_Ring(ranks, choice, store).measured())


class _Ring:
    def __init__(self, ranks: Ranks, choice: str, store: dist.Store) -> None:
        self.ranks, self.choice, self.store = ranks, choice, store
        self._sent, self._came = bytearray(os.urandom(1 << 20) * 64), bytearray(64 << 20)

    def measured(self) -> NodeTransport:
        """Connect to both neighbours, and measure where all ranks could."""
        rank, size = self.ranks.rank, self.ranks.size
        after, before = (rank + 1) % size, (rank - 1) % size
        with ThreadPoolExecutor(2, thread_name_prefix="dcp_mem-doctor") as pool:
            ends = [
                pool.submit(self._connected, rank, after, True),
                pool.submit(self._connected, before, rank, False),
            ]
            found = [end.result() for end in ends]
            trouble = next((one for one in found if isinstance(one, str)), "")
            channels = [one for one in found if not isinstance(one, str)]
            try:
                # Nobody waits for a neighbour that couldn't connect to its other one.
                if any(self.ranks.exchange(bool(trouble))):
                    return self._node(trouble)
                return self._timed(pool, channels[0], channels[1])
            finally:
                for channel in channels:
                    channel.close()

    def _connected(self, sender: int, receiver: int, is_sender: bool) -> Channel | str:
        """Return this rank's end of a channel, or why there is none."""
        own = TimedStore(own_connection(self.store, _TIMEOUT), _TIMEOUT)
        place = MeetingPlace(own, f"dcp_mem/doctor/{sender}-{receiver}/", self.ranks.look)
        try:
            return transport(self.choice)(Pair(store=place, is_sender=is_sender, seconds=_TIMEOUT))
        except TransportUnusable as error:
            return str(error)

    def _timed(self, pool: ThreadPoolExecutor, out: Channel, back: Channel) -> NodeTransport:
        self._came[:] = bytes(len(self._came))
        seconds, spent = list[float](), 0.0
        with out.registered(self._sent), back.registered(self._came):
            for _ in range(_ROUNDS):
                self.ranks.all_reduce(0, int.__add__)
                started, cpu = time.perf_counter(), time.process_time()
                sending = pool.submit(self._move, out, self._sent, True)
                self._move(back, self._came, False)
                sending.result()
                seconds.append(time.perf_counter() - started)
                spent = time.process_time() - cpu
        sums = self.ranks.exchange(checksum(memoryview(self._sent)))
        before = (self.ranks.rank - 1) % self.ranks.size
        return self._node(
            "",
            _NBYTES / min(seconds),
            spent / _NBYTES,
            sums[before] == checksum(memoryview(self._came)),
        )

    def _move(self, channel: Channel, memory: bytearray, is_sent: bool) -> None:
        act, pending = channel.send if is_sent else channel.receive, deque[PendingMessage]()
        view = memoryview(memory)
        for place in range(0, _NBYTES, _MESSAGE):
            if len(pending) == _IN_FLIGHT:
                pending.popleft().wait()
            start = place % len(view)
            pending.append(act(view[start : start + _MESSAGE]))
        for message in pending:
            message.wait()

    def _node(
        self, trouble: str, rate: float = 0.0, cpu: float = 0.0, is_equal: bool = True
    ) -> NodeTransport:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return NodeTransport(
            rank=self.ranks.rank,
            host=socket.gethostname(),
            trouble=trouble,
            devices=rdma_devices(),
            locked_nbytes=None if limit == resource.RLIM_INFINITY else limit,
            rate=rate,
            cpu=cpu,
            is_equal=is_equal,
        )


def judge_transport(nodes: Sequence[NodeTransport], choice: str) -> Iterator[Check]:
    """Yield a check for each thing that the nodes' figures tell."""
    yield _cards(nodes)
    if choice != "tcp":
        yield _locked_memory(nodes)
    troubles = [node for node in nodes if node.trouble]
    if troubles:
        found = f"{choice} doesn't work between all nodes: copies go over TCP there"
        worst = Severity.WARN if choice == "auto" else Severity.FAIL
        yield judged("transport", found, f"{named(troubles)}: {troubles[0].trouble}", worst)
        return
    wrong = [node for node in nodes if not node.is_equal]
    if wrong:
        advice = f"{named(wrong)} got other bytes than were sent: don't use it"
        yield judged("transport", f"{choice} between all nodes", advice, Severity.FAIL)
        return
    yield judged("transport", f"{choice} between all nodes, bytes as they were sent")
    yield _rates(nodes)


def _cards(nodes: Sequence[NodeTransport]) -> Check:
    names = sorted({name for node in nodes for name in node.devices})
    without = [node for node in nodes if not node.devices]
    if not names:
        return judged("RDMA", "no cards that do RDMA and have a link")
    advice = f"{named(without)} has none with a link: look at `ibstat` there" if without else ""
    return judged("RDMA", ", ".join(names), advice)


def _locked_memory(nodes: Sequence[NodeTransport]) -> Check:
    limited = [node for node in nodes if node.devices and node.locked_nbytes is not None]
    if not limited:
        return judged("locked memory", "not limited where cards need it")
    least = min(node.locked_nbytes or 0 for node in limited)
    return judged(
        "locked memory",
        f"at most {least >> 10} KiB",
        f"{named(limited)}: cards need the memory that they read locked; raise the limit in the "
        "shell that starts the ranks, by `ulimit -l unlimited`",
    )


def _rates(nodes: Sequence[NodeTransport]) -> Check:
    rate = statistics.median(node.rate for node in nodes)
    cpu = statistics.median(node.cpu for node in nodes)
    found = f"{rate / 1e9:.2f} GB/s out and as much in, {cpu * 1e9:.2f} CPU-seconds per GB"
    slow = slow_among(nodes)
    if not slow:
        return judged("bandwidth of copies", found)
    least = min(node.rate for node in slow)
    advice = f"{named(slow)}: {least / 1e9:.2f} GB/s from the node before it"
    return judged("bandwidth of copies", found, advice)


class MeasuredNode(Protocol):
    """A node's figures: the machine's name, and the rank of the process that measured.

    `rate`: bytes per second between it and a neighbour.
    """

    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def rate(self) -> float: ...


Node = TypeVar("Node", bound=MeasuredNode)


def slow_among(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are much slower than the fastest one."""
    return [node for node in nodes if node.rate < _SLOW * max(one.rate for one in nodes)]


def named(nodes: Sequence[MeasuredNode]) -> str:
    """Return the names of the first few nodes, and how many more there are."""
    text = ", ".join(f"{node.host} (rank {node.rank})" for node in nodes[:_MOST_NAMED])
    more = len(nodes) - _MOST_NAMED
    return text + (f" and {more} more" if more > 0 else "")
