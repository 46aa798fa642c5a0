"""The class of the channels that copies go by in this run, for tests that reach into it.

DCP_MEM_TRANSPORT=nixl in the environment of pytest has all tests of copies, parity and losses run
over NIXL; DCP_MEM_NIXL_TCP=1 beside it those between nodes, too, which have only TCP there.
"""

import os
from collections.abc import Callable
from typing import Any

from dcp_mem.comm.transports import TcpChannel
from dcp_mem.nixl.channel import NixlChannel
from dcp_mem.nixl.pairing import PROBE_NBYTES as PROBE_NBYTES

UsedChannel: type[TcpChannel] | type[NixlChannel] = (
    NixlChannel if os.environ.get("DCP_MEM_TRANSPORT") == "nixl" else TcpChannel
)


class SentBytes:
    """Counts what this process sends over channels, from when it is made."""

    def __init__(self) -> None:
        self.nbytes, send = 0, UsedChannel.send

        def counted(channel: Any, data: Any) -> Any:
            self.nbytes += len(data)
            return send(channel, data)

        UsedChannel.send = counted  # type: ignore[assignment,method-assign]

    def during(self, act: Callable[[], object]) -> int:
        """Act, and return how many bytes were sent meanwhile."""
        before = self.nbytes
        act()
        return self.nbytes - before
