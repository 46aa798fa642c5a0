"""NIXL, NVIDIA's transfer library, as a transport: `transport="nixl"` and `transport="auto"`.

`config` names what connects two ranks; nothing imports this package but by that name.

    pairing   two ranks settle whether they take NIXL, connect, and try it
    channel   a channel: the receiver reads the sender's memory
    agents    memory that others may read, and reading it
"""

from dcp_mem.nixl.pairing import connect, connect_by_cards

__all__ = ["connect", "connect_by_cards"]
