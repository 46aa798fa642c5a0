"""Measure what copies between a job's nodes go by, TCP and the transport of choice, and judge it.

Each node sends to the next one, in a ring. So it takes as long for a thousand nodes as for two.
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

_SMALL_ROUNDS = 50
_ROUNDS, _NBYTES = 5, 64 << 20
"""Rounds that measure TCP, after one that touches the memory, and the bytes of each."""
_COPY_ROUNDS, _COPIED_NBYTES = 2, 1 << 30
"""Rounds that measure the transport of choice, and the bytes of each."""
_MESSAGE, _IN_FLIGHT = 16 << 20, 4
_TIMEOUT = 120.0
_MUCH_FASTER = 4
"""From which factor on another interface is taken for the one that was meant."""
_SLOW = 0.5
"""A node below this part of the best rate is called slow."""
_MOST_NAMED = 5


@sendable
@value_class(kw_only=True)
class Node:
    """One process's machine: its addresses, and the rates measured to its neighbours."""

    rank: int
    host: str
    address: str = ""
    interface: str = ""  # whose address that is; "" where it isn't known
    speed: float | None = None  # of the interface, in bit/s; None where the kernel doesn't know it
    # interfaces of this machine that are up and much faster, with their speeds
    faster: Sequence[tuple[str, float]] = ()
    devices: Sequence[str] = ()  # its cards that do RDMA and have a link
    # bytes that this process may lock, as a card needs; None: as many as it likes
    locked_nbytes: int | None = None
    trouble: str = ""  # why it doesn't work between this node and a neighbour; "" if it does
    # median seconds of a small message to the next node, and one from the node before
    latency: float = 0.0
    rate: float = 0.0  # median bytes per second between it and a neighbour, both ways at once
    cpu: float = 0.0  # CPU seconds of this process per byte that it sends and receives
    is_equal: bool = True  # whether the bytes that came are those that were sent


