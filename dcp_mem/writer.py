"""`MemoryStorageWriter`: DCP's storage writer, which saves into the nodes' memory."""

from __future__ import annotations

import operator
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_mem.comm import SingleRank, known_ranks, run_token
from dcp_mem.comm.agreement import Attempted, attempt, leaving_on_error
from dcp_mem.comm.dcp_call import (
    StagingCall,
    dcp_call,
    direct_call,
    global_metadata,
    is_called_by_dcp,
    over_when_left,
    planning_call,
    staging_call,
)
from dcp_mem.common import faults
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.common.progress_bar import progress_bar
from dcp_mem.common.values import CheckpointStatus, SaveInfo, State
from dcp_mem.config import (
    Parity,
    Settings,
    checked_metrics,
    checked_step,
    checkpoint_name,
    run_identity,
    settings,
)
from dcp_mem.errors import ConfigError, picklable
from dcp_mem.flushing.agent import AgentHandle
from dcp_mem.flushing.registration import registration_of
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.locks import RunIdentity, job_is_live, new_token
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.retention import Retention
from dcp_mem.runtime import states
from dcp_mem.runtime.numbers import note_seen, seen
from dcp_mem.runtime.session import (
    Session,
    close_session,
    enter_session,
    open_session,
    session_for,
)
from dcp_mem.runtime.turns import Turn
from dcp_mem.saving.ahead import (
    AheadCopy,
    StagedState,
    copied,
    copy_ahead,
    raise_if_refused,
)
from dcp_mem.saving.calls import DcpSave, ThreadCalls, called, leave, opened_together
from dcp_mem.saving.dcp_plan import DcpPlanItems, DcpPlanTracker, fill_in, republish
from dcp_mem.saving.dcp_takeover import (
    DcpTakeover,
    note_torch_plans,
    planner_of,
    saves_to_lowest_rank,
    why_not_own_plan,
)
from dcp_mem.saving.overlap import Overlap
from dcp_mem.saving.own_plan import OwnPlanItems, own_plans_of
from dcp_mem.saving.pipeline import carry_out, save
from dcp_mem.saving.prepare import Preparation, prepare
from dcp_mem.saving.retention import apply_retention
from dcp_mem.saving.returned_metadata import ReturnedMetadata
from dcp_mem.saving.stage import Results
from dcp_mem.saving.streams import NothingNew, StreamItems, Streams
from dcp_mem.saving.values import Completed, ItemProvider, NoCommonPlan, SaveContext
from dcp_mem.storage.destination import lives_in_one_process, refuse_unusable

_RETURN_SECONDS = 0.001
"""Time for `dcp.async_save` to return in, before the save in the background does anything."""


