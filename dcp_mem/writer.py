"""`MemoryStorageWriter`: DCP's storage writer, which saves into the nodes' memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_mem.comm import Ranks, SingleRank, run_token
from dcp_mem.comm.agreement import Attempted, attempt, described, on_all_ranks
from dcp_mem.comm.dcp_call import dcp_call, direct_call, global_metadata
from dcp_mem.common import faults
from dcp_mem.common.gc_pause import collector_paused
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
from dcp_mem.errors import ConfigError, RankFailed, picklable
from dcp_mem.flushing.agent import AgentHandle
from dcp_mem.flushing.registration import registration_of
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import LazyMetadata, with_storage
from dcp_mem.memory.locks import RunIdentity, job_is_live, new_token
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.retention import Retention
from dcp_mem.runtime import states
from dcp_mem.runtime.session import Session, close_session, open_session, session_for
from dcp_mem.saving.dcp_plan import DcpPlanItems, DcpPlanTracker, republish
from dcp_mem.saving.own_plan import OwnPlanItems, own_plans_of
from dcp_mem.saving.pipeline import save
from dcp_mem.saving.prepare import Preparation, prepare
from dcp_mem.saving.retention import apply_retention
from dcp_mem.saving.stage import Results
from dcp_mem.saving.streams import StreamItems, Streams
from dcp_mem.saving.values import Completed, ItemProvider, NoCommonPlan, SaveContext


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
        storage_options: Passed to fsspec as they are. They reach the agent over a pipe, and are
            never written down.
        overwrite: False refuses a checkpoint id that is there already.
        agent: "process", or "thread" for platforms that allow no second process and for file
            systems that live in one.
        upload_limit: Bytes (or "200MiB") per second that a node sends of this job; default
            DCP_MEM_UPLOAD_LIMIT, else no limit.
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
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        agent: str = "process",
        upload_limit: int | str | None = None,
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
            storage_options=storage_options,
            overwrite=overwrite,
            agent=agent,
            upload_limit=upload_limit,
            replicas=replicas,
            redundancy=redundancy,
            failure_domain=failure_domain,
            on_replication=on_replication,
        )
        _check_that_the_agent_gets(self.settings)
        self._process_group = process_group
        self._token = new_token()
        self._run = ""
        self._name: str | None = None
        self._refused: ConfigError | None = None
        self._dcp_save: _DcpSave | None = None
        self._next_info = SaveInfo()
        self._last: tuple[Manifest, SaveInfo] | None = None
        self._dcp_plans = DcpPlanTracker()
        self._agent = AgentHandle(self.settings.memory_root)

    # -- DCP's contract, in the order of its calls -------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save under this name. A name that can't be used is refused in the next call.

        Args:
            checkpoint_id: A name, or a path under the job's root; None is refused in the
                next call.
        """
        self._name, self._refused = None, None
        try:
            self._name = (
                None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
            )
        except ConfigError as error:
            # Raised later, where DCP hands it to all ranks; from here it doesn't.
            self._refused = error

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners may want to know: the checkpoint's name."""
        return StorageMeta(checkpoint_id=self._name)

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
        name = self._checked_name()
        call = dcp_call(self._process_group, self._purpose)
        ranks, scope = call.ranks, names.COLLECTIVE
        if not kwargs.get("use_collectives", True):  # each rank saves a checkpoint of its own
            ranks, scope = SingleRank(), names.rank_scope(call.rank)
        context = SaveContext(
            settings=self.settings,
            session=self._open(),
            ranks=ranks,
            rank=call.rank,
            scope=scope,
            name=name,
            info=self._take_info(),
            is_driven_by_dcp=True,
        )
        self._dcp_save = _DcpSave(context)

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
            size = self._begun().context.ranks.size
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
        with collector_paused():
            begun = self._begun()
            items = DcpPlanItems(plan, planner, self._dcp_plans)
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
            begun, self._dcp_save, self._name = self._begun(), None, None
            if begun.manifest is None:
                self._dcp_plans.release()
                return  # the save was skipped
            if not self._dcp_plans.is_published(metadata):
                republish(begun.context, begun.manifest, metadata, results)
            _fill_in(metadata, results, begun.manifest.save_id)
            self._dcp_plans.release()
            faults.point("save.finished")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this could be a checkpoint id.

        Args:
            checkpoint_id: Any name or path but "".
        """
        return bool(os.fspath(checkpoint_id))

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

    def close(self, flush: bool = True, *, progress: bool = False) -> None:
        """Wait until all that is meant for storage is durable, then give back slots and mappings.

        What `keep_memory` keeps stays in memory, for a restart. Closing twice is fine.

        Args:
            flush: False doesn't wait; the agent goes on flushing by itself.
            progress: Show how far the flush is, on stderr if that is a terminal.

        Raises:
            FlushFailed: Storage refuses; the checkpoints stay in memory.
        """
        try:
            # Without a session, a flush thread has ended, and nothing would flush what is pending.
            has_no_flusher = self.settings.agent == "thread" and open_session(self.settings) is None
            if flush and self.settings.url is not None and not has_no_flusher:
                with progress_bar(progress) as show:
                    states.wait_for_all(self.settings, self._wake_agent, show)
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
    ) -> Metadata:
        """Save by a plan of dcp_mem's own; see `dcp_mem.save`.

        Args:
            make_state: Gives the state dict, and may raise.
            checkpoint_id: Name of the checkpoint.
            process_group: The ranks; None for the writer's.
            no_dist: Save alone.

        Raises:
            NoCommonPlan: The state dict needs DCP's planner; on all ranks, with nothing done.
        """
        context = self._begin(checkpoint_id, process_group, no_dist)
        try:
            state = attempt(make_state)
            with collector_paused():
                items = OwnPlanItems(own_plans_of(context.session), state)
                completed = self._save(context, items)
                if completed is None:
                    return Metadata({})
                faults.point("save.finished")
                return _lazy_metadata(context, completed.manifest)
        except NoCommonPlan:
            self._next_info = context.info  # of the save that DCP drives now
            raise
        except BaseException as error:
            _leave(context, error)
            raise

    def _new_streams(self) -> Streams:
        """Return room for streams that become a checkpoint by `_save_streams`."""
        return Streams(self._open_session().slots)

    def _save_streams(
        self,
        make_streams: Callable[[], Streams],
        checkpoint_id: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> Manifest | None:
        """Make a checkpoint of what the ranks have written into their streams.

        Call it on all ranks; a rank that has written nothing takes part with empty streams.
        Whatever happens, the streams are used up.

        Args:
            make_streams: Gives this rank's streams, and may raise.
            checkpoint_id: Name of the checkpoint.
            process_group: The ranks; None for the writer's.
            no_dist: Save alone.

        Returns:
            None where the save was skipped.
        """
        context = self._begin(checkpoint_id, process_group, no_dist)
        streams = attempt(make_streams)
        try:
            completed = self._save(context, StreamItems(streams))
            if completed is None:
                return None
            faults.point("save.finished")
            return completed.manifest
        except BaseException as error:
            _leave(context, error)
            raise
        finally:
            if streams.error is None:
                streams.value.close()

    @property
    def _last_save(self) -> tuple[Manifest, SaveInfo] | None:
        """The last save's manifest and save info; None if that save was skipped or failed."""
        return self._last

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

    def _save(self, context: SaveContext, items: ItemProvider) -> Completed | None:
        """Take one save through its stages; see `saving/pipeline.py`."""
        completed = save(context, items)
        if completed is not None:
            self._last = completed.manifest, completed.agreed.info
        return completed

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
        try:
            call = direct_call(group, no_dist, self._purpose)
        except RankFailed:
            if opened.error is not None:
                raise opened.error from None
            raise
        return SaveContext(
            settings=self.settings,
            session=_opened_together(call.ranks, opened),
            ranks=call.ranks,
            rank=call.rank,
            scope=names.COLLECTIVE,
            name=self._checked_name(),
            info=self._take_info(),
        )

    def _begun(self) -> _DcpSave:
        if self._dcp_save is None:
            raise ConfigError(
                "DCP calls set_up_storage_writer before this: drive the writer through dcp.save"
            )
        return self._dcp_save

    def _take_info(self) -> SaveInfo:
        """Return what was said of the save that begins now."""
        info, self._next_info, self._last = self._next_info, SaveInfo(), None
        return info

    def _checked_name(self) -> str:
        """Return what to save under. Raises ConfigError where that is missing, or no name."""
        if self._refused is not None:
            raise self._refused
        if self._name is None:
            raise ConfigError(
                "pass checkpoint_id= to dcp.save or dcp_mem.save: "
                "path= of the writer is the root of all checkpoints of a job"
            )
        return self._name

    def _open(self) -> Session:
        self._checked_name()
        session = self._open_session()
        session.heap.settle()
        return session

    def _open_session(self) -> Session:
        return session_for(self.settings, self._identity())

    def _identity(self) -> RunIdentity:
        return RunIdentity(self._run or run_identity() or run_token(), self._token)

    @property
    def _purpose(self) -> str:
        """The purpose of the ranks' connections: all saves of one job share them."""
        return f"save {self.settings.job}"

    def _apply_retention(self) -> None:
        session = open_session(self.settings)
        if session is not None:  # the last save left alone what was being flushed
            session.replicator.wait()
            for scope in {one.manifest.scope for one in session.memory.checkpoints()}:
                apply_retention(
                    session.memory,
                    scope,
                    self.settings.keep_memory,
                    gets_copies=bool(self.settings.redundancy),
                )

    def __getstate__(self) -> dict[str, Any]:
        # For async_save's process executor: the copy opens a session of its own, and finds its
        # group by itself. But it belongs to this run, which its own environment and store would
        # give another name.
        return {
            **self.__dict__,
            "_dcp_save": None,
            "_last": None,
            "_process_group": None,
            "_dcp_plans": DcpPlanTracker(),
            "_run": self._identity().run,
        }


