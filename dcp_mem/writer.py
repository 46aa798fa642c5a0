"""`MemoryStorageWriter`: DCP's storage writer, whose `write_data` returns when the checkpoint is complete in memory."""

from __future__ import annotations

import operator
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_mem import faults, watch
from dcp_mem.agent import AgentHandle
from dcp_mem.bar import progress_bar
from dcp_mem.config import (
    Parity,
    Settings,
    checked_metrics,
    checked_step,
    checkpoint_name,
    run_identity,
    settings,
)
from dcp_mem.dcp_call import DcpCall, dcp_call, direct_call, global_metadata
from dcp_mem.errors import ConfigError, RankFailed, picklable
from dcp_mem.flushing.flusher import registration_of
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.described import metadata_of
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import LazyMetadata, with_storage
from dcp_mem.heap import collector_paused
from dcp_mem.memory.locks import RunIdentity, job_is_live, new_token
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.retention import Retention
from dcp_mem.prepare import Preparation, prepare
from dcp_mem.ranks import Alone, run_token
from dcp_mem.saving.agree import NoCommonPlan, agree, keep_no_more
from dcp_mem.saving.behind import go_on_behind, publish_again
from dcp_mem.saving.collective import collective_of
from dcp_mem.saving.complete import complete
from dcp_mem.saving.plan import plan_segment
from dcp_mem.saving.stage import Results, stage
from dcp_mem.saving.streams import DescribingStreams, Streams
from dcp_mem.saving.structures import Structures
from dcp_mem.saving.values import Caller, Planned
from dcp_mem.session import Session, close_session, open_session, session_for
from dcp_mem.values import About, CheckpointStatus

T = TypeVar("T")


