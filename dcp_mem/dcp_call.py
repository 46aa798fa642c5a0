"""What DCP knows of the running call and doesn't tell its storage layer: which ranks take part.

`dcp.save(..., process_group=g)` and `no_dist=True` never reach the writer or the reader. Guessing wrong means waiting
for ranks that aren't there, so the calling frames are asked: `_save_state_dict` and `_load_state_dict` keep a
`_DistWrapper` in a variable that every step closes over (torch 2.6 to 2.13). Other drivers of the DCP contract have
none; for them the group given to the constructor counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_mem.errors import ConfigError
from dcp_mem.ranks import Alone, Ranks, ranks_of

_DEPTH = 16


@dataclass(frozen=True, slots=True)
class DcpCall:
    """ranks: who takes part. rank: this one's number, as DCP counts for this call (files are named by it)."""

    ranks: Ranks
    rank: int


def dcp_call(process_group: dist.ProcessGroup | None, purpose: str) -> DcpCall:
    """The running `dcp.save` or `dcp.load`, or, outside of one, a call over `process_group`."""
    wrapper = _calling_wrapper()
    if wrapper is None:
        return direct_call(process_group, False, purpose)
    if not wrapper.use_dist:
        return DcpCall(Alone(), wrapper.rank)
    if process_group is not None and _members(process_group) != _members(wrapper.group):
        raise ConfigError(
            f"DCP runs this call over ranks {_members(wrapper.group)}, but process_group= has {_members(process_group)}: "
            f"give dcp.save or dcp.load the same process_group"
        )
    return DcpCall(ranks_of(wrapper.group, purpose), wrapper.rank)


def direct_call(process_group: dist.ProcessGroup | None, no_dist: bool, purpose: str) -> DcpCall:
    """A call of dcp_mem's own, over `process_group`, or of this rank alone. Raises RankFailed where one has left it already."""
    ranks = Alone() if no_dist else ranks_of(process_group, purpose)
    return DcpCall(ranks, ranks.rank)


def is_called_by_dcp() -> bool:
    """Whether `dcp.save` or `dcp.load` is on the stack, and not another driver of the contract."""
    return _calling_wrapper() is not None


def global_metadata() -> Metadata | None:
    """The metadata that goes with the global plan that `dcp.save` is at, on the coordinator; None under another driver.

    DCP hands it to `finish` only, on the coordinator only, and after the checkpoint has to be complete on every node.
    """
    for frame in _calling_frames():
        if frame.f_code.co_name == "global_step" and "global_metadata" in frame.f_code.co_freevars:
            found = frame.f_locals.get("global_metadata")
            return found if isinstance(found, Metadata) else None
    return None


def _calling_wrapper() -> _DistWrapper | None:
    for frame in _calling_frames():
        if "distW" in frame.f_code.co_freevars or "distW" in frame.f_code.co_cellvars:
            wrapper = frame.f_locals.get("distW")
            if isinstance(wrapper, _DistWrapper):
                return wrapper
    return None


def _calling_frames() -> Iterator[FrameType]:
    frame = sys._getframe(2).f_back
    for _ in range(_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
