"""The class of the channels that copies go by in this run, for tests that reach into it.

DCP_MEM_TRANSPORT=nixl in the environment of pytest has all tests of copies, parity and losses run
over NIXL; DCP_MEM_NIXL_TCP=1 beside it those between nodes, too, which have only TCP there.
"""

import os

from dcp_mem.comm.channels import GlooChannel
from dcp_mem.comm.nixl_channel import NixlChannel

UsedChannel: type[GlooChannel] | type[NixlChannel] = (
    NixlChannel if os.environ.get("DCP_MEM_TRANSPORT") == "nixl" else GlooChannel
)
