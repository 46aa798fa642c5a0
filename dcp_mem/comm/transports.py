"""Choose a transport for two ranks that exchange many bytes, and connect them.

    gloo   TCP, everywhere; a group of two ranks (`channels`), or several of them (`lines`)
    nixl   one-sided reads by UCX, over InfiniBand, RoCE or shared memory (`nixl_channel`)

Two ranks settle it in the store before they connect:

    each rank               puts its offer there: whether it can and would use NIXL, and how
    each rank that can      gets the peer's offer; both come to the same decision (`_refusal`)
    both, if it is NIXL     connect, and read a few bytes of each other; each says how that went

Where anything of that fails while the peer is there, both ranks take gloo.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from dcp_mem.comm.addresses import listening_socket
from dcp_mem.comm.channels import GlooChannel
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.control_line import ControlLine, accepted, dialled
from dcp_mem.comm.greetings import Door
from dcp_mem.comm.lines import LinedChannel
from dcp_mem.comm.nixl_agents import import_trouble
from dcp_mem.comm.nixl_channel import INLINE_NBYTES, NixlChannel
from dcp_mem.comm.timed_store import TimedCalls, below
from dcp_mem.common.log import log
from dcp_mem.config import lines_of_channel

_INFINIBAND = "/sys/class/infiniband"
_TCP_VARIABLE = "DCP_MEM_NIXL_TCP"
PROBE_NBYTES = INLINE_NBYTES + 4096
"""More than goes over the connection, so that the probe is read as any large message."""
_MOST_PROBE_SECONDS = 20.0
_WORKS, _FAILS = b"\1", b"\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two ranks that are to be connected, from the view of one of them."""

    store: dist.Store  # where these two ranks meet, and no others
    is_sender: bool  # whether this rank is the first one of the two
    seconds: float  # how long connecting may take, and then each message may wait
    # called where a wait for the peer has taken that long, in vain
    on_silence: Callable[[], None] = lambda: None


class Transport(Protocol):
    """A way to move many bytes between two ranks; `Channel` says what its channels promise."""

    name: str

    def connect(self, pair: Pair) -> Channel:
        """Connect; return this rank's end once the peer has connected too.

        After a failure, the same two ranks may connect again, by a fresh name in the store.

        Args:
            pair: The ranks.

        Raises:
            TransportUnusable: The peer is there, but it doesn't work between these two; both ranks
                raise it.
            RuntimeError: The peer doesn't come, or is gone.
        """


class TransportUnusable(RuntimeError):
    """A transport doesn't work between two ranks, and says why, on both of them."""


class GlooTransport:
    """Connects by gloo groups of the two ranks: one for each line."""

    name = "gloo"

    def __init__(self, lines: int = 1) -> None:
        self._lines = lines

    def connect(self, pair: Pair) -> Channel:
        """Connect; return this rank's end."""
        if self._lines == 1:
            return _gloo_channel(pair, pair.store)
        with ExitStack() as connected_so_far:
            lines = []
            for number in range(self._lines):
                line = _gloo_channel(pair, below(pair.store, f"line {number}"))
                connected_so_far.callback(line.close)
                lines.append(line)
            connected_so_far.pop_all()
            return LinedChannel(lines)


def _gloo_channel(pair: Pair, store: dist.Store) -> GlooChannel:
    return GlooChannel(store, pair.is_sender, pair.seconds, pair.on_silence)


class NixlTransport:
    """Connects by NIXL, where both ranks can.

    `only_rdma`: whether both ranks must have a card that does RDMA.
    """

    name = "nixl"

    def __init__(self, *, only_rdma: bool = False) -> None:
        self._only_rdma = only_rdma

    def connect(self, pair: Pair) -> Channel:
        """Connect; return this rank's end."""
        offers, deadline = _Offers(pair), time.monotonic() + pair.seconds
        own = own_offer(only_rdma=self._only_rdma)
        if own.trouble:
            offers.put(own, None, b"")
            raise TransportUnusable(own.trouble)
        if not pair.is_sender:
            offers.put(own, None, b"")
            peer, address, token = offers.peers(deadline)
            _check(own, peer)
            assert address is not None
            connection = dialled(address, token, deadline)
        else:
            with closing(Door(listening_socket())) as door:
                offers.put(own, door.address, door.token)
                peer, _, _ = offers.peers(deadline)
                _check(own, peer)
                connection = accepted(door, deadline)
        channel = NixlChannel(ControlLine(connection), min(pair.seconds / 2, _MOST_PROBE_SECONDS))
        try:
            _probe(channel)
        except BaseException:
            channel.close()
            raise
        channel.be_patient(pair.seconds, pair.on_silence)
        return channel


def connected(choice: str, pair: Pair) -> Channel:
    """Connect two ranks by the transport of choice, or by gloo where that doesn't work.

    Raises ConfigError, RuntimeError.
    """
    if choice != "gloo":
        try:
            return NixlTransport(only_rdma=choice == "auto").connect(pair)
        except TransportUnusable as error:
            _say_why(choice, str(error))
    return GlooTransport(lines_of_channel()).connect(pair)


