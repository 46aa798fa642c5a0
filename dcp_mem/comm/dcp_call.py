"""The ranks of the running DCP call, which DCP doesn't tell its storage layer.

`dcp.save(..., process_group=g)` and `no_dist=True` never reach the writer or the reader. A wrong
guess means waiting for ranks that aren't there, so we look at the calling frames:
`_save_state_dict` and `_load_state_dict` keep a `_DistWrapper` in a variable that every step closes
over (torch 2.6 to 2.13). Other drivers of the DCP contract have none; for them the group given to
the constructor counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_mem.comm import Ranks, SingleRank, ranks_of
from dcp_mem.errors import ConfigError

_DEPTH = 16


@dataclass(frozen=True, slots=True)
class DcpCall:
    """The ranks that take part in a call.

    Attributes:
        ranks: All of them.
        rank: This rank's number, as DCP counts for this call; files are named by it.
    """

    ranks: Ranks
    rank: int


def dcp_call(process_group: dist.ProcessGroup | None, purpose: str) -> DcpCall:
    """Return the running `dcp.save` or `dcp.load`; outside of one, a call over `process_group`.

    Args:
        process_group: As given to our constructor; None for the default group.
        purpose: Who uses the ranks; each purpose has a group of its own.

    Raises:
        ConfigError: DCP runs the call over other ranks.
        RankFailed: A rank has left the call already.
    """
    wrapper = _calling_wrapper()
    if wrapper is None:
        return direct_call(process_group, False, purpose)
    if not wrapper.use_dist:
        return DcpCall(SingleRank(), wrapper.rank)
    if process_group is not None and _members(process_group) != _members(wrapper.group):
        raise ConfigError(
            f"DCP runs this call over ranks {_members(wrapper.group)}, but process_group= has "
            f"{_members(process_group)}: give dcp.save or dcp.load the same process_group"
        )
    return DcpCall(ranks_of(wrapper.group, purpose), wrapper.rank)


def direct_call(process_group: dist.ProcessGroup | None, no_dist: bool, purpose: str) -> DcpCall:
    """Return a call of dcp_mem's own, over `process_group` or by this rank alone.

    Args:
        process_group: None for the default group.
        no_dist: This rank is alone.
        purpose: Who uses the ranks; each purpose has a group of its own.

    Raises:
        RankFailed: A rank has left the call already.
    """
    ranks = SingleRank() if no_dist else ranks_of(process_group, purpose)
    return DcpCall(ranks, ranks.rank)


def is_called_by_dcp() -> bool:
    """Return whether `dcp.save` or `dcp.load` is on the stack; other drivers don't count."""
    return _calling_wrapper() is not None


def global_metadata() -> Metadata | None:
    """Return the metadata of the running `dcp.save`'s global plan; None off the coordinator.

    DCP gives it to `finish` only, on the coordinator only, and after the checkpoint has to be
    complete on every node. Under other drivers of the contract there is none.
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
