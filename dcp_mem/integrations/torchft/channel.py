"""A channel between two replicas, which have no store and no process group in common.

The replica that has the state serves a store, in which the two ends find each other.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.timed_store import TimedCalls
from dcp_mem.comm.transports import Pair, connected
from dcp_mem.integrations.torchft.talk import Talk


def served(host: str) -> dist.TCPStore:
    """Return a new store, which this process serves."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def joined(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Return a connection to the store of another replica.

    Raises RuntimeError.
    """
    timeout = timedelta(seconds=seconds)
    return TimedCalls(seconds).do(
        lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    )


def met(store: dist.Store, name: str, talk: Talk, transport: str, *, is_sender: bool) -> Channel:
    """Return this end of a new channel to the peer.

    Raises RuntimeError.
    """
    pair = Pair(
        store=dist.PrefixStore(name, store), is_sender=is_sender, seconds=talk.seconds_left()
    )
    return connected(transport, pair)
