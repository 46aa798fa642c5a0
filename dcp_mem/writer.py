"""`MemoryStorageWriter`: DCP's storage writer, which saves into the nodes' memory."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import Unpack

from dcp_mem.comm.agreement import leaving_on_error
from dcp_mem.comm.bridge.calls import (
    dcp_call,
    global_metadata,
    planning_call,
    staging_call,
    submitted_save,
)
from dcp_mem.common import faults
from dcp_mem.common.arguments import takes
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.progress_bar import progress_bar
from dcp_mem.common.values import CheckpointStatus, SaveInfo, State, StateText
from dcp_mem.config import Settings, checked_metrics, checked_step, checkpoint_name
from dcp_mem.errors import ConfigError, picklable
from dcp_mem.options import DEFAULTS, SaveOptions, WriterOptions, of_kind, settings
from dcp_mem.planning.tensor_choice import tensor_rule
from dcp_mem.runtime import states
from dcp_mem.runtime.session import close_session, open_session
from dcp_mem.saving.dcp_plan import DcpPlanTracker, dcp_planned, fill_in, republish, results_of
from dcp_mem.saving.dcp_takeover import DcpTakeover, planner_of
from dcp_mem.saving.prepare import Preparation, prepare
from dcp_mem.saving.retention import apply_retention
from dcp_mem.saving.saver import Saver
from dcp_mem.storage.destination import refuse_unusable

_RETURN_SECONDS = 0.001
"""Time for `dcp.async_save` to return in, before the save in the background does anything."""


@takes(WriterOptions, DEFAULTS)
class MemoryStorageWriter(StorageWriter):
    """Saves checkpoints into node memory (tmpfs) and has them flushed to storage behind training.

    `dcp.save` returns when every rank's segment and the metadata lie in the memory of every node:
    from then on the checkpoint survives the death of every trainer process. An agent, a process of
    its own, takes it to storage.

    Args:
        path: The job's root on storage, an fsspec URL or a plain path. None keeps checkpoints in
            memory only.
        **options: As in `WriterOptions`.

    Raises:
        ConfigError: The arguments can't work; raised before anything is saved.
    """

    _of_kind: ClassVar[Mapping[str, Any]] = {}
    """Settings that all writers of a class have, and that no argument sets."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        **options: Unpack[WriterOptions],
    ) -> None:
        super().__init__()
        frozen, group = options.pop("frozen", None), options.pop("process_group", None)
        checked = settings(path, **of_kind(SaveOptions, options))
        self.settings = replace(checked, **self._of_kind)
        _check_that_it_can_be_flushed(self.settings)
        if (export := options.get("export")) is not None:
            refuse_unusable(export.to, export.storage_options or {}, is_flushed_elsewhere=True)
        self._saver = Saver(self.settings, group, tensor_rule("frozen", frozen))
        self._dcp_plans = DcpPlanTracker()

    # -- DCP's contract, in the order of its calls -------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save under this name. A name that can't be used is refused in the next call."""
        self._saver.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners may want to know: the checkpoint's name.

        DCP asks for it before it asks the planner for anything, so a save whose planning dcp_mem
        takes over is taken over here.
        """
        calls, call = self._saver.calls, planning_call(self)
        if call is not None and calls.takeover is not None and calls.takeover.has_taken(call):
            return StorageMeta(checkpoint_id=calls.name)
        # Where set_up_storage_writer has been called by now, it is too late to agree on a plan.
        can_agree = call is not None and call.uses_collectives and calls.save is None
        calls.takeover = DcpTakeover(call) if call is not None and can_agree else None
        if calls.takeover is not None and calls.takeover.staged is not None:
            # This thread has the interpreter's lock, and the training loop would wait 5 ms for it.
            time.sleep(_RETURN_SECONDS)
        return StorageMeta(checkpoint_id=calls.name)

    @picklable
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Find out which ranks save together, and open the job's memory.

        `use_collectives=False` makes each rank save a checkpoint of its own.
        """
        calls = self._saver.calls
        calls.save = None
        takeover, calls.takeover = calls.takeover, None
        try:
            with calls.step(is_last=False):
                calls.save = self._saver.begin_driven(takeover, kwargs.get("use_collectives", True))
                calls.save.finishes = is_coordinator
        except BaseException:
            # Now, and not when nobody keeps the error any more: it keeps the frames.
            if takeover is not None:
                takeover.give_up()
            raise

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    @picklable
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take note of all ranks' plans, on the coordinator; they stay as they are.

        Raises:
            ConfigError: DCP saves with another number of ranks than the writer's process group has.
        """
        begun = self._saver.calls.begun()
        if begun.own is not None:
            return plans
        with collector_paused():
            size = begun.context.ranks.size
            if len(plans) != size:
                raise ConfigError(
                    f"DCP plans for {len(plans)} ranks, the writer for {size}: "
                    f"pass the same process_group to both"
                )
            self._dcp_plans.see(plans, global_metadata())
            return plans

    @picklable
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part; on return the checkpoint is complete in memory, on all nodes."""
        calls = self._saver.calls
        begun = calls.begun()
        with (
            calls.step(is_last=not begun.finishes),
            leaving_on_error(begun.context.ranks),
            collector_paused(),
        ):
            self._saver.go_on(begun.context)
            if begun.own is not None:
                self._saver.carry_out(begun.context, begun.own)
                return _future([])
            begun.takeover = None  # it refers to the caller's tensors; only rank 0 finishes
            planner = planner_of(planner)
            completed = self._saver.save(
                begun.context, lambda context: dcp_planned(context, plan, planner, self._dcp_plans)
            )
            if completed is None:
                return _future([])
            self._dcp_plans.settle(planner, completed.saved)
            begun.manifest = completed.manifest
            return _future(results_of(completed.staged))

    @picklable
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Fill in the metadata that dcp.save returns; republish if the checkpoint has another."""
        calls = self._saver.calls
        with calls.step(is_last=True), collector_paused():
            begun = calls.begun()
            calls.save, calls.name = None, None
            if begun.own is not None:
                faults.point("save.finished")
                return
            if begun.manifest is None:
                self._dcp_plans.release()
                return  # the save was skipped
            if not self._dcp_plans.is_published(metadata):
                republish(begun.context, begun.manifest, metadata, results)
            fill_in(metadata, results, begun.manifest)
            self._dcp_plans.release()
            faults.point("save.finished")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this could be a checkpoint id: any name or path but ""."""
        return bool(os.fspath(checkpoint_id))

    # -- DCP's AsyncStager: dcp.async_save has the writer stage what it saves ----------------------

    _synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether DCP is to call `synchronize_staging`."""
        return True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict, as it is now, for the save that DCP makes of it in the background.

        It goes straight into a slot if the ranks have saved one like it before, else into private
        memory. What goes wrong is raised by the save, on all ranks.

        Args:
            state_dict: As `dcp.async_save` got it.

        Returns:
            A state dict that stands for the copy; for `dcp.save` with this writer alone.
        """
        return self._saver.stage(staging_call(self), state_dict)

    def synchronize_staging(self) -> None:
        """Return at once: what `stage` has returned doesn't change any more.

        DCP calls it once the save has begun, which may fail before it calls the writer.
        """
        if (saving := submitted_save()) is not None:
            self._saver.submitted(staging_call(self), saving)

    # -- around the saves --------------------------------------------------------------------------

    @takes()
    def annotate_next_save(
        self,
        *,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        persist: bool = False,
    ) -> None:
        """Say of the next save which step it is of, and how good that is. Rank 0's word counts.

        Args:
            step: Training step; kept with the checkpoint, for retention and listings.
            metrics: Real numbers, or tensors of one, by name; kept with the checkpoint likewise.
            persist: Have storage get the checkpoint, whatever the writer's policy says.

        Raises:
            ConfigError: The step is no number, or a metric isn't.
        """
        self._saver.annotate(SaveInfo(checked_step(step), checked_metrics(metrics), bool(persist)))

    @takes()
    def prepare(
        self, state_dict: dict[str, Any], planner: SavePlanner | None = None
    ) -> Preparation:
        """Lay out and prefault slots in the background, so that no page faults slow the first save.

        Slots are made for `keep_memory` + 1 checkpoints, or as many as `memory_limit` has room for;
        what `frozen=` declares gets one for all of them. Call it on all ranks. It returns once all
        ranks have planned, and raises on all where one of them can't.

        Args:
            state_dict: As dcp.save will get it.
            planner: As dcp.save will get it; default torch's.

        Returns:
            What `.wait()` can be called on, until the slots are ready.

        Raises:
            MemoryBudgetExceeded: `memory_limit` has no room for a checkpoint of this state.
            RankFailed: Another rank could not plan, or open its memory.
        """
        call = dcp_call(self._saver.process_group, self._saver.purpose, "prepare()")
        with leaving_on_error(call.ranks), self._saver.in_turn():
            return prepare(
                self.settings,
                call,
                self._saver.open_session,
                state_dict,
                planner or DefaultSavePlanner(),
                self._saver.frozen,
            )

    @takes()
    def wait(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        state: State | StateText = State.DURABLE,
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> None:
        """Wait until a checkpoint has reached a state.

        Args:
            checkpoint_id: As given to the save; by default the newest one, or the newest that is
                meant for storage.
            state: State.COMPLETE, REPLICATED or DURABLE, or its text ("durable").
            timeout: Seconds; None waits for as long as there is hope.
            progress: Show how far it is, on stderr if that is a terminal.

        Raises:
            WaitTimeout: The time ran out first.
            FlushFailed: Storage refused it, or it left memory before it was durable.
            ReplicationFailed: It gets no copies.
            CheckpointNotFound: It was never saved on this node.
            ConfigError: No checkpoint of this writer reaches such a state.
        """
        name = None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
        with progress_bar(progress) as show:
            states.wait(
                self.settings, name, state, timeout=timeout, wake=self._saver.wake_agent, show=show
            )

    def status(self) -> list[CheckpointStatus]:
        """Return every known checkpoint of this job on this node, newest first."""
        return states.status(self.settings)

    @property
    def agent_log(self) -> str:
        """Path of the file where this node's agent writes what it does."""
        return states.agent_log(self.settings)

    @takes()
    def close(
        self,
        flush: bool = True,
        *,
        progress: bool = False,
        persist_newest: bool = True,
        keep_slots: bool = False,
    ) -> None:
        """Wait until all that is meant for storage is durable, then give back slots and mappings.

        The newest checkpoint goes to storage as well, whichever saves `persist=` has chosen; only
        persist=False keeps it in memory. What `keep_memory` keeps stays in memory, for a restart.
        Exports that this node has begun or chosen are waited for as well, but not their repeats.
        Closing twice is fine. A save after that opens the job's memory anew, with a warning.

        Args:
            flush: False doesn't wait for storage; the agent goes on flushing. What this process has
                under way is waited for: saves, copies to other nodes, checksums for 10 s at most.
            progress: Show how far the flush is, on stderr if that is a terminal.
            persist_newest: False leaves the newest checkpoint to `persist=`, like any other.
            keep_slots: For a restart within the process: free slots stay in memory, and all stay
                mapped, for this process's next writer of the job. Leaving a `with` block by an
                exception does that.

        Raises:
            FlushFailed: Storage refuses, or another node has lost its part; the text says which
                checkpoints stay in memory, and how to flush them later.
        """
        try:
            # Without a session, a flush thread has ended, and nothing would flush what is pending.
            has_no_flusher = self.settings.agent == "thread" and open_session(self.settings) is None
            session = open_session(self.settings)
            if session is not None:
                with session.turns.take():  # Saves in the background come first.
                    pass
            promoted = self._promote_newest() if persist_newest else frozenset()
            if flush and self.settings.url is not None and not has_no_flusher:
                with progress_bar(progress) as show:
                    states.wait_for_all(
                        self.settings, self._saver.wake_agent, show, promoted=promoted
                    )
                states.wait_for_exports(self.settings, self._saver.wake_agent)
            self._apply_retention()
        finally:
            close_session(self.settings, keep_slots=keep_slots)
            self._saver.is_closed = True

    def __enter__(self) -> MemoryStorageWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None, keep_slots=kind is not None)

    def __repr__(self) -> str:
        return states.summary(self, self.settings)

    # -- inside ------------------------------------------------------------------------------------

    def _promote_newest(self) -> frozenset[str]:
        """Have the newest checkpoint flushed, of each scope; return the save ids of those.

        Only of a job that this process saves: another one may still be at it.
        """
        session, chosen = open_session(self.settings), self.settings
        if chosen.url is None or chosen.persist.is_never:
            return frozenset()
        if session is None and not self._saver.saves_elsewhere:
            return frozenset()
        promoted = states.promote_newest(chosen)
        if promoted:
            self._saver.wake_agent()
        return promoted

    def _apply_retention(self) -> None:
        session = open_session(self.settings)
        if session is not None:  # the last save left alone what was being flushed
            session.replicator.wait()
            with session.turns.take():
                for scope in {one.manifest.scope for one in session.memory.checkpoints()}:
                    apply_retention(
                        session.memory,
                        scope,
                        self.settings.keep_memory,
                        gets_copies=bool(self.settings.redundancy),
                        persists_all=self.settings.persists_all,
                    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dcp_plans": DcpPlanTracker()}


def _check_that_it_can_be_flushed(chosen: Settings) -> None:
    """Raise ConfigError for a root that takes no files, or that the agent can't reach."""
    if chosen.url is None:
        return
    if not chosen.persist.is_never:
        refuse_unusable(
            chosen.url,
            chosen.storage_options,
            is_flushed_elsewhere=chosen.agent == "process",
        )
    if chosen.agent == "process":
        try:
            pickle.dumps(chosen.storage_options)
        except Exception as error:
            raise ConfigError(
                f"storage_options can't be sent to the agent ({type(error).__name__}: {error}): "
                f"give credentials as plain values or in the environment, or choose agent='thread'"
            ) from None


def _future(results: list[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future
