"""The parts of a running DCP call that its storage layer isn't told: its ranks, and its plan.

`dcp.save(..., process_group=g)` and `no_dist=True` never reach the writer or the reader. A wrong
guess means waiting for ranks that aren't there, so we look at the calling frames:
`_save_state_dict` and `_load_state_dict` keep a `_DistWrapper` in a variable that every step closes
over (torch 2.6 to 2.13). Other drivers of the DCP contract have none; for them the group given to
the constructor counts.

The planner and the state dict are variables of the same kind. `PlanningCall` finds them in the
first step, and can put another planner in place of DCP's: into DCP's own variable, so that the
caller's planner isn't touched. Where a torch has other variables, there is no `PlanningCall`, and
torch plans. With `DCP_MEM_TORCH_PLANS=1` no frame is looked at, as if DCP had none.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.comm import Ranks, SingleRank, ranks_of
from dcp_mem.comm.bridge import torch_plans
from dcp_mem.comm.bridge.exchanges import DcpExchanges, DistWrapper
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Purpose
from dcp_mem.errors import ConfigError

_DEPTH = 16
_PLANNING_STEP = "local_step"
_PLANNING_VARIABLES = frozenset({"distW", "planner", "state_dict"})


@value_class
class DcpCall:
    """The ranks that take part in a call."""

    ranks: Ranks
    rank: int  # this rank's number, as DCP counts for this call; files are named by it


@value_class(kw_only=True)
class PlanningCall:
    """The planning step of a `dcp.save` or `dcp.load`, on the stack of this thread."""

    planner: Any  # DCP's planner, which nobody has asked for anything yet
    state_dict: dict[str, Any]
    uses_collectives: bool
    is_coordinator: bool
    has_usual_coordinator: bool  # whether rank 0 does
    exchanges: DcpExchanges  # between the ranks, at the end of each step
    _frame: FrameType

    def replace_planner(self, planner: Any) -> None:
        """Have DCP go on with another planner. The first one isn't touched."""
        _assign(self._frame, "planner", planner)

    def replace_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have DCP go on with another state dict."""
        _assign(self._frame, "state_dict", state_dict)


def _assign(frame: FrameType, name: str, value: Any) -> None:
    """Assign to a variable of a frame that is on the stack."""
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # From 3.13 on, f_locals writes through.
        write_back = ctypes.pythonapi.PyFrame_LocalsToFast
        write_back(ctypes.py_object(frame), ctypes.c_int(0))


@value_class(kw_only=True)
class StagingCall:
    """A `dcp.async_save` that stages: what it will save by."""

    planner: Any
    process_group: dist.ProcessGroup | None
    is_alone: bool
    uses_collectives: bool
    is_in_process: bool


def staging_call(storage: Any) -> StagingCall | None:
    """Return the `dcp.async_save` that has just called a writer's `stage`.

    Returns None for any other caller, or where this torch saves in a way that isn't known.
    """
    if not can_save_staged():
        return None
    found = _variables_of_async_save()
    if found.get("storage_writer") is not storage:
        return None
    return StagingCall(
        planner=found.get("planner"),
        process_group=found.get("process_group"),
        is_alone=bool(found.get("no_dist", False)),
        uses_collectives=bool(found.get("use_collectives", True)),
        is_in_process="PROCESS" in str(found.get("async_checkpointer_type", "")),
    )


def submitted_save() -> Future[Any] | None:
    """Return the future of the save that the calling `dcp.async_save` has begun.

    None where another function calls, or this torch keeps no future.
    """
    values = _variables_of_async_save().values()
    return next((one for one in values if isinstance(one, Future)), None)


def _variables_of_async_save() -> Mapping[str, Any]:
    """Return the variables of the `dcp.async_save` that calls; none for any other caller."""
    for frame in _calling_frames():
        code = frame.f_code
        if code.co_name == "async_save" and "storage_writer" in code.co_varnames:
            return frame.f_locals
    return {}


def can_save_staged() -> bool:
    """Return whether the save that follows `stage` will have a `PlanningCall`."""
    if torch_plans() or not hasattr(state_dict_saver, "_save_state_dict"):
        return False
    steps = [
        constant
        for constant in state_dict_saver._save_state_dict.__code__.co_consts
        if isinstance(constant, CodeType) and constant.co_name == _PLANNING_STEP
    ]
    return any(_PLANNING_VARIABLES.issubset(step.co_freevars) for step in steps)


def over_when_left() -> Callable[[], bool] | None:
    """Return what tells whether the running `dcp.save` has ended, however it has.

    Other threads may ask it. None where no frame tells.
    """
    for frame in _calling_frames():
        if "distW" in frame.f_code.co_cellvars:
            wrapper, number = weakref.ref(frame.f_locals["distW"]), id(frame)
            return partial(_has_left, wrapper, threading.get_ident(), number)
    return None


def _has_left(wrapper: weakref.ref[Any], thread: int, number: int) -> bool:
    # A kept error keeps the frame's variables, but not the frame on its thread's stack.
    if wrapper() is None:
        return True
    frame = sys._current_frames().get(thread)
    while frame is not None and id(frame) != number:
        frame = frame.f_back
    return frame is None


def planning_call(storage: Any) -> PlanningCall | None:
    """Return the planning step of DCP that has just called a writer or a reader.

    Returns None where the caller isn't DCP, or plans in a way that isn't known.
    """
    for frame in _calling_frames():
        code = frame.f_code
        if code.co_name == _PLANNING_STEP and _PLANNING_VARIABLES.issubset(code.co_freevars):
            found = frame.f_locals
            own = (found.get("storage_writer"), found.get("storage_reader"))
            wrapper, state_dict = found.get("distW"), found.get("state_dict")
            if (
                not any(one is storage for one in own)
                or not isinstance(wrapper, DistWrapper)
                or not isinstance(state_dict, dict)
            ):
                return None
            return PlanningCall(
                planner=found.get("planner"),
                state_dict=state_dict,
                uses_collectives=bool(found.get("use_collectives", True)),
                is_coordinator=wrapper.is_coordinator,
                has_usual_coordinator=wrapper.coordinator_rank == 0,
                exchanges=DcpExchanges(wrapper),
                _frame=frame,
            )
    return None


def dcp_call(
    process_group: dist.ProcessGroup | None, purpose: Purpose | str, method: str = ""
) -> DcpCall:
    """Return the running `dcp.save` or `dcp.load`; outside of one, a call over `process_group`.

    `process_group`: as given to our constructor; None for the default group. `purpose`: who uses
    the ranks; each purpose has a group of its own. Raises ConfigError, RankFailed.
    """
    wrapper = _calling_wrapper()
    if wrapper is None:
        return direct_call(process_group, False, purpose, method)
    if not wrapper.use_dist:
        return DcpCall(SingleRank(), wrapper.rank)
    ranks = ranks_of(wrapper.group, purpose)
    if process_group is not None and _members(process_group) != _members(wrapper.group):
        error = ConfigError(
            f"DCP runs this call over ranks {_members(wrapper.group)}, but process_group= has "
            f"{_members(process_group)}: give dcp.save or dcp.load the same process_group"
        )
        ranks.leave(str(error))  # The others may be waiting for this one.
        raise error
    return DcpCall(ranks, wrapper.rank)


def direct_call(
    process_group: dist.ProcessGroup | None, no_dist: bool, purpose: Purpose | str, method: str = ""
) -> DcpCall:
    """Return a call of dcp_mem's own, over `process_group` or by this rank alone.

    `process_group`: None for the default group. `purpose`: who uses the ranks; each purpose has a
    group of its own. Raises RankFailed.
    """
    ranks = SingleRank() if no_dist else ranks_of(process_group, purpose, method)
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


def variable_of_call(is_wanted: Callable[[Any], bool]) -> Any:
    """Return a variable of the functions that called this one; None where there is none."""
    values = (value for frame in _calling_frames() for value in frame.f_locals.values())
    return next(filter(is_wanted, values), None)


def _calling_wrapper() -> DistWrapper | None:
    for frame in _calling_frames():
        if "distW" in frame.f_code.co_freevars or "distW" in frame.f_code.co_cellvars:
            wrapper = frame.f_locals.get("distW")
            if isinstance(wrapper, DistWrapper):
                return wrapper
    return None


def _calling_frames() -> list[FrameType]:
    found: list[FrameType] = []
    frame = None if torch_plans() else sys._getframe(2).f_back
    while frame is not None and len(found) < _DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
