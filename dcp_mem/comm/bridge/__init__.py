"""What dcp_mem knows of DCP's insides: all of it here, and `DCP_MEM_TORCH_PLANS=1` does without.

    calls      the running `dcp.save`, `async_save` or `load`: its ranks, planner and state dict
    exchanges  the exchanges between its steps, which our votes replace
    errors     errors as `dcp.save` and `dcp.load` raise them
    choice     `dcp_mem.serve`: the writer and reader of calls that name only a path

With the switch, nothing looks at DCP's frames, and nothing of torch is replaced: torch's planners
plan, DCP exchanges its plans, and the writer and the reader answer DCP's public calls alone.
"""

from __future__ import annotations

import os

SWITCH = "DCP_MEM_TORCH_PLANS"


def torch_plans() -> bool:
    """Return whether this bridge is off, as the environment says; the same on all ranks."""
    return os.environ.get(SWITCH, "") not in ("", "0")