def measure_network(choice: str | None = None) -> tuple[Sequence[Node], Sequence[Node]]:
    """Measure together with the other processes that a launcher has started; one on each node is
    enough. Each has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as by
    torchrun. Returns what every process found, by rank, by TCP and by the transport, if one is
    named.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "--peers measures between nodes: start it on each of them at once, for instance by "
            "`torchrun --no-python --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
            "dcp-mem doctor --peers`"
        )
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=_TIMEOUT)))
    ranks = JobRanks(rank, range(world), "doctor", store, _TIMEOUT)
    own = _own_node(rank)
    try:
        by_tcp = _connected(ranks, store, "tcp", "network")
        nodes = _measured(ranks, own, by_tcp, _NBYTES, _ROUNDS, _SMALL_ROUNDS)
        if choice is None:
            return nodes, []
        by_choice = _connected(ranks, store, choice, "copies")
        return nodes, _measured(ranks, own, by_choice, _COPIED_NBYTES, _COPY_ROUNDS)
    finally:
        ranks.close()


# -- judging --------------------------------------------------------------------------------------


def judge_network(nodes: Sequence[Node]) -> Iterator[Check]:
    hosts = {node.host for node in nodes}
    names = ", ".join(sorted({node.interface or node.address for node in nodes}))
    local = [node for node in nodes if node.address.startswith("127.") or node.address == "::1"]
    advice = (
        f"{_named(local)} can't be reached from other nodes: their names stand for the loopback "
        "address. Set GLOO_SOCKET_IFNAME to the interface of the nodes' network"
    )
    found = f"{names} on {len(hosts)} nodes, {len(nodes)} processes"
    yield judged("interface", found, advice if local and len(hosts) > 1 else "", Severity.FAIL)
    yield _wrong_cards(nodes)
    latency = statistics.median(node.latency for node in nodes)
    yield judged("latency", f"{latency * 1e6:.0f} µs for a small message")
    # A slow node slows the one before and the one behind it as well: few nodes have no fair median.
    yield _bandwidth(
        "bandwidth",
        nodes,
        "by one thread of each node",
        "to the next node. Look at the cables, and at which interfaces these nodes and their "
        "successors take",
    )


def _wrong_cards(nodes: Sequence[Node]) -> Check:
    slow, advice = [node for node in nodes if node.faster], ""
    speeds = sorted({_speed(node.speed) for node in nodes if node.speed is not None})
    if slow:
        interface, speed = slow[0].faster[0]
        advice = (
            f"{_named(slow)} also has {interface}, up, of {_speed(speed)}: if all nodes reach each "
            f"other over it, set GLOO_SOCKET_IFNAME={interface}"
        )
    return judged("speed of interface", ", ".join(speeds) or "not known", advice)


def judge_transport(nodes: Sequence[Node], choice: str) -> Iterator[Check]:
    yield _cards(nodes)
    if choice != "tcp":
        yield _locked_memory(nodes)
    troubles = [node for node in nodes if node.trouble]
    wrong = [node for node in nodes if not node.is_equal]
    if troubles:
        found = f"{choice} doesn't work between all nodes: copies go over TCP there"
        worst = Severity.WARN if choice == "auto" else Severity.FAIL
        yield judged("transport", found, f"{_named(troubles)}: {troubles[0].trouble}", worst)
    elif wrong:
        advice = f"{_named(wrong)} got other bytes than were sent: don't use it"
        yield judged("transport", f"{choice} between all nodes", advice, Severity.FAIL)
    else:
        yield judged("transport", f"{choice} between all nodes, bytes as they were sent")
        cpu = statistics.median(node.cpu for node in nodes)
        more = f"{cpu * 1e9:.2f} CPU-seconds per GB"
        yield _bandwidth("bandwidth of copies", nodes, more, "from the node before it")


def _cards(nodes: Sequence[Node]) -> Check:
    names = sorted({name for node in nodes for name in node.devices})
    without = [node for node in nodes if not node.devices]
    if not names:
        return judged("RDMA", "no cards that do RDMA and have a link")
    advice = f"{_named(without)} has none with a link: look at `ibstat` there" if without else ""
    return judged("RDMA", ", ".join(names), advice)


def _locked_memory(nodes: Sequence[Node]) -> Check:
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


def _bandwidth(name: str, nodes: Sequence[Node], more: str, where: str) -> Check:
    """Check that no node is much slower than the fastest one."""
    rates = [node.rate for node in nodes]
    slow = [node for node in nodes if node.rate < _SLOW * max(rates)]
    found = f"{statistics.median(rates) / 1e9:.2f} GB/s out and as much in, {more}"
    advice = f"{_named(slow)}: {min(rates) / 1e9:.2f} GB/s {where}" if slow else ""
    return judged(name, found, advice)


def _speed(bits_per_second: float | None) -> str:
    return "not known" if bits_per_second is None else f"{bits_per_second / 1e9:g} Gb/s"


def _named(nodes: Sequence[Node]) -> str:
    """Return the names of the first few nodes, and how many more there are."""
    text = ", ".join(f"{node.host} (rank {node.rank})" for node in nodes[:_MOST_NAMED])
    more = len(nodes) - _MOST_NAMED
    return text + (f" and {more} more" if more > 0 else "")


# -- the machine ----------------------------------------------------------------------------------


def _own_node(rank: int) -> Node:
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
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Node(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=interface,
        speed=speed,
        faster=sorted(faster, key=lambda one: -one[1]),
        devices=rdma_devices(),
        locked_nbytes=None if limit == resource.RLIM_INFINITY else limit,
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


# -- measuring ------------------------------------------------------------------------------------


def _connected(ranks: Ranks, store: dist.Store, choice: str, what: str) -> list[Channel | str]:
    """Return this rank's channels to the next rank and from the one before, or why there is none.

    `what`: what they are for, which they meet under.
    """

    def connect(sender: int, receiver: int) -> Channel | str:
        own = TimedStore(own_connection(store, _TIMEOUT), _TIMEOUT)
        place = MeetingPlace(own, f"dcp_mem/doctor/{what}/{sender}-{receiver}/", ranks.look)
        pair = Pair(store=place, is_sender=sender == ranks.rank, seconds=_TIMEOUT)
        try:
            return transport(choice)(pair)
        except TransportUnusable as error:
            return str(error)

    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    with ThreadPoolExecutor(2, thread_name_prefix="dcp_mem-doctor") as pool:
        return list(pool.map(connect, (ranks.rank, before), (after, ranks.rank)))


def _measured(
    ranks: Ranks,
    own: Node,
    connected: Sequence[Channel | str],
    nbytes: int,
    rounds: int,
    small_rounds: int = 0,
) -> Sequence[Node]:
    """Return every rank's figures; nothing is measured unless all ranks could connect.

    `own`: what this rank knows of its machine.
    """
    channels = [one for one in connected if not isinstance(one, str)]
    trouble = next((one for one in connected if isinstance(one, str)), "")
    try:
        # Nobody waits for a neighbour that couldn't connect to its other one.
        if any(ranks.exchange(bool(trouble))):
            return ranks.exchange(replace(own, trouble=trouble))
        ring = _Ring(ranks, *channels)
        with ring.out.registered(ring.sent), ring.back.registered(ring.came):
            small = ring.rounds(1, small_rounds)
            large = ring.rounds(nbytes, rounds)
        sums = ranks.exchange(checksum(memoryview(ring.sent)))
    finally:
        for channel in channels:
            channel.close()
    return ranks.exchange(
        replace(
            own,
            latency=statistics.median(seconds for seconds, _ in small) if small else 0.0,
            rate=nbytes / statistics.median(seconds for seconds, _ in large),
            cpu=large[-1][1] / nbytes,
            is_equal=sums[ranks.rank - 1] == checksum(memoryview(ring.came)),
        )
    )


class _Ring:
    """This rank's channels to the next rank, and from the one before; and what goes over them."""

    def __init__(self, ranks: Ranks, out: Channel, back: Channel) -> None:
        self.ranks, self.out, self.back = ranks, out, back
        self.sent, self.came = bytearray(os.urandom(1 << 20) * 64), bytearray(64 << 20)

    def rounds(self, nbytes: int, count: int) -> list[tuple[float, float]]:
        """Return the seconds of each round, in which so many bytes go and come; and of the CPU.

        A round before them, which touches the memory, isn't counted.
        """
        found = []
        with ThreadPoolExecutor(1, thread_name_prefix="dcp_mem-doctor") as pool:
            for _ in range(1 + count if count else 0):
                self.ranks.all_reduce(0, int.__add__)
                started, cpu = time.perf_counter(), time.process_time()
                sending = pool.submit(_move, self.out.send, self.sent, nbytes)
                _move(self.back.receive, self.came, nbytes)
                sending.result()
                found.append((time.perf_counter() - started, time.process_time() - cpu))
        return found[1:]


def _move(act: Callable[[memoryview], PendingMessage], memory: bytearray, nbytes: int) -> None:
    view, pending = memoryview(memory), deque[PendingMessage]()
    for place in range(0, nbytes, _MESSAGE):
        if len(pending) == _IN_FLIGHT:
            pending.popleft().wait()
        start = place % len(view)
        pending.append(act(view[start : start + min(_MESSAGE, nbytes - place)]))
    for message in pending:
        message.wait()
