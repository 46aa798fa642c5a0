"""torchft's `CheckpointTransport` over slots in node memory."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

from torchft.checkpointing.transport import CheckpointTransport

from dcp_mem.integrations.torchft.pulling import pulled
from dcp_mem.integrations.torchft.serving import Server
from dcp_mem.integrations.torchft.staged import StagedState
from dcp_mem.memory.root import open_root
from dcp_mem.options import settings

T = TypeVar("T")


class MemoryCheckpointTransport(CheckpointTransport[T]):  # type: ignore[misc]
    """Heals replicas from other replicas' node memory.

    `send_checkpoint` copies the state into this node's memory once and returns: training may change
    it from then on. Replicas that heal get it from there: on the same machine they read the memory
    itself, elsewhere it comes over a channel. Every byte is held against a CRC32C. The memory is
    given back once all that were to heal have it, when torchft's time-out is over, or with the
    process, however that ends.

    Args:
        memory_root: The memory root; default DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>.
        transport: What moves the state between nodes, as for `MemoryStorageWriter`; the same in
            all replicas.
        weights_only: Refuse a state that could run code when unpickled (UntrustedObject). False
            trusts the other replicas, as torchft's own transports do.

    Raises:
        ConfigError: An argument can't work.
        MemoryRootRefused: The memory root isn't this user's alone.
        MemoryUnavailable: The memory root can't be made.
    """

    def __init__(
        self,
        *,
        memory_root: str | os.PathLike[str] | None = None,
        transport: str | None = None,
        weights_only: bool = True,
    ) -> None:
        chosen = settings(None, memory_root=memory_root, job="torchft", transport=transport)
        self._root, self._transport = open_root(chosen.memory_root), chosen.transport
        self._weights_only = weights_only
        self._server = Server(self._transport)

    def metadata(self) -> str:
        """Return what other replicas need to know to reach this one."""
        return self._server.metadata

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Copy the state into node memory, and give it to the replicas that ask for it.

        Raises MemoryBudgetExceeded, DcpMemError.
        """
        self._server.drop()  # one state in memory is enough
        staged = StagedState(step, state_dict, self._root)
        self._server.offer(staged, len(dst_ranks), timeout.total_seconds())

    def disallow_checkpoint(self) -> None:
        """Do nothing: what is sent is a copy, and training may change the state already."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return another replica's state of a step; its tensors are in CPU memory.

        Raises WaitTimeout, SegmentCorrupt, UntrustedObject, DcpMemError.
        """
        state: T = pulled(
            metadata,
            step,
            timeout.total_seconds(),
            self._transport,
            weights_only=self._weights_only,
            peer=f"replica {src_rank}",
        )
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Give back the memory, and stop answering; transfers that are under way break off."""
        self._server.close(wait=wait)
