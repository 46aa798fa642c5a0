"""torchft: a replica that heals pulls the state from a survivor's memory, while that trains on.

transport = MemoryCheckpointTransport()
manager = torchft.Manager(..., checkpoint_transport=transport)
"""

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("torchft")

from dcp_mem.integrations.torchft.transport import MemoryCheckpointTransport

__all__ = ["MemoryCheckpointTransport"]
