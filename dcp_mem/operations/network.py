"""Measure the network between a job's nodes, and judge whether it is the right one.

Each node sends to the next one, in a ring, over channels as copies go by. So it
takes as long for a thousand nodes as for two.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dcp_mem.comm.addresses import addresses_of_interface, listening_socket
from dcp_mem.comm.collectives import Ranks
from dcp_mem.comm.job_ranks import JobRanks
from dcp_mem.common.sendable import sendable
from dcp_mem.errors import ConfigError
from dcp_mem.operations.doctor import Check, Severity, judged
from dcp_mem.operations.transport_check import (
    NodeTransport,
    measure_transport,
    named,
    slow_among,
)

_NBYTES = 64 << 20
_ROUNDS, _SMALL_ROUNDS = 5, 50
_TIMEOUT = 120.0
_MUCH_FASTER = 4
"""From which factor on another interface is taken for the one that was meant."""


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """One node's view of the network."""

    rank: int
    host: str
    address: str
    interface: str  # whose address that is; "" where it isn't known
    speed: float | None  # of the interface, in bit/s; None where the kernel doesn't know it
    # interfaces of this machine that are up and much faster, with their speeds
    faster: Sequence[tuple[str, float]]
    # median seconds of a small message to the next node, and one from the node before
    latency: float = 0.0
    # median bytes per second to the next node, while as many come from the one before
    rate: float = 0.0


def measure_network(
    transport: str | None = None,
) -> tuple[Sequence[NodeNetwork], Sequence[NodeTransport]]:
    """Measure together with the other processes that a launcher has started.

    Each is started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as
    torchrun does; one on each node is enough.

    `transport`: what copies go by, to be measured as well; None: nothing of that. Returns what
    every process found, by rank, of the network and of the transport; on all of them. Raises
    ConfigError, RankFailed.
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
        own = _own_network(rank)
        latency = statistics.median(_rounds(ranks, 1, _SMALL_ROUNDS))
        seconds = statistics.median(_rounds(ranks, _NBYTES, _ROUNDS))
        nodes = ranks.exchange(
            NodeNetwork(
                rank=rank,
                host=own.host,
                address=own.address,
                interface=own.interface,
                speed=own.speed,
                faster=own.faster,
                latency=latency,
                rate=_NBYTES / seconds,
            )
        )
        moved = [] if transport is None else measure_transport(ranks, store, transport)
        return nodes, moved
    finally:
        ranks.close()


def judge_network(nodes: Sequence[NodeNetwork]) -> Iterator[Check]:
    """Yield a check for each thing that the nodes' figures tell."""
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
            f"{named(local)} can't be reached from other nodes: their names stand for the "
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
        f"{named(slow)} also has {interface}, up, of {_speed(speed)}: if all nodes reach each "
        f"other over it, set GLOO_SOCKET_IFNAME={interface}",
    )


def _rates(nodes: Sequence[NodeNetwork]) -> Check:
    median = statistics.median(node.rate for node in nodes)
    found = f"{median / 1e9:.2f} GB/s out and as much in, by one thread of each node"
    # A slow node slows the one before and the one behind it as well: few nodes have no fair median.
    slow = slow_among(nodes)
    if not slow:
        return judged("bandwidth", found)
    least = min(node.rate for node in slow)
    return judged(
        "bandwidth",
        found,
        f"{named(slow)}: {least / 1e9:.2f} GB/s to the next node. Look at the cables, and at "
        f"which interfaces these nodes and their successors take",
    )


def _speed(bits_per_second: float | None) -> str:
    return "not known" if bits_per_second is None else f"{bits_per_second / 1e9:g} Gb/s"


# -- measuring ------------------------------------------------------------------------------------


def _rounds(ranks: Ranks, nbytes: int, count: int) -> list[float]:
    """Return the seconds of each round: bytes go to the next rank, and come from the one before."""
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    ends = [(ranks.rank, after), (before, ranks.rank)]
    # In turn, so that not each rank waits for the next one.
    channels = {end: ranks.channel(*end) for end in (ends if ranks.rank % 2 else ends[::-1])}
    out, back = (channels[end] for end in ends)
    sent, came = bytearray(nbytes), bytearray(nbytes)
    seconds = []
    for _ in range(1 + count):  # the first one touches the memory
        ranks.all_reduce(0, int.__add__)
        started = time.perf_counter()
        messages = [back.receive(came), out.send(sent)]
        for message in messages:
            message.wait()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


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