def _say_why(choice: str, why: str) -> None:
    """Log why NIXL isn't used, once for each kind of reason; `auto` needs none without a card."""
    kind = why.partition(":")[0]
    if kind in _said or (choice == "auto" and not rdma_devices()):
        return
    _said.add(kind)
    log.warning("transport=%r: copies and loads go over gloo, since %s", choice, why)


_said = set[str]()


# -- what a rank can do ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A rank's offer to its peer: whether it can and would use NIXL."""

    trouble: str  # why this rank can't use it, or wouldn't; "" where it would
    devices: tuple[str, ...] = ()  # its cards that do RDMA and have a link
    host: str = ""  # what processes have in common that can read each other's memory
    takes_tcp: bool = False
    only_rdma: bool = False


def own_offer(*, only_rdma: bool) -> Offer:
    """Return what this process would do."""
    devices = rdma_devices()
    if only_rdma and not devices:
        return Offer(trouble="this machine has no card that does RDMA, with a link")
    if why := import_trouble():
        return Offer(trouble=f"NIXL can't be imported ({why}); the extra `nixl` installs it")
    return Offer(
        trouble="",
        devices=devices,
        host=_host(),
        takes_tcp=os.environ.get(_TCP_VARIABLE, "") == "1",
        only_rdma=only_rdma,
    )


def rdma_devices(root: str = _INFINIBAND) -> tuple[str, ...]:
    """Return the cards that do RDMA (InfiniBand, RoCE, EFA) and have a link."""
    found = []
    for state in sorted(Path(root).glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
    return tuple(dict.fromkeys(found))


def _host() -> str:
    """Return what is the same for two processes that see each other, and so may read each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return secrets.token_hex(8)


def _check(own: Offer, peer: Offer) -> None:
    """Raise TransportUnusable where two ranks won't use NIXL; alike on both of them."""
    if peer.trouble:
        raise TransportUnusable(f"the peer says: {peer.trouble}")
    if own.devices and peer.devices:
        return
    if own.only_rdma or peer.only_rdma:
        raise TransportUnusable("not both ranks have a card that does RDMA, with a link")
    if own.host == peer.host or (own.takes_tcp and peer.takes_tcp):
        return
    raise TransportUnusable(
        "the two ranks have neither cards that do RDMA nor the same machine; over TCP, UCX aborts "
        f"a process whose peer gives up on it ({_TCP_VARIABLE}=1 allows that all the same)"
    )


class _Offers:
    """The offers of two ranks in the store."""

    def __init__(self, pair: Pair) -> None:
        self._store, self._seconds = pair.store, pair.seconds
        self._own, self._peer = ("sender", "receiver")[:: 1 if pair.is_sender else -1]
        self._on_silence = pair.on_silence

    def put(self, offer: Offer, address: tuple[str, int] | None, token: bytes) -> None:
        """Put this rank's offer there, with where it listens."""
        body = {
            "trouble": offer.trouble,
            "devices": offer.devices,
            "host": offer.host,
            "takes_tcp": offer.takes_tcp,
            "only_rdma": offer.only_rdma,
            "address": address,
            "token": token.hex(),
        }
        TimedCalls(self._seconds).do(
            lambda: self._store.set(f"transport/{self._own}", json.dumps(body))
        )

    def peers(self, deadline: float) -> tuple[Offer, tuple[str, int] | None, bytes]:
        """Return the peer's offer, where it listens, and what it expects first."""
        key, seconds = f"transport/{self._peer}", max(deadline - time.monotonic(), 0.001)

        def got() -> bytes:
            self._store.wait([key], timedelta(seconds=seconds))
            return bytes(self._store.get(key))

        try:
            body: Mapping[str, Any] = json.loads(TimedCalls(seconds + 1.0).do(got))
        except Exception:
            if time.monotonic() >= deadline - 0.1 * self._seconds:
                self._on_silence()
            raise
        offer = Offer(
            trouble=str(body["trouble"]),
            devices=tuple(body["devices"]),
            host=str(body["host"]),
            takes_tcp=bool(body["takes_tcp"]),
            only_rdma=bool(body["only_rdma"]),
        )
        address = body["address"]
        token = bytes.fromhex(body["token"])
        return offer, (str(address[0]), int(address[1])) if address else None, token


# -- whether it works ------------------------------------------------------------------------------


def _probe(channel: NixlChannel) -> None:
    """Read a few bytes of the peer's memory, and have it read ours; both say how that went.

    UCX may be able to connect and yet not be allowed to read: many containers forbid that.

    Raises TransportUnusable.
    """
    sent, came, verdict = bytearray(b"\x5a" * PROBE_NBYTES), bytearray(PROBE_NBYTES), bytearray(1)
    try:
        message = channel.send(sent)
        channel.receive(came).wait()
        message.wait()
        channel.send(_WORKS if came == sent else _FAILS).wait()
        channel.receive(verdict).wait()
    except RuntimeError as error:
        raise TransportUnusable(f"a test of NIXL between the two ranks failed: {error}") from None
    if came != sent or verdict != _WORKS:
        raise TransportUnusable("a test of NIXL between the two ranks read other bytes than sent")
