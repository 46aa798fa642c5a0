"""Measure the network between a job's nodes, and what copies go by, and judge both.

Each node sends to the next one, in a ring, over channels as copies go by: by TCP, and by the
transport of choice. So it takes as long for a thousand nodes as for two.
"""

from __future__ import annotations

import os
import resource
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from dcp_mem.comm.addresses import addresses_of_interface, listening_socket, rdma_devices
from dcp_mem.comm.collectives import Channel, PendingMessage, Ranks
from dcp_mem.comm.job_ranks import JobRanks
from dcp_mem.comm.timed_store import MeetingPlace, TimedStore, own_connection
from dcp_mem.comm.transports import Pair, TransportUnusable, transport
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import ConfigError
from dcp_mem.format.checksums import checksum
from dcp_mem.operations.doctor import Check, Severity, judged

_NBYTES = 64 << 20
_ROUNDS, _SMALL_ROUNDS = 5, 50
_COPIED_NBYTES, _MESSAGE, _IN_FLIGHT = 1 << 30, 16 << 20, 4
_COPY_ROUNDS = 3
_TIMEOUT = 120.0
_MUCH_FASTER = 4
"""From which factor on another interface is taken for the one that was meant."""
_SLOW = 0.5
"""A node below this part of the best rate is called slow."""
_MOST_NAMED = 5


@value_class(kw_only=True)
class MeasuredNode:
    """A node's figures: the machine's name, and the rank of the process that measured."""

    rank: int
    host: str
    rate: float = 0.0  # median bytes per second between it and a neighbour, both ways at once


Node = TypeVar("Node", bound=MeasuredNode)


@sendable
@value_class(kw_only=True)
class NodeNetwork(MeasuredNode):
    address: str
    interface: str  # whose address that is; "" where it isn't known
    speed: float | None  # of the interface, in bit/s; None where the kernel doesn't know it
    # interfaces of this machine that are up and much faster, with their speeds
    faster: Sequence[tuple[str, float]]
    # median seconds of a small message to the next node, and one from the node before
    latency: float = 0.0


@sendable
@value_class(kw_only=True)
class NodeTransport(MeasuredNode):
    trouble: str  # why the transport doesn't work between this node and a neighbour; "" if it does
    devices: Sequence[str] = ()  # its cards that do RDMA and have a link
    # bytes that this process may lock, as a card needs; None: as many as it likes
    locked_nbytes: int | None = None
    cpu: float = 0.0  # CPU seconds of this process per byte that it sends and receives
    is_equal: bool = True  # whether the bytes that came are those that were sent


def measure_network(
    choice: str | None = None,
) -> tuple[Sequence[NodeNetwork], Sequence[NodeTransport]]:
    """Measure together with the other processes that a launcher has started; one on each node is
    enough. Each has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as by
    torchrun. Returns what every process found, by rank, of the network and of the transport, if one
    is named.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "--peers measures between nodes: start it on each of them at once, for instance by "
            "`torchrun --no-python --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
            "dcp-mem doctor --peers`"
        )
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=_TIMEOUT)))
    ranks = JobRanks(rank, range(world), "doctor", store, _TIMEOUT)
    try:
        nodes = ranks.exchange(_measured_network(ranks))
        moved = [] if choice is None else ranks.exchange(_measured_transport(ranks, store, choice))
        return nodes, moved
    finally:
        ranks.close()


def judge_network(nodes: Sequence[NodeNetwork]) -> Iterator[Check]:
    yield _interfaces(nodes)
    yield _wrong_cards(nodes)
    latency = statistics.median(node.latency for node in nodes)
    yield judged("latency", f"{latency * 1e6:.0f} µs for a small message")
    yield _rates(nodes)


def _interfaces(nodes: Sequence[NodeNetwork]) -> Check:
    hosts = {node.host for node in nodes}
    names = ", ".join(sorted({node.interface or node.address for node in nodes}))
    found = f"{names} on {len(hosts)} nodes, {len(nodes)} processes"
    local = [node for node in nodes if node.address.startswith("127.") or node.address == "::1"]
    if local and len(hosts) > 1:
        advice = (
            f"{_named(local)} can't be reached from other nodes: their names stand for the "
            f"loopback address. Set GLOO_SOCKET_IFNAME to the interface of the nodes' network"
        )
        return judged("interface", found, advice, Severity.FAIL)
    return judged("interface", found)


def _wrong_cards(nodes: Sequence[NodeNetwork]) -> Check:
    slow = [node for node in nodes if node.faster]
    speeds = sorted({_speed(node.speed) for node in nodes if node.speed is not None})
    found = f"{', '.join(speeds)}" if speeds else "not known"
    if not slow:
        return judged("speed of interface", found)
    interface, speed = slow[0].faster[0]
    return judged(
        "speed of interface",
        found,
        f"{_named(slow)} also has {interface}, up, of {_speed(speed)}: if all nodes reach each "
        f"other over it, set GLOO_SOCKET_IFNAME={interface}",
    )


def _rates(nodes: Sequence[NodeNetwork]) -> Check:
    median = statistics.median(node.rate for node in nodes)
    found = f"{median / 1e9:.2f} GB/s out and as much in, by one thread of each node"
    # A slow node slows the one before and the one behind it as well: few nodes have no fair median.
    slow = _slow_among(nodes)
    if not slow:
        return judged("bandwidth", found)
    least = min(node.rate for node in slow)
    return judged(
        "bandwidth",
        found,
        f"{_named(slow)}: {least / 1e9:.2f} GB/s to the next node. Look at the cables, and at "
        f"which interfaces these nodes and their successors take",
    )


def _speed(bits_per_second: float | None) -> str:
    return "not known" if bits_per_second is None else f"{bits_per_second / 1e9:g} Gb/s"


# -- measuring ------------------------------------------------------------------------------------


class _Ring:
    """This rank's channels to the next rank, and from the one before; and what goes over them."""

    def __init__(self, ranks: Ranks, out: Channel, back: Channel) -> None:
        self.ranks, self.out, self.back = ranks, out, back
        self.sent, self.came = bytearray(os.urandom(1 << 20) * 64), bytearray(64 << 20)

    def rounds(self, nbytes: int, count: int) -> list[tuple[float, float]]:
        """Return the seconds of each round, in which so many bytes go and come; and of the CPU."""
        found = []
        with ThreadPoolExecutor(1, thread_name_prefix="dcp_mem-doctor") as pool:
            for _ in range(count):
                self.ranks.all_reduce(0, int.__add__)
                started, cpu = time.perf_counter(), time.process_time()
                sending = pool.submit(_move, self.out.send, self.sent, nbytes)
                _move(self.back.receive, self.came, nbytes)
                sending.result()
                found.append((time.perf_counter() - started, time.process_time() - cpu))
        return found