class MemoryStorageWriter(StorageWriter):
    """Saves checkpoints into node memory (tmpfs) and has them flushed to storage behind the training loop.

    `dcp.save` returns when every rank's segment and the metadata lie in the memory of every node: from then on the
    checkpoint survives the death of every trainer process. An agent, a process of its own, takes it to storage.

    path: the job's root on storage, an fsspec URL or a plain path; None keeps checkpoints in memory only.
    memory: the memory root (default $DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>).
    job: name of the job's memory directory; by default from path, else from TORCHELASTIC_RUN_ID or SLURM_JOB_ID.
    persist: True, False, every(n) or interval(seconds): which saves go to storage; the coordinator decides.
    keep: complete checkpoints that stay in memory: a number, or a policy of `keep_last`, `keep_best`, `any_of`. One more is
    staged beside them.
    keep_storage: the same on storage, where `keep_every` may be one of them; None keeps all. Applied after each commit, to what
    dcp_mem wrote under path; never to the newest checkpoint, nor to one that is being read.
    replicas: copies of each segment in other nodes' memory, made behind training; default DCP_MEM_REPLICAS, else 0. Where there
    are fewer other nodes, as many as there are.
    redundancy: parity(k) instead of replicas: parity over groups of k + 1 nodes, from which any one node of a group comes back,
    at 1/k of the memory of a copy.
    failure_domain: what fails together with this node (a rack, say), as a text or a callable that returns one; default
    DCP_MEM_FAILURE_DOMAIN, else the node alone. Copies go to other domains where there are any.
    on_replication: what a save does while an older checkpoint's copies are still under way: "wait" for them, "skip" its own, or
    "overtake" them; the same on all ranks.
    memory_limit: bytes (or "64GiB") that the job may occupy on a node; default DCP_MEM_MEMORY_LIMIT, else keep + 1 checkpoints,
    with the copies that come to the node.
    on_full: "wait" for the flush to free a slot, "skip" the save, or "raise" MemoryBudgetExceeded; the same on all ranks.
    Where no flush could free any, "wait" raises too.
    storage_options: passed to fsspec as they are. They reach the agent over a pipe, and are never written down.
    overwrite: False refuses a checkpoint id that is there already.
    agent: "process", or "thread" for platforms that allow no second process and for file systems that live in one.
    upload_limit: bytes (or "200MiB") per second that a node sends of this job; default DCP_MEM_UPLOAD_LIMIT, else no limit.
    process_group: the ranks that save together; by default those of the dcp.save call.

    Raises ConfigError for arguments that can't work, before anything is saved.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        memory: str | os.PathLike[str] | None = None,
        job: str | None = None,
        persist: bool | Persist = True,
        replicas: int | None = None,
        redundancy: Parity | None = None,
        failure_domain: str | Callable[[], str] | None = None,
        on_replication: str = "wait",
        keep: int | Retention = 2,
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
            memory=memory,
            job=job,
            persist=persist,
            keep=keep,
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
        self._save: _Save | None = None
        self._about = About()
        self._last: tuple[Manifest, About] | None = None
        self._structures = Structures()
        self._agent = AgentHandle(self.settings.memory_root)

    # -- DCP's contract, in the order of its calls -------------------------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._name, self._refused = None, None
        try:
            self._name = None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
        except ConfigError as error:
            self._refused = error  # raised where DCP hands it to all ranks; it doesn't from here

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._name)

    @picklable
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        name = self._checked_name()
        call = dcp_call(self._process_group, f"save {self.settings.job}")
        caller = _caller(self.settings, self._open(), call, name, kwargs.get("use_collectives", True))
        self._save = _Save(replace(caller, about=self._taken_about()))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @picklable
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with collector_paused():
            return self._see(plans)

    def _see(self, plans: list[SavePlan]) -> list[SavePlan]:
        size = self._begun().caller.ranks.size
        if len(plans) != size:
            raise ConfigError(
                f"DCP plans for {len(plans)} ranks, the writer for {size}: pass the same process_group to both"
            )
        self._structures.see(plans, global_metadata())
        return plans

    @picklable
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with collector_paused():
            return _completed(self._write(plan, planner))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Sequence[WriteResult]:
        save = self._begun()
        planned = _result_or_error(lambda: plan_segment(save.caller, plan, planner))
        attempt = agree(save.caller, planned)
        if attempt is None:
            watch.record_skipped(save.caller, "memory was full")
            return []
        assert not isinstance(planned, Exception)  # agree has raised it
        staged = _result_or_error(lambda: stage(save.caller, attempt, planned))
        structures, saved, key = self._structures, save.caller.session.saved, save.caller.plan_key
        changed = structures.changed(planner, saved.get(key))
        manifest, staged = complete(save.caller, attempt, staged, structures.describing(planner), changed)
        structures.settle(planner, saved[key])
        save.manifest = manifest
        self._last = manifest, attempt.about
        go_on_behind(save.caller, attempt, staged, manifest)
        return Results(staged)

    @picklable
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with collector_paused():
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save, self._save, self._name = self._begun(), None, None
        if save.manifest is None:
            self._structures.release()
            return  # the save was skipped
        storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        finished = with_storage(metadata, storage_data, save.manifest.save_id)
        if not self._structures.is_published(metadata):
            publish_again(save.caller, save.manifest, metadata, results)
        metadata.storage_data, metadata.storage_meta = finished.storage_data, finished.storage_meta
        if hasattr(metadata, "version"):
            metadata.version = finished.version
        self._structures.release()
        faults.point("save.finished")

    # -- the road of dcp_mem.save ------------------------------------------------------------------------------------

    def save_collectively(
        self,
        make_state: Callable[[], Mapping[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> Metadata:
        """Save by a plan of dcp_mem's own; see `dcp_mem.save`. make_state: gives the state dict, and may raise.

        Raises NoCommonPlan, on all ranks and with nothing done, where the state dict needs DCP's planner.
        """
        caller = self._begin(checkpoint_id, process_group, no_dist)
        try:
            state = _result_or_error(make_state)
            with collector_paused():
                return self._save_by_own_plan(caller, state)
        except NoCommonPlan:
            self._about = caller.about  # of the save that DCP drives now
            raise
        except BaseException as error:
            # Wherever the others are, they must not wait for this one.
            caller.ranks.leave(f"{type(error).__name__}: {error}")
            raise

    def streams(self) -> Streams:
        """Room in memory for streams that are written one by one, and become a checkpoint with `save_streams`."""
        return Streams(session_for(self.settings, self._identity()).slots)

    def save_streams(
        self,
        make_streams: Callable[[], Streams],
        checkpoint_id: str | os.PathLike[str],
        *,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> Manifest | None:
        """Make a checkpoint of what the ranks have written into their streams; returns when it is complete in memory.

        Call it on all ranks; one that has written nothing takes part with empty ones. None where the save was skipped.
        Whatever comes of it, the streams are used up. make_streams: gives them, and may raise. Raises what `dcp_mem.save` raises.
        """
        caller = self._begin(checkpoint_id, process_group, no_dist)
        streams = _result_or_error(make_streams)
        try:
            return self._save_streams(caller, streams)
        except BaseException as error:
            caller.ranks.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            if isinstance(streams, Streams):
                streams.close()

    def _begin(
        self, checkpoint_id: str | os.PathLike[str] | None, process_group: dist.ProcessGroup | None, no_dist: bool
    ) -> Caller:
        self.reset(checkpoint_id)
        group = process_group if process_group is not None else self._process_group
        opened = _result_or_error(self._open)
        try:
            call = direct_call(group, no_dist, f"save {self.settings.job}")
        except RankFailed:
            if isinstance(opened, Exception):
                raise opened from None
            raise
        return self._begin_together(call, opened)

    def _begin_together(self, call: DcpCall, opened: Session | Exception) -> Caller:
        """Begin where all ranks have opened their session; later errors travel with the exchanges of the save."""
        if not call.ranks.is_connected:
            text = "" if isinstance(opened, Session) else f"{type(opened).__name__}: {opened}"
            failures = call.ranks.all_reduce({call.ranks.rank: text} if text else {}, operator.or_)
            if failures and isinstance(opened, Session):
                raise RankFailed("opening the job's memory", sorted(failures.items()))
        elif not isinstance(opened, Session):
            call.ranks.leave(f"{type(opened).__name__}: {opened}")
        if not isinstance(opened, Session):
            raise opened
        caller = Caller(self.settings, opened, call.ranks, call.rank, names.COLLECTIVE, self._checked_name())
        return replace(caller, about=self._taken_about())

    def _taken_about(self) -> About:
        about, self._about, self._last = self._about, About(), None
        return about

    def _checked_name(self) -> str:
        """What to save under. Raises ConfigError where that is missing, or no name."""
        if self._refused is not None:
            raise self._refused
        if self._name is None:
            raise ConfigError(
                "pass checkpoint_id= to dcp.save or dcp_mem.save: path= of the writer is the root of all checkpoints of a job"
            )
        return self._name

    def _open(self) -> Session:
        self._checked_name()
        session = session_for(self.settings, self._identity())
        session.give_back_heap()
        return session

    def _save_by_own_plan(self, caller: Caller, state: Mapping[str, Any] | Exception) -> Metadata:
        collective = collective_of(caller.session)
        is_new, wanted = False, ""
        while True:
            planned = _result_or_error(partial(collective.plan, caller, state, wanted))
            try:
                attempt = agree(caller, planned)
                break
            except NoCommonPlan as reason:
                if reason.why_not:
                    raise
                if is_new:
                    raise NoCommonPlan("a structure that is another each time it is looked at") from None
                wanted = "" if wanted else reason.in_common
            if not wanted:
                collective.plan_together(caller)
                is_new = True
        if attempt is None:
            watch.record_skipped(caller, "memory was full")
            return Metadata({})
        assert isinstance(planned, Planned)  # agree has raised what else there may be
        caller = replace(caller, plan_id=planned.plan_id)
        staged = _result_or_error(lambda: stage(caller, attempt, planned))
        manifest, staged = complete(caller, attempt, staged, collective.describing(planned.plan_id), is_new)
        self._last = manifest, attempt.about
        go_on_behind(caller, attempt, staged, manifest)
        faults.point("save.finished")
        data = caller.session.catalogs.find(manifest.catalog) or b""  # mapped for as long as somebody may look at it
        return LazyMetadata(lambda: metadata_of(Catalog.from_bytes(data), manifest.save_id, manifest.tails))

    def _save_streams(self, caller: Caller, streams: Streams | Exception) -> Manifest | None:
        planned = streams if isinstance(streams, Exception) else streams.planned(caller)
        attempt = agree(caller, planned)
        if attempt is None:
            watch.record_skipped(caller, "memory was full")
            return None
        assert isinstance(planned, Planned)  # agree has raised what else there may be
        assert isinstance(streams, Streams)
        caller = replace(caller, plan_id=planned.plan_id)
        staged = _result_or_error(lambda: streams.stage(caller, attempt, planned))
        manifest, staged = complete(caller, attempt, staged, DescribingStreams(), False)
        self._last = manifest, attempt.about
        go_on_behind(caller, attempt, staged, manifest)
        faults.point("save.finished")
        return manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    # -- around the saves --------------------------------------------------------------------------------------------

    def tell(self, *, step: int | None = None, metrics: Mapping[str, Any] | None = None, persist: bool = False) -> None:
        """Say of the next save which step it is of, how good it is, and that storage is to have it whatever the policy says.

        Rank 0's word counts. step and metrics are kept with the checkpoint, for retention and listings. metrics: real numbers, or
        tensors of one. Raises ConfigError.
        """
        self.announce(About(checked_step(step), checked_metrics(metrics), bool(persist)))

    def announce(self, about: About) -> None:
        """The same, of what has been checked."""
        self._about = about

    @property
    def last_save(self) -> tuple[Manifest, About] | None:
        """What the last save made, and what its coordinator said of it; None where it was skipped or failed."""
        return self._last

    def prepare(self, state_dict: dict[str, Any], planner: SavePlanner | None = None) -> Preparation:
        """Lay out and prefault slots for this state in the background, so that the first save costs what later ones do.

        Call it on all ranks, with the state (and the planner, if it is not torch's default) that dcp.save will get.
        Returns at once; `.wait()` on the result waits until the slots are ready.
        """
        call = dcp_call(self._process_group, f"save {self.settings.job}")
        session = session_for(self.settings, self._identity())
        caller = Caller(self.settings, session, call.ranks, call.rank, names.COLLECTIVE, "")
        return prepare(caller, state_dict, planner or DefaultSavePlanner())

    def wait(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        state: str = "durable",
        timeout: float | None = None,
        *,
        progress: bool = False,
    ) -> None:
        """Wait until a checkpoint reaches a state: "complete", "replicated" or "durable".

        checkpoint_id: by default the newest one, or the newest that is meant for storage. timeout: seconds; None waits for as
        long as there is hope. progress: show how far it is, on stderr if that is a terminal. Raises WaitTimeout; FlushFailed
        where storage refused it, or it left memory before it was durable; ReplicationFailed where it gets no copies;
        CheckpointNotFound where nobody knows it.
        """
        name = None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
        with progress_bar(progress) as show:
            watch.wait(self.settings, name, state, timeout, self.wake_agent, show)

    def status(self) -> list[CheckpointStatus]:
        """Every known checkpoint of this job on this node, newest first: state, sizes, times and the last error."""
        return watch.status(self.settings)

    @property
    def agent_log(self) -> str:
        """Where this node's agent writes what it does."""
        return watch.agent_log(self.settings)

    def close(self, flush: bool = True, *, progress: bool = False) -> None:
        """Wait until everything that is meant for storage is durable (flush=True), then give back slots and mappings.

        What `keep` keeps stays in memory, for a restart. Without flush, the agent goes on flushing by itself. progress: show
        how far it is, on stderr if that is a terminal. Raises FlushFailed where storage refuses; the checkpoints then stay in
        memory. Closing twice is fine.
        """
        try:
            own_thread = self.settings.agent == "thread" and open_session(self.settings) is None
            if flush and self.settings.url is not None and not own_thread:
                with progress_bar(progress) as show:
                    watch.wait_for_all(self.settings, self.wake_agent, show)
            self._apply_retention()
        finally:
            close_session(self.settings, drop_free=True)

    def _apply_retention(self) -> None:
        session = open_session(self.settings)
        if session is not None:  # the last save left alone what was being flushed
            session.replicator.wait()
            for scope in {held.manifest.scope for held in session.memory.held()}:
                keep_no_more(session.memory, scope, self.settings.keep_memory, bool(self.settings.redundancy))

    def __enter__(self) -> MemoryStorageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(flush=kind is None)

    def __getstate__(self) -> dict[str, Any]:
        # For async_save's process executor: the copy opens a session of its own, and finds its group by itself. But it
        # belongs to this run, which its own environment and store would give another name.
        state = {**self.__dict__, "_save": None, "_last": None, "_process_group": None, "_structures": Structures()}
        return {**state, "_run": self._identity().run}

    def _identity(self) -> RunIdentity:
        return RunIdentity(self._run or run_identity() or run_token(), self._token)

    def _begun(self) -> _Save:
        if self._save is None:
            raise ConfigError("DCP calls set_up_storage_writer before this: drive the writer through dcp.save")
        return self._save

    def wake_agent(self, now: bool = False) -> None:
        """Have the agent look at what is pending. now: failed flushes are tried again at once."""
        session = open_session(self.settings)
        if session is not None:
            session.wake_agent(self.settings, now=now)
        elif self.settings.agent == "process" and self.settings.url is not None:
            # The saves are made elsewhere: async_save's process executor.
            self._agent.wake(registration_of(self.settings, now=now))
        elif not job_is_live(os.path.join(self.settings.memory_root, self.settings.job)):
            # Whoever saved it is gone, and its flush thread with it.
            session_for(self.settings, self._identity()).wake_agent(self.settings, now=now)


def _check_that_the_agent_gets(chosen: Settings) -> None:
    """Raise ConfigError for storage options that can't be sent to another process."""
    if chosen.agent == "process" and chosen.url is not None:
        try:
            pickle.dumps(chosen.storage_options)
        except Exception as error:
            raise ConfigError(
                f"storage_options can't be sent to the agent ({type(error).__name__}: {error}): give credentials as plain "
                f"values or in the environment, or choose agent='thread'"
            ) from None


class _Save:
    """The save that DCP is in the middle of."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.manifest: Manifest | None = None


def _caller(chosen: Settings, session: Session, call: DcpCall, name: str, use_collectives: bool) -> Caller:
    if use_collectives:
        return Caller(chosen, session, call.ranks, call.rank, names.COLLECTIVE, name)
    return Caller(chosen, session, Alone(), call.rank, names.rank_scope(call.rank), name)


def _result_or_error(act: Callable[[], T]) -> T | Exception:
    """What `act` returns, or raises: an error travels with the next exchange, since the other ranks wait for one."""
    try:
        return act()
    except Exception as error:
        return error


def _completed(results: Sequence[WriteResult]) -> Future[list[WriteResult]]:
    future: Future[list[WriteResult]] = Future()
    future.set_result(cast("list[WriteResult]", results))  # DCP goes through them, and pickles them
    return future