class MemoryStorageWriter(StorageWriter):
    """Saves checkpoints into node memory (tmpfs) and has them flushed to storage behind training.

    `dcp.save` returns when every rank's segment and the metadata lie in the memory of every node:
    from then on the checkpoint survives the death of every trainer process. An agent, a process of
    its own, takes it to storage.

    Args:
        path: The job's root on storage, an fsspec URL or a plain path. None keeps checkpoints in
            memory only.
        memory_root: The memory root; default DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>.
        job: Name of the job's memory directory; by default from path, else from TORCHELASTIC_RUN_ID
            or SLURM_JOB_ID.
        persist: Which saves go to storage: True, False, every_n_saves(n), every_n_steps(n) or
            every_seconds(seconds). The coordinator decides.
        replicas: Copies of each segment in other nodes' memory, made behind training; default
            DCP_MEM_REPLICAS, else 0. Where there are fewer other nodes, as many as there are.
        redundancy: parity(k) instead of replicas: parity over groups of k + 1 nodes, from which any
            one node of a group comes back, at 1/k of the memory of a copy.
        failure_domain: What fails together with this node (a rack, say), as a text or a callable
            that returns one; default DCP_MEM_FAILURE_DOMAIN, else the node alone. Copies go to
            other domains where there are any.
        on_replication: What a save does while an older checkpoint's copies are still under way:
            "wait" for them, "skip" its own, or "cancel" them. The same on all ranks.
        keep_memory: Complete checkpoints that stay in memory: a number, or a policy of `keep_last`,
            `keep_best`, `any_of`. One more is staged beside them.
        keep_storage: Checkpoints that stay on storage: the same, where `keep_every` may be one of
            them; None keeps all. Applied after each commit, to what dcp_mem wrote under path; never
            to the newest checkpoint, nor to one that is being read.
        memory_limit: Bytes (or "64GiB") that the job may occupy on a node; default
            DCP_MEM_MEMORY_LIMIT, else keep_memory + 1 checkpoints, with the copies that come to the
            node.
        on_full: What a save does when memory is full: "wait" for the flush to free a slot, "skip"
            the save, or "raise" MemoryBudgetExceeded. The same on all ranks. Where no flush could
            free a slot, "wait" raises too.
        on_slow_storage: What happens where saves come faster than flushes: "newest" leaves out of
            storage what newer checkpoints overtake; with "all" none is left out, and a save waits
            for room within the memory budget (or does what on_full says). What storage refuses
            doesn't hold up saves.
        storage_options: Passed to fsspec as they are. They reach the agent over a pipe, and are
            never written down.
        overwrite: False refuses a checkpoint id that is there already.
        agent: "process", or "thread" for platforms that allow no second process and for file
            systems that live in one.
        upload_limit: Bytes (or "200MiB") per second that a node sends of this job; default
            DCP_MEM_UPLOAD_LIMIT, else no limit.
        on_nonfinite: "reject" marks a checkpoint with NaN or infinity in its tensors as not to be
            resumed from, as `CheckpointManager.reject` does; "warn" logs it, "ignore" doesn't look.
            Looked at behind training, beside the checksums.
        process_group: The ranks that save together; by default those of the dcp.save call.

    Raises:
        ConfigError: The arguments can't work; raised before anything is saved.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        memory_root: str | os.PathLike[str] | None = None,
        job: str | None = None,
        persist: bool | Persist = True,
        replicas: int | None = None,
        redundancy: Parity | None = None,
        failure_domain: str | Callable[[], str] | None = None,
        on_replication: str = "wait",
        keep_memory: int | Retention = 2,
        keep_storage: int | Retention | None = None,
        memory_limit: int | str | None = None,
        on_full: str = "wait",
        on_slow_storage: str = "newest",
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        agent: str = "process",
        upload_limit: int | str | None = None,
        on_nonfinite: str = "ignore",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings(
            path,
            memory_root=memory_root,
            job=job,
            persist=persist,
            keep_memory=keep_memory,
            keep_storage=keep_storage,
            memory_limit=memory_limit,
            on_full=on_full,
            on_slow_storage=on_slow_storage,
            storage_options=storage_options,
            overwrite=overwrite,
            agent=agent,
            upload_limit=upload_limit,
            replicas=replicas,
            redundancy=redundancy,
            failure_domain=failure_domain,
            on_replication=on_replication,
            on_nonfinite=on_nonfinite,
        )
        _check_that_it_can_be_flushed(self.settings)
        self._process_group = process_group
        self._token = new_token()
        self._run = ""
        self._next_info = SaveInfo()
        self._saves_elsewhere = False  # in another process, which has a session of its own
        self._copies_to_send = 0  # of this writer, to the process that saves what was staged
        self._calls = ThreadCalls()
        self._dcp_plans = DcpPlanTracker()
        self._agent = AgentHandle(self.settings.memory_root)
        self._home = os.getpid()

    # -- DCP's contract, in the order of its calls -------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save under this name. A name that can't be used is refused in the next call.

        Args:
            checkpoint_id: A name, or a path under the job's root; None is refused in the
                next call.
        """
        calls = self._calls
        calls.reset()
        try:
            calls.name = (
                None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
            )
        except ConfigError as error:
            # Raised later, where DCP hands it to all ranks; from here it doesn't.
            calls.refused = error

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners may want to know: the checkpoint's name.

        DCP asks for it before it asks the planner for anything, so a save whose planning dcp_mem
        takes over is taken over here.
        """
        calls, call = self._calls, planning_call(self)
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

        Args:
            is_coordinator: Whether DCP joins the plans on this rank; the writer asks the process
                group itself.
            *args: Ignored.
            **kwargs: `use_collectives=False` makes each rank save a checkpoint of its own;
                others are ignored.
        """
        calls = self._calls
        calls.save = None
        takeover, calls.takeover = calls.takeover, None
        try:
            calls.save = self._set_up(takeover, kwargs.get("use_collectives", True))
        except BaseException:
            # Now, and not when nobody keeps the error any more: it keeps the frames.
            if takeover is not None:
                takeover.give_up()
            raise

    def _set_up(self, takeover: DcpTakeover | None, uses_collectives: bool) -> DcpSave:
        calls = self._calls
        staged = takeover.staged if takeover is not None else None
        entered = attempt(lambda: self._entered(staged))
        if entered.error is None:
            # First of all: what follows talks to the other ranks, even where it fails.
            _, calls.turn = entered.value  # kept: it ends with the call, failed or not
            calls.turn.follow(over_when_left())
            calls.turn.wait()
        opened = attempt(lambda: self._named(entered.value[0]))
        call = called(opened, lambda: dcp_call(self._process_group, self._purpose))
        ranks, scope = call.ranks, names.COLLECTIVE
        if not uses_collectives:  # each rank saves a checkpoint of its own
            ranks, scope = SingleRank(), names.rank_scope(call.rank)
            note_torch_plans(opened.value, self._calls.checked_name(), "use_collectives=False")
        context = SaveContext(
            settings=self.settings,
            session=opened.value if takeover is None else opened_together(ranks, opened),
            ranks=ranks,
            rank=call.rank,
            scope=scope,
            name=self._calls.checked_name(),
            info=self._take_info() if staged is None else staged.info,
            is_driven_by_dcp=True,
        )
        if takeover is not None:
            takeover.enter(ranks)
        why_not, calls.why_not = calls.why_not, ""
        if takeover is not None and not why_not:
            try:
                context.session.heap.settle()
                with collector_paused():
                    takeover.settle(context)
            except BaseException as error:
                leave(context, error)
                raise
        if takeover is None and uses_collectives and is_called_by_dcp():
            why_not = "this torch drives its writers in another way"
            note_torch_plans(context.session, context.name, why_not)
        return DcpSave(context, takeover)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Args:
            plan: What DCP's planner wants this rank to save.
        """
        return plan

    @picklable
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take note of all ranks' plans, on the coordinator; they stay as they are.

        Args:
            plans: One plan per rank, by rank.

        Raises:
            ConfigError: DCP saves with another number of ranks than the writer's process group has.
        """
        with collector_paused():
            size = self._calls.begun().context.ranks.size
            if len(plans) != size:
                raise ConfigError(
                    f"DCP plans for {len(plans)} ranks, the writer for {size}: "
                    f"pass the same process_group to both"
                )
            self._dcp_plans.see(plans, global_metadata())
            return plans

    @picklable
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part; on return the checkpoint is complete in memory, on all nodes.

        Args:
            plan: What this rank writes, as DCP's global plan has it.
            planner: Resolves the plan's items to tensors and bytes.
        """
        begun = self._calls.begun()
        with leaving_on_error(begun.context.ranks), collector_paused():
            if begun.own is not None:
                self._carry_out(begun.context, begun.own)
                return _future([])
            items = DcpPlanItems(plan, planner_of(planner), self._dcp_plans)
            completed = self._save(begun.context, items)
            if completed is None:
                return _future([])
            begun.manifest = completed.manifest
            return _future(Results(completed.staged))

    @picklable
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Fill in the metadata that dcp.save returns; republish if the checkpoint has another.

        Args:
            metadata: DCP's metadata of the global plan; its storage data is filled in.
            results: What `write_data` returned, one list per rank, by rank.
        """
        with collector_paused():
            begun, calls = self._calls.begun(), self._calls
            calls.save, calls.name = None, None
            if begun.own is not None:
                if begun.own.metadata is not None:
                    begun.own.metadata.keep()
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
        """Return whether this could be a checkpoint id.

        Args:
            checkpoint_id: Any name or path but "".
        """
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
        call = staging_call(self)
        if call is None or not call.uses_collectives:
            raise_if_refused(state_dict)
            return copied(state_dict)
        info, turn = self._take_info(), None
        content: Attempted[AheadCopy | dict[str, Any]]
        if call.is_in_process:
            self._saves_elsewhere = True
            self._copies_to_send += 1
            content = attempt(lambda: self._copied_elsewhere(state_dict, is_shared=True))
        else:
            entered = attempt(lambda: enter_session(self.settings, self._identity()))
            turn = entered.value[1] if entered.error is None else None
            content = attempt(lambda: self._copied(call, entered.value[0], info, state_dict))
        return StagedState(info, content, turn).as_state_dict()

    def synchronize_staging(self) -> None:
        """Do nothing: what `stage` has returned doesn't change any more."""

    # -- around the saves --------------------------------------------------------------------------

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
        self._annotate(SaveInfo(checked_step(step), checked_metrics(metrics), bool(persist)))

    def prepare(
        self, state_dict: dict[str, Any], planner: SavePlanner | None = None
    ) -> Preparation:
        """Lay out and prefault slots in the background, so that no page faults slow the first save.

        Call it on all ranks. It returns once all ranks have planned, and raises on all where one of
        them can't.

        Args:
            state_dict: As dcp.save will get it.
            planner: As dcp.save will get it; default torch's.

        Returns:
            What `.wait()` can be called on, until the slots are ready.

        Raises:
            RankFailed: Another rank could not plan, or open its memory.
        """
        call = dcp_call(self._process_group, self._purpose)
        with leaving_on_error(call.ranks), self._in_turn():
            return prepare(
                self.settings, call, self._open_session, state_dict, planner or DefaultSavePlanner()
            )

    def wait(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        state: State | str = State.DURABLE,
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
                self.settings, name, state, timeout=timeout, wake=self._wake_agent, show=show
            )

    def status(self) -> list[CheckpointStatus]:
        """Return every known checkpoint of this job on this node, newest first."""
        return states.status(self.settings)

    @property
    def agent_log(self) -> str:
        """Path of the file where this node's agent writes what it does."""
        return states.agent_log(self.settings)

    def close(
        self, flush: bool = True, *, progress: bool = False, persist_newest: bool = True
    ) -> None:
        """Wait until all that is meant for storage is durable, then give back slots and mappings.

        The newest checkpoint goes to storage as well, whichever saves `persist=` has chosen; only
        persist=False keeps it in memory. What `keep_memory` keeps stays in memory, for a restart.
        Closing twice is fine.

        Args:
            flush: False doesn't wait; the agent goes on flushing by itself.
            progress: Show how far the flush is, on stderr if that is a terminal.
            persist_newest: False leaves the newest checkpoint to `persist=`, like any other.

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
                    states.wait_for_all(self.settings, self._wake_agent, show, promoted=promoted)
            self._apply_retention()
        finally:
            close_session(self.settings, drop_free=True)

    def __enter__(self) -> MemoryStorageWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(flush=kind is None)

    # -- for dcp_mem.save, the manager and the integrations ----------------------------------------

    def _save_collectively(
        self,
        make_state: Callable[[], Mapping[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        *,
        to_lowest_rank: bool = False,
    ) -> Metadata:
        """Save by a plan of dcp_mem's own; see `dcp_mem.save`.

        Args:
            make_state: Gives the state dict, and may raise.
            checkpoint_id: Name of the checkpoint.
            process_group: The ranks; None for the writer's.
            no_dist: Save alone.
            to_lowest_rank: As `dedup_save_to_lowest_rank` of torch's planner.

        Raises:
            NoCommonPlan: The state dict needs DCP's planner; on all ranks, with nothing done.
        """
        with self._in_turn():
            return self._save_state(
                make_state, checkpoint_id, process_group, no_dist, to_lowest_rank
            )

    def _save_state(
        self,
        make_state: Callable[[], Mapping[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        to_lowest_rank: bool,
    ) -> Metadata:
        context = self._begin(checkpoint_id, process_group, no_dist)
        try:
            state = attempt(make_state)
            with collector_paused():
                items = OwnPlanItems(
                    own_plans_of(context.session), state, to_lowest_rank=to_lowest_rank
                )
                completed = self._save(context, items)
                if completed is None:
                    return Metadata({})
                faults.point("save.finished")
                metadata = ReturnedMetadata(completed.manifest.save_id)
                metadata.settle(context.session, completed.manifest, completed.agreed.info)
                return metadata.keep()
        except NoCommonPlan as reason:
            # Of the save that DCP drives now. The ranks needn't find out once more.
            self._next_info, self._calls.why_not = context.info, str(reason.why_not) or "?"
            note_torch_plans(context.session, context.name, reason.why_not)
            raise
        except BaseException as error:
            leave(context, error)
            raise

    @contextmanager
    def _left_to_torch(self) -> Iterator[None]:
        """Let DCP drive the save that `_save_collectively` has just left to torch's planner.

        What is known of that save is forgotten afterwards, also where DCP fails before it calls the
        writer: the next save must ask the other ranks again.
        """
        try:
            yield
        finally:
            if self._calls.why_not:
                self._calls.why_not, self._next_info = "", SaveInfo()

    def _new_streams(self) -> Streams:
        """Return room for streams that become a checkpoint by `_save_streams`."""
        return Streams(self._open_session().slots)

    def _save_streams(
        self,
        make_streams: Callable[[], Streams],
        checkpoint_id: str | os.PathLike[str],
        *,
        has_new: bool,
        no_dist: bool = False,
    ) -> Manifest | None:
        """Make a checkpoint of what the ranks have written into their streams.

        Call it on all ranks; a rank that has written nothing takes part with empty streams.
        Whatever happens, the streams are used up.

        Args:
            make_streams: Gives this rank's streams, and may raise.
            checkpoint_id: Name of the checkpoint.
            has_new: Whether this rank has anything to save.
            no_dist: Save alone.

        Returns:
            None where the save was skipped.

        Raises:
            NothingNew: No rank has anything to save; on all ranks, with nothing done.
        """
        with self._in_turn():
            context = self._begin(checkpoint_id, None, no_dist)
            if not context.ranks.all_reduce(has_new, operator.or_):
                self._next_info = context.info
                raise NothingNew(context.name)
            streams = attempt(make_streams)
            try:
                completed = self._save(context, StreamItems(streams))
                if completed is None:
                    return None
                faults.point("save.finished")
                return completed.manifest
            except BaseException as error:
                leave(context, error)
                raise
            finally:
                if streams.error is None:
                    streams.value.close()

    @property
    def _last_save(self) -> tuple[Manifest, SaveInfo] | None:
        """The last save's manifest and save info; None if that save was skipped or failed."""
        return self._calls.last

    @contextmanager
    def _overlapping(self, overlap: Overlap | None) -> Iterator[None]:
        """Have this thread's calls of `stage` leave copies to the background.

        Args:
            overlap: Which of them; None for none.
        """
        self._calls.overlap = overlap
        try:
            yield
        finally:
            self._calls.overlap = None

    def _annotate(self, info: SaveInfo) -> None:
        """Say of the next save what has been checked already."""
        self._next_info = info

    def _wake_agent(self, now: bool = False) -> None:
        """Have the agent look at what is pending; now=True tries at once again what failed."""
        session = open_session(self.settings)
        if session is not None:
            session.wake_agent(self.settings, now=now)
        elif self.settings.agent == "process" and self.settings.url is not None:
            # The saves are made elsewhere: async_save's process executor.
            self._agent.wake(registration_of(self.settings, now=now))
        elif not job_is_live(os.path.join(self.settings.memory_root, self.settings.job)):
            # The process that saved is gone, and its flush thread with it.
            self._open_session().wake_agent(self.settings, now=now)

    # -- inside ------------------------------------------------------------------------------------

    def _copied(
        self, call: StagingCall, session: Session, info: SaveInfo, state: dict[str, Any]
    ) -> AheadCopy | dict[str, Any]:
        """Copy a state dict into a slot, or elsewhere where there is no plan of it, or no slot."""
        raise_if_refused(state)
        group = call.process_group if call.process_group is not None else self._process_group
        ranks = SingleRank() if call.is_alone else known_ranks(group, self._purpose)
        if ranks is not None and not why_not_own_plan(call.planner):
            context = SaveContext(
                settings=self.settings,
                session=session,
                ranks=ranks,
                rank=ranks.rank,
                scope=names.COLLECTIVE,
                name="",
                info=info,
            )
            with collector_paused():
                ahead = copy_ahead(
                    context,
                    state,
                    self._calls.overlap,
                    to_lowest_rank=saves_to_lowest_rank(call.planner),
                )
            if ahead is not None:
                return ahead
        return self._copied_elsewhere(state)

    def _copied_elsewhere(
        self, state: dict[str, Any], *, is_shared: bool = False
    ) -> dict[str, Any]:
        raise_if_refused(state)
        if self._calls.overlap is not None:
            log.info("overlap= has no effect on a save that isn't copied straight into a slot")
        return copied(state, is_shared=is_shared)

    def _save(self, context: SaveContext, items: ItemProvider) -> Completed | None:
        """Take one save through its stages; see `saving/pipeline.py`."""
        completed = save(context, items)
        if completed is not None:
            self._note(completed)
        return completed

    def _carry_out(self, context: SaveContext, takeover: DcpTakeover) -> None:
        """Save what all ranks have settled on in DCP's planning step, unless it is skipped."""
        if takeover.settled is None:
            return
        assert takeover.items is not None
        assert takeover.metadata is not None
        items, settled = takeover.items, takeover.settled
        takeover.items = takeover.settled = None  # they refer to the caller's tensors
        completed = carry_out(context, items, settled)
        self._note(completed)
        takeover.metadata.settle(context.session, completed.manifest, completed.agreed.info)

    def _note(self, completed: Completed) -> None:
        self._calls.last = completed.manifest, completed.agreed.info

    def _begin(
        self,
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> SaveContext:
        """Begin a save that DCP doesn't drive: open the job's memory, and connect the ranks."""
        self.reset(checkpoint_id)
        group = process_group if process_group is not None else self._process_group
        opened = attempt(self._open)
        call = called(opened, lambda: direct_call(group, no_dist, self._purpose))
        return SaveContext(
            settings=self.settings,
            session=opened_together(call.ranks, opened),
            ranks=call.ranks,
            rank=call.rank,
            scope=names.COLLECTIVE,
            name=self._calls.checked_name(),
            info=self._take_info(),
        )

    def _take_info(self) -> SaveInfo:
        """Return what was said of the save that begins now."""
        info, self._next_info, self._calls.last = self._next_info, SaveInfo(), None
        return info

    def _open(self) -> Session:
        self._calls.checked_name()
        session = self._open_session()
        session.heap.settle()
        return session

    def _entered(self, staged: StagedState | None) -> tuple[Session, Turn]:
        """Return the session for a save that DCP drives, and the save's turn in it."""
        if staged is not None and staged.turn is not None:
            return self._open_session(), staged.turn
        self._calls.checked_name()
        self._refuse_to_flush_elsewhere()
        return enter_session(self.settings, self._identity())

    def _refuse_to_flush_elsewhere(self) -> None:
        """Raise ConfigError where a flush in this process wouldn't reach the writer's storage."""
        url = self.settings.url
        if url is not None and os.getpid() != self._home and lives_in_one_process(url):
            raise ConfigError(
                f"path={url!r} lives in the process that made the writer, and this save runs in "
                "another one: let async_save use a thread (AsyncCheckpointerType.THREAD)"
            )

    def _named(self, session: Session) -> Session:
        """Return the session of a save that has a name. Raises ConfigError where it has none."""
        self._calls.checked_name()
        return session

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Run in a turn of this process's saves of the job.

        Without one, where the job's memory can't be opened: that is raised where all ranks see it.
        """
        entered = attempt(lambda: enter_session(self.settings, self._identity()))
        if entered.error is not None:
            yield
            return
        _, turn = entered.value
        with turn:
            yield

    def _open_session(self) -> Session:
        return session_for(self.settings, self._identity())

    def _identity(self) -> RunIdentity:
        return RunIdentity(self._run or run_identity() or run_token(), self._token)

    @property
    def _purpose(self) -> str:
        """The purpose of the ranks' connections: all saves of one job share them."""
        return f"save {self.settings.job}"

    def _promote_newest(self) -> frozenset[str]:
        """Have the newest checkpoint flushed, of each scope; return the save ids of those.

        Only of a job that this process saves: another one may still be at it.
        """
        session, chosen = open_session(self.settings), self.settings
        if chosen.url is None or chosen.persist.is_never:
            return frozenset()
        if session is None and not self._saves_elsewhere:
            return frozenset()
        promoted = states.promote_newest(chosen)
        if promoted:
            self._wake_agent()
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
        # For async_save's process executor: the copy opens a session of its own, and finds its
        # group by itself. But it belongs to this run, which its own environment and store would
        # give another name.
        # What was said of the next save goes along, unless `stage` has sent ahead what was said of
        # this one. DCP pickles the writer in the background: by now it may be of a later save.
        info = SaveInfo()
        if self._copies_to_send:
            self._copies_to_send -= 1
        else:
            info = self._take_info()
        return {
            **self.__dict__,
            "_next_info": info,
            "_copies_to_send": 0,
            "_calls": None,
            "_process_group": None,
            "_dcp_plans": DcpPlanTracker(),
            "_run": self._identity().run,
            "_seen": seen(self.settings),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        number = state.pop("_seen")
        self.__dict__.update(state, _calls=ThreadCalls())
        note_seen(self.settings, number)


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


def _future(results: Sequence[WriteResult]) -> Future[list[WriteResult]]:
    """Return a future that is done. DCP iterates over the results, and pickles them."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(cast("list[WriteResult]", results))
    return future