def _move(act: Callable[[memoryview], PendingMessage], memory: bytearray, nbytes: int) -> None:
    view, pending = memoryview(memory), deque[PendingMessage]()
    for place in range(0, nbytes, _MESSAGE):
        if len(pending) == _IN_FLIGHT:
            pending.popleft().wait()
        start = place % len(view)
        pending.append(act(view[start : start + min(_MESSAGE, nbytes - place)]))
    for message in pending:
        message.wait()


def _neighbours(ranks: Ranks) -> tuple[int, int]:
    """Return the next rank, and the one before."""
    return (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size


# -- the network ----------------------------------------------------------------------------------


def _measured_network(ranks: Ranks) -> NodeNetwork:
    after, before = _neighbours(ranks)
    ends = [(ranks.rank, after), (before, ranks.rank)]
    # In turn, so that not each rank waits for the next one.
    channels = {end: ranks.channel(*end) for end in (ends if ranks.rank % 2 else ends[::-1])}
    ring = _Ring(ranks, *(channels[end] for end in ends))
    # The first round touches the memory.
    latency = statistics.median(seconds for seconds, _ in ring.rounds(1, 1 + _SMALL_ROUNDS)[1:])
    seconds = statistics.median(seconds for seconds, _ in ring.rounds(_NBYTES, 1 + _ROUNDS)[1:])
    return replace(_own_network(ranks.rank), latency=latency, rate=_NBYTES / seconds)


def _own_network(rank: int) -> NodeNetwork:
    with listening_socket() as listener:
        address = str(listener.getsockname()[0])
    names = [name for _, name in socket.if_nameindex()]
    interface = next((name for name in names if address in addresses_of_interface(name)), "")
    speed = _interface_speed(interface) if interface else None
    others = [(name, _interface_speed(name)) for name in names if name != interface]
    faster = [
        (name, other)
        for name, other in others
        if speed is not None and other is not None and other >= _MUCH_FASTER * speed
    ]
    return NodeNetwork(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=interface,
        speed=speed,
        faster=sorted(faster, key=lambda one: -one[1]),
    )


def _interface_speed(name: str) -> float | None:
    """Return the speed of an interface that is up, in bit/s; None where the kernel has none."""
    directory = Path("/sys/class/net", name)
    try:
        if (directory / "operstate").read_text().strip() != "up":
            return None
        megabits = int((directory / "speed").read_text())
    except (OSError, ValueError):  # virtual interfaces have none
        return None
    return megabits * 1e6 if megabits > 0 else None


# -- what copies go by ----------------------------------------------------------------------------


def _measured_transport(ranks: Ranks, store: dist.Store, choice: str) -> NodeTransport:
    """Connect to both neighbours, and measure where all ranks could."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    node = NodeTransport(
        rank=ranks.rank,
        host=socket.gethostname(),
        trouble="",
        devices=rdma_devices(),
        locked_nbytes=None if limit == resource.RLIM_INFINITY else limit,
    )

    def connected(sender: int, receiver: int) -> Channel | str:
        """Return this rank's end of a channel, or why there is none."""
        own = TimedStore(own_connection(store, _TIMEOUT), _TIMEOUT)
        place = MeetingPlace(own, f"dcp_mem/doctor/{sender}-{receiver}/", ranks.look)
        pair = Pair(store=place, is_sender=sender == ranks.rank, seconds=_TIMEOUT)
        try:
            return transport(choice)(pair)
        except TransportUnusable as error:
            return str(error)

    after, before = _neighbours(ranks)
    with ThreadPoolExecutor(2, thread_name_prefix="dcp_mem-doctor") as pool:
        found = list(pool.map(connected, (ranks.rank, before), (after, ranks.rank)))
    channels = [one for one in found if not isinstance(one, str)]
    try:
        trouble = next((one for one in found if isinstance(one, str)), "")
        # Nobody waits for a neighbour that couldn't connect to its other one.
        if any(ranks.exchange(bool(trouble))):
            return replace(node, trouble=trouble)
        ring = _Ring(ranks, *channels)
        with ring.out.registered(ring.sent), ring.back.registered(ring.came):
            rounds = ring.rounds(_COPIED_NBYTES, _COPY_ROUNDS)
        sums = ranks.exchange(checksum(memoryview(ring.sent)))
    finally:
        for channel in channels:
            channel.close()
    return replace(
        node,
        rate=_COPIED_NBYTES / min(seconds for seconds, _ in rounds),
        cpu=rounds[-1][1] / _COPIED_NBYTES,
        is_equal=sums[before] == checksum(memoryview(ring.came)),
    )


def judge_transport(nodes: Sequence[NodeTransport], choice: str) -> Iterator[Check]:
    yield _cards(nodes)
    if choice != "tcp":
        yield _locked_memory(nodes)
    troubles = [node for node in nodes if node.trouble]
    if troubles:
        found = f"{choice} doesn't work between all nodes: copies go over TCP there"
        worst = Severity.WARN if choice == "auto" else Severity.FAIL
        yield judged("transport", found, f"{_named(troubles)}: {troubles[0].trouble}", worst)
        return
    wrong = [node for node in nodes if not node.is_equal]
    if wrong:
        advice = f"{_named(wrong)} got other bytes than were sent: don't use it"
        yield judged("transport", f"{choice} between all nodes", advice, Severity.FAIL)
        return
    yield judged("transport", f"{choice} between all nodes, bytes as they were sent")
    yield _rates_of_copies(nodes)


def _cards(nodes: Sequence[NodeTransport]) -> Check:
    names = sorted({name for node in nodes for name in node.devices})
    without = [node for node in nodes if not node.devices]
    if not names:
        return judged("RDMA", "no cards that do RDMA and have a link")
    advice = f"{_named(without)} has none with a link: look at `ibstat` there" if without else ""
    return judged("RDMA", ", ".join(names), advice)


def _locked_memory(nodes: Sequence[NodeTransport]) -> Check:
    limited = [node for node in nodes if node.devices and node.locked_nbytes is not None]
    if not limited:
        return judged("locked memory", "not limited where cards need it")
    least = min(node.locked_nbytes or 0 for node in limited)
    return judged(
        "locked memory",
        f"at most {least >> 10} KiB",
        f"{_named(limited)}: cards need the memory that they read locked; raise the limit in the "
        "shell that starts the ranks, by `ulimit -l unlimited`",
    )


def _rates_of_copies(nodes: Sequence[NodeTransport]) -> Check:
    rate = statistics.median(node.rate for node in nodes)
    cpu = statistics.median(node.cpu for node in nodes)
    found = f"{rate / 1e9:.2f} GB/s out and as much in, {cpu * 1e9:.2f} CPU-seconds per GB"
    slow = _slow_among(nodes)
    if not slow:
        return judged("bandwidth of copies", found)
    least = min(node.rate for node in slow)
    advice = f"{_named(slow)}: {least / 1e9:.2f} GB/s from the node before it"
    return judged("bandwidth of copies", found, advice)


def _slow_among(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are much slower than the fastest one."""
    return [node for node in nodes if node.rate < _SLOW * max(one.rate for one in nodes)]


def _named(nodes: Sequence[MeasuredNode]) -> str:
    """Return the names of the first few nodes, and how many more there are."""
    text = ", ".join(f"{node.host} (rank {node.rank})" for node in nodes[:_MOST_NAMED])
    more = len(nodes) - _MOST_NAMED
    return text + (f" and {more} more" if more > 0 else "")
