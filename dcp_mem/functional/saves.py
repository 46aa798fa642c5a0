"""`save` and `async_save`: drop-ins for torch's, by a plan of dcp_mem's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import Optimizer

from dcp_mem.comm import refuse_missing_group
from dcp_mem.comm.agreement import Attempted, attempt
from dcp_mem.comm.bridge import SWITCH, torch_plans
from dcp_mem.comm.bridge.calls import StagingCall, can_save_staged
from dcp_mem.comm.bridge.errors import raised_as_by_dcp
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log_once
from dcp_mem.common.parallel import KeptThreads
from dcp_mem.errors import ConfigError
from dcp_mem.functional.calls import accepted_by, raised_together, refuse_other_kind
from dcp_mem.functional.stateful import States, taking_part, without_stateful
from dcp_mem.planning.refusing_planners import RefusingPlanner
from dcp_mem.saving.ahead import refused_state, staged_in
from dcp_mem.saving.dcp_takeover import saves_to_lowest_rank, why_not_own_plan
from dcp_mem.saving.overlap import Overlap, overlap_of
from dcp_mem.saving.values import NoCommonPlan
from dcp_mem.writer import MemoryStorageWriter


@takes()
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict as `torch.distributed.checkpoint.save` does, by a plan of dcp_mem's own.

    The first save of a structure plans it with all ranks. While names, shapes, dtypes and sharding
    stay the same on every rank, later saves only agree that they do; any change is noticed, and
    planned again. The files are those that dcp.save with the same writer makes, and load with
    everything that loads those.

    What dcp_mem can't plan (planners of your own, nested ShardedTensors, other tensor subclasses)
    goes through torch's planner, on all ranks alike, and the log says why.

    Args:
        state_dict: What to save; stateful objects are asked for theirs.
        checkpoint_id: Name of the checkpoint.
        storage_writer: A MemoryStorageWriter; any other goes through torch's planner.
        planner: Default torch's.
        process_group: The ranks that save together; default the writer's, or else all.
        no_dist: Save alone.
        use_collectives: As in dcp.save. False leaves the save to dcp.save.

    Returns:
        The checkpoint's metadata, made when it is first looked at.

    Raises:
        ConfigError: state_dict is no dict, or storage_writer no writer.
        CheckpointException: The save has failed, as from dcp.save. Its `failures` have this rank's
            own error, and a RankFailed for each other rank that failed.
        Exception: A stateful object's `state_dict` raised it on this rank.
    """
    _refuse_no_writer(storage_writer)
    state_dict = taking_part(state_dict)
    process_group = _group_of(storage_writer, process_group, no_dist)
    why_not = _why_not(storage_writer, planner, use_collectives)
    left_to_torch: AbstractContextManager[None] = nullcontext()
    if not why_not:
        assert isinstance(storage_writer, MemoryStorageWriter)
        states = States(state_dict)
        try:
            with raised_as_by_dcp(
                "save", process_group, no_dist, states.has_raised_or_left_to_torch
            ):
                return storage_writer._saver.save_collectively(
                    states.make,
                    checkpoint_id,
                    process_group,
                    no_dist,
                    to_lowest_rank=saves_to_lowest_rank(planner),
                )
        except NoCommonPlan:
            left_to_torch = storage_writer._saver.left_to_torch()  # The writer has logged why.
    elif not isinstance(storage_writer, MemoryStorageWriter):
        log_once(f"dcp_mem.save leaves saves to dcp.save: {why_not}")
    accepted = accepted_by(
        dcp.save, no_dist=(no_dist, False), use_collectives=(use_collectives, True)
    )
    made = attempt(lambda: without_stateful(state_dict))
    with left_to_torch, raised_together(made.error):
        metadata: Metadata = dcp.save(
            made.value if made.error is None else {},
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner if made.error is None else RefusingPlanner(made.error),
            process_group=process_group,
            **accepted,
        )
    return metadata


def _refuse_no_writer(given: object) -> None:
    example = "MemoryStorageWriter(path)"
    refuse_other_kind("storage_writer", given, StorageWriter, "write_data", example)


def _group_of(
    writer: StorageWriter | None, given: dist.ProcessGroup | None, no_dist: bool
) -> dist.ProcessGroup | None:
    """Return the ranks of a call: those that are given, or else the writer's."""
    if given is None and not no_dist and isinstance(writer, MemoryStorageWriter):
        return writer._saver.process_group
    return given


def _why_not(
    writer: StorageWriter | None, planner: SavePlanner | None, use_collectives: bool
) -> str:
    """Return why a save needs torch's planner; "" where it doesn't. The same on all ranks."""
    if not isinstance(writer, MemoryStorageWriter):
        return "the storage_writer isn't a MemoryStorageWriter"
    if not use_collectives:
        return "use_collectives=False"
    if torch_plans():
        return f"{SWITCH} is set"
    return why_not_own_plan(planner)


