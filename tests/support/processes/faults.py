"""Fault points: the one place in tests that knows how a process is armed with them.

faults.arm("stage.copied:kill:1")       # in this process, as DCP_MEM_FAULTS does in a new one
"""

from dcp_mem.common.faults import POINTS, FaultInjected, arm, is_armed

__all__ = ["POINTS", "FaultInjected", "arm", "is_armed"]