def _check_that_the_agent_gets(chosen: Settings) -> None:
    """Raise ConfigError for storage options that can't be sent to another process."""
    if chosen.agent == "process" and chosen.url is not None:
        try:
            pickle.dumps(chosen.storage_options)
        except Exception as error:
            raise ConfigError(
                f"storage_options can't be sent to the agent ({type(error).__name__}: {error}): "
                f"give credentials as plain values or in the environment, or choose agent='thread'"
            ) from None


@dataclass(slots=True)
class _DcpSave:
    """The save that DCP is in the middle of."""

    context: SaveContext
    manifest: Manifest | None = None


def _opened_together(ranks: Ranks, opened: Attempted[Session]) -> Session:
    """Return this rank's session once all ranks have one.

    Later errors travel with the exchanges of the save.
    """
    if not ranks.is_connected:
        return on_all_ranks(ranks, "opening the job's memory", lambda: opened.value)
    if opened.error is not None:
        ranks.leave(described(opened.error))
    return opened.value


def _leave(context: SaveContext, error: BaseException) -> None:
    """Part from the other ranks: wherever they are, they must not wait for this one."""
    context.ranks.leave(f"{type(error).__name__}: {error}")


def _lazy_metadata(context: SaveContext, manifest: Manifest) -> Metadata:
    """Return the metadata of a complete checkpoint; the catalog stays mapped while it is in use."""
    data = context.session.catalogs.find(manifest.catalog) or b""
    return LazyMetadata(
        lambda: metadata_of(Catalog.from_bytes(data), manifest.save_id, manifest.tails)
    )


def _fill_in(metadata: Metadata, results: Sequence[Sequence[WriteResult]], save_id: str) -> None:
    """Add to DCP's metadata where each item lies."""
    storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
    finished = with_storage(metadata, storage_data, save_id)
    metadata.storage_data, metadata.storage_meta = finished.storage_data, finished.storage_meta
    if hasattr(metadata, "version"):
        metadata.version = finished.version


def _future(results: Sequence[WriteResult]) -> Future[list[WriteResult]]:
    """Return a future that is done. DCP iterates over the results, and pickles them."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(cast("list[WriteResult]", results))
    return future