@takes()
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overlap: Overlap | Optimizer | Sequence[Optimizer] | None = None,
) -> Future[Metadata]:
    """Save as `torch.distributed.checkpoint.async_save` does: copy, return, save in the background.

    With a MemoryStorageWriter the state dict is copied straight into node memory, from the second
    save of a structure on. Saves of one process take turns, so several may be under way; each makes
    the checkpoint that it was called for, or raises.

    Args:
        state_dict: What to save; stateful objects are asked for theirs.
        checkpoint_id: Name of the checkpoint.
        storage_writer: A MemoryStorageWriter; any other as with dcp.async_save.
        planner: Default torch's.
        process_group: The ranks that save together; default the writer's, or else all.
        async_checkpointer_type: As in dcp.async_save; default threads.
        async_stager: As in dcp.async_save; default the writer.
        no_dist: Save alone.
        use_collectives: As in dcp.async_save.
        overlap: Optimizers (or an `Overlap`) that change parameters and their own state in `step`
            and nowhere else. These are copied behind the next forward and backward passes, and the
            next step of each of the optimizers waits for the copies; all else is copied at once.

    Returns:
        A future of the checkpoint's metadata, which raises what dcp.save raises. With a stager of
        yours that returns a future itself it is torch's AsyncSaveResponse.

    Raises:
        ConfigError: state_dict is no dict, or storage_writer no writer; several ranks without a
            process group; overlap= with another writer, with a stager, or without an optimizer.
        Exception: A stateful object's `state_dict` raised it.
    """
    _refuse_no_writer(storage_writer)
    state_dict = taking_part(state_dict)
    process_group = _group_of(storage_writer, process_group, no_dist)
    if isinstance(storage_writer, MemoryStorageWriter) and not no_dist:
        refuse_missing_group()
    copies: AbstractContextManager[None] = nullcontext()
    if overlap is not None:
        if not isinstance(storage_writer, MemoryStorageWriter) or async_stager is not None:
            raise ConfigError("overlap= needs a MemoryStorageWriter that stages by itself")
        copies = storage_writer._saver.overlapping(overlap_of(overlap))
    made: Attempted[dict[str, Any]] = Attempted((state_dict,))
    if isinstance(storage_writer, MemoryStorageWriter) and async_stager is None:
        made = attempt(lambda: without_stateful(state_dict))
    stages_itself = (
        isinstance(storage_writer, MemoryStorageWriter)
        and type(storage_writer).stage is MemoryStorageWriter.stage
        and async_stager is None
        and (async_checkpointer_type is None or "THREAD" in str(async_checkpointer_type))
        and use_collectives
        and _can_begin_itself(process_group)
    )
    begin = _begin_own if stages_itself else _begin_by_dcp
    with copies:
        begun = begin(
            made.value if made.error is None else refused_state(made.error),
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    if made.error is not None:
        # The other ranks raise it as well, once this one has told them behind training.
        response: Any = begun
        wait([getattr(response, "upload_completion", response)])
        raise made.error
    return begun


def _begin_by_dcp(state_dict: dict[str, Any], **arguments: Any) -> Any:
    """Begin a save as dcp.async_save does."""
    defaults = {
        "async_checkpointer_type": None,
        "async_stager": None,
        "no_dist": False,
        "use_collectives": True,
    }
    options = {name: (arguments.pop(name), default) for name, default in defaults.items()}
    accepted = accepted_by(dcp.async_save, **options)
    chosen = {name: value for name, value in accepted.items() if value is not None}
    return dcp.async_save(state_dict, **arguments, **chosen)


def _can_begin_itself(process_group: dist.ProcessGroup | None) -> bool:
    """Tell whether `_begin_own` may stand in for dcp.async_save, which wouldn't refuse the save."""
    if not can_save_staged():
        return False
    if not dist.is_initialized():
        return True
    return "cpu:" in dist.get_backend_config(process_group)


def _begin_own(
    state_dict: dict[str, Any],
    *,
    storage_writer: Any,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    checkpoint_id: str | os.PathLike[str] | None,
    **_: object,
) -> Future[Metadata]:
    """Begin a save as dcp.async_save does with a writer that stages, with less bookkeeping.

    1. Stage: the writer copies the state dict, in this thread.
    2. Save: dcp.save takes what is staged, in another thread.
    """
    call = StagingCall(
        planner=planner,
        process_group=process_group,
        is_alone=no_dist,
        uses_collectives=True,
        is_in_process=False,
    )
    state = storage_writer._saver.stage(call, state_dict)
    staged, may_begin = staged_in(state), threading.Event()
    assert staged is not None
    accepted = accepted_by(dcp.save, no_dist=(no_dist, False))

    def save() -> Metadata:
        may_begin.wait()
        metadata: Metadata = dcp.save(
            state,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            **accepted,
        )
        return metadata

    try:
        saving = _saving.submit(save)
        staged.end_with(saving)
        return saving
    finally:
        may_begin.set()  # not before: the two would compete for the interpreter's lock


_MOST_SAVES = 64
_saving = KeptThreads(_MOST_SAVES, "dcp_mem-async-save", is_awaited=True)
