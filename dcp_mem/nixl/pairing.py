"""Connect two ranks by NIXL, where both can.

They settle it in the store before they connect:

    each rank               puts its offer there: whether it can and would use NIXL, and how
    each rank that can      gets the peer's offer; both come to the same decision (`_check`)
    both, if it is NIXL     connect, and read a few bytes of each other; each says how that went
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from dcp_mem.comm.addresses import rdma_devices
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.control_line import ControlLine
from dcp_mem.comm.transports import Pair, TransportUnusable, met
from dcp_mem.common.value_class import value_class
from dcp_mem.nixl.agents import import_trouble
from dcp_mem.nixl.channel import INLINE_NBYTES, NixlChannel

_TCP_VARIABLE = "DCP_MEM_NIXL_TCP"
PROBE_NBYTES = INLINE_NBYTES + 4096
"""More than goes over the connection, so that the probe is read as any large message."""
_MOST_PROBE_SECONDS = 20.0
_WORKS, _FAILS = b"\1", b"\0"


def connect(pair: Pair) -> Channel:
    """Connect by NIXL where both ranks have a card that does RDMA, or are on one machine."""
    return _connected(pair, only_rdma=False)


def connect_by_cards(pair: Pair) -> Channel:
    """Connect by NIXL where both ranks have a card that does RDMA."""
    return _connected(pair, only_rdma=True)


def _connected(pair: Pair, *, only_rdma: bool) -> Channel:
    deadline = time.monotonic() + pair.seconds
    own = _own_offer(only_rdma=only_rdma)
    _put(pair, own)
    if own.trouble:
        raise TransportUnusable(own.trouble, is_expected=only_rdma and not own.has_card)
    _check(own, _peers(pair, deadline))
    line = ControlLine(met(pair, "transport/address", deadline))
    channel = NixlChannel(line, min(pair.seconds / 2, _MOST_PROBE_SECONDS))
    try:
        _probe(channel)
    except BaseException:
        channel.close()
        raise
    channel.be_patient(pair.seconds, pair.on_silence)
    return channel


# -- what a rank can do ----------------------------------------------------------------------------


@value_class(kw_only=True)
class _Offer:
    """A rank's offer to its peer: whether it can and would use NIXL."""

    trouble: str  # why this rank can't use it, or wouldn't; "" where it would
    has_card: bool  # one that does RDMA and has a link
    machine: str  # what processes have in common that can read each other's memory
    takes_tcp: bool
    only_rdma: bool


def _own_offer(*, only_rdma: bool) -> _Offer:
    has_card, trouble = bool(rdma_devices()), ""
    if only_rdma and not has_card:
        trouble = "this machine has no card that does RDMA, with a link"
    elif why := import_trouble():
        trouble = f"NIXL can't be imported ({why}); the extra `nixl` installs it"
    return _Offer(
        trouble=trouble,
        has_card=has_card,
        machine=_machine(),
        takes_tcp=os.environ.get(_TCP_VARIABLE, "") == "1",
        only_rdma=only_rdma,
    )


def _machine() -> str:
    """Return what is the same for two processes that see each other, and so may read each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return secrets.token_hex(8)


def _check(own: _Offer, peer: _Offer) -> None:
    """Raise TransportUnusable where two ranks won't use NIXL; alike on both of them."""
    if peer.trouble:
        raise TransportUnusable(f"the peer says: {peer.trouble}")
    if own.has_card and peer.has_card:
        return
    if own.only_rdma or peer.only_rdma:
        raise TransportUnusable("not both ranks have a card that does RDMA, with a link")
    if own.machine == peer.machine or (own.takes_tcp and peer.takes_tcp):
        return
    raise TransportUnusable(
        "the two ranks have neither cards that do RDMA nor the same machine; over TCP, UCX aborts "
        f"a process whose peer gives up on it ({_TCP_VARIABLE}=1 allows that all the same)"
    )


def _put(pair: Pair, offer: _Offer) -> None:
    pair.store.set(
        f"transport/{'sender' if pair.is_sender else 'receiver'}", json.dumps(asdict(offer))
    )


def _peers(pair: Pair, deadline: float) -> _Offer:
    """Return the peer's offer."""
    key = f"transport/{'receiver' if pair.is_sender else 'sender'}"
    try:
        return _Offer(**json.loads(pair.store.get(key, deadline)))
    except Exception:
        pair.note_silence(deadline)
        raise


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
