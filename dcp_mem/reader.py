"""`MemoryStorageReader`: DCP's storage reader for checkpoints in memory and on storage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import Unpack

from dcp_mem.comm.agreement import attempt, is_of_one_call, leaving_on_error, was_voted_on
from dcp_mem.comm.bridge import SWITCH, torch_plans
from dcp_mem.comm.bridge.calls import (
    DcpCall,
    dcp_call,
    direct_call,
    is_called_by_dcp,
    planning_call,
)
from dcp_mem.common.arguments import takes
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log, log_once
from dcp_mem.config import Settings, checkpoint_name
from dcp_mem.errors import (
    ConfigError,
    DcpMemError,
    NoRecoverableCheckpoint,
    SegmentCorrupt,
    picklable,
)
from dcp_mem.loading.dcp_takeover import (
    guard_planner,
    take_over,
    taken_over,
    why_not_own_plan,
)
from dcp_mem.loading.find import elect_together, open_newest
from dcp_mem.loading.finish import RecoveryReport
from dcp_mem.loading.load import load_opened
from dcp_mem.loading.load_attempt import LoadAttempt, LoadRequest, Places
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.plan import plan_together
from dcp_mem.memory.job import JobMemory
from dcp_mem.options import DEFAULTS, PlaceOptions, ReaderOptions, of_kind, settings
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import Reads
from dcp_mem.policy.election import RecoveryPlan
from dcp_mem.runtime import states
from dcp_mem.saving.overlap import wait_for_copies
from dcp_mem.storage.routes import storage_of


@takes(ReaderOptions, DEFAULTS)
class MemoryStorageReader(StorageReader):
    """DCP's storage reader for what `MemoryStorageWriter` or torch's own writers have saved.

    Each segment comes from the nearest place that has it: this node's memory, other nodes' memory,
    storage. `dcp.load` without a checkpoint id loads the newest checkpoint that can be proved
    whole; with one, that checkpoint. All ranks take the same checkpoint, or raise alike.

    What torch's FileSystemWriter or FsspecWriter wrote under `path` is loaded, too. Metadata is
    unpickled restrictedly: a pickle that holds anything else is refused.

    Args:
        path: The job's root on storage, an fsspec URL or a plain path; None for memory alone.
        **options: As in `ReaderOptions`.

    Raises:
        ConfigError: Arguments that can't work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        super().__init__()
        self.settings = settings(path, **of_kind(PlaceOptions, options))
        self._verify = options.get("verify", True)
        self._across_nodes = options.get("broadcast", False)
        self._leaves_record = options.get("record", True)
        self._process_group = options.get("process_group")
        self._id: str | os.PathLike[str] | None = None
        self._load: LoadAttempt | None = None
        self._opened: OpenCheckpoint | None = None
        self._failure: Exception | None = None
        self._report: RecoveryReport | None = None
        self._is_coordinator, self._is_closed = True, False
        self._weights_only = True  # As torch's readers have it, whatever a planner does.

    # -- DCP's contract, in the order of its calls -------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load of this checkpoint."""
        self._id = checkpoint_id

    # No **kwargs here: torch would take that for an offer to try again with a rank's own metadata,
    # which `open_newest` does by itself.
    @picklable
    def read_metadata(self) -> Metadata:
        """Open the checkpoint together with the other ranks; return DCP's metadata of it."""
        started = time.monotonic()
        asked_for = self._taken_id()
        self._begin()
        planning, takeover, why_not = planning_call(self), None, ""
        if planning is not None:
            # Until all ranks know whether all plan by themselves: one that fails leaves the others.
            planning.exchanges.only_errors()
            why_not = why_not_own_plan(planning.planner)
        try:
            call = dcp_call(self._process_group, self.settings.purpose("load"))
            if planning is not None and why_not:
                log_once(f"loads are left to torch's planner, which takes longer: {why_not}")
                guard_planner(planning, call.ranks, self._end_leases)
            elif planning is not None:
                takeover = take_over(planning)
            elif torch_plans():
                log_once(f"loads are planned by torch, which takes longer: {SWITCH} is set")
            with leaving_on_error(call.ranks), collector_paused():
                self._load = LoadAttempt(
                    self._request(
                        call,
                        asked_for,
                        started,
                        self._weights_only,
                        plans_itself=takeover is not None,
                    )
                )
                self._opened = open_newest(self._load)
        except (DcpMemError, OSError) as error:
            if not (is_called_by_dcp() or torch_plans()):
                raise
            # torch would bury the error in an AssertionError's text. What set_up_storage_reader,
            # its next call, raises reaches the caller as it is.
            self._failure = error
            if planning is not None and was_voted_on(error) and is_of_one_call(error):
                planning.exchanges.everything()
            return _no_metadata()
        all_plan = self._load.all_plan_themselves
        if planning is not None and not all_plan:
            planning.exchanges.everything()
        if takeover is None:
            return self._opened.metadata
        return takeover.begin(self._opened, call.ranks if all_plan else None)

    @picklable
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise what `read_metadata` had to keep for this call, if anything."""
        self._is_coordinator = is_coordinator
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return all ranks' plans as they are."""
        return plans

    @picklable
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part into the planner's tensors; the future is done on return."""
        self._read(*taken_over(plan, planner))
        return _completed()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this could be a checkpoint id: any text but ""."""
        return bool(os.fspath(checkpoint_id))

    # -- dcp_mem.load, without DCP's driver --------------------------------------------------------

    def _load_collectively(
        self,
        make_state: Callable[[], dict[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        planner: LocalLoadPlanner,
    ) -> dict[str, Any]:
        """Load by plans that each rank makes by itself, as `dcp_mem.load` says.

        1. Make the state dict. What is wrong in the call, all ranks hear in the next step; what an
           object's `state_dict` raises, as they plan: where nothing can be loaded, nothing is lost.
        2. Survey, elect, open.
        3. Plan; all ranks have a plan, or raise.
        4. Read, report, record.

        `checkpoint_id`: None for the newest. Returns what `make_state` returned, with the values
        loaded.
        """
        state = attempt(make_state)
        load, opened = self._open(
            checkpoint_id,
            process_group,
            no_dist,
            weights_only=planner.weights_only,
            refusal=state.error if isinstance(state.error, ConfigError) else None,
        )
        with leaving_on_error(load.ranks), collector_paused():
            try:
                plan = plan_together(
                    load.ranks,
                    opened,
                    planner,
                    lambda: state.value,
                    is_coordinator=self._is_coordinator,
                )
            except BaseException:
                self._end_leases()
                raise
        self._read(plan, planner)
        return state.value

    @contextmanager
    def _unpickling(self, *, weights_only: bool) -> Iterator[None]:
        """Unpickle tensors with these restrictions in the `dcp.load` inside.

        What DCP tells a reader of a load doesn't include what its caller said.
        """
        self._weights_only = weights_only
        try:
            yield
        finally:
            self._weights_only = True

    def _open(
        self,
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        *,
        weights_only: bool,
        refusal: Exception | None,
    ) -> tuple[LoadAttempt, OpenCheckpoint]:
        """Survey, elect, and open the newest checkpoint, or the one that was asked for."""
        started = time.monotonic()
        self._begin()
        group = process_group if process_group is not None else self._process_group
        call = direct_call(group, no_dist, self.settings.purpose("load"))
        self._is_coordinator = call.rank == 0
        with leaving_on_error(call.ranks), collector_paused():
            request = self._request(call, checkpoint_id, started, weights_only)
            self._load = LoadAttempt(replace(request, refusal=refusal or request.refusal))
            self._opened = open_newest(self._load)
            return self._load, self._opened

    # -- around the load ---------------------------------------------------------------------------

    def recoverable(self) -> list[str]:
        """Return the names of the checkpoints that all ranks together can load, newest first.

        Call it on all ranks.

        Raises:
            RankFailed: Another rank has failed.
        """
        return list(dict.fromkeys(choice.name for choice in self._elected().choices))

    def report(self) -> RecoveryReport:
        """Return what the last successful load took, from where, and what it passed over.

        Raises:
            ConfigError: Nothing has been loaded yet.
        """
        if self._report is None:
            raise ConfigError("nothing has been loaded through this reader yet")
        return self._report

    def close(self) -> None:
        """End the leases on what is open, so that memory may recycle it. Closing twice is fine.

        A load after that opens what it needs, with a warning.
        """
        self._end_leases()
        self._is_closed = True

    def _begin(self) -> None:
        self._end_leases()
        if self._is_closed:
            self._is_closed = False
            log.warning("job %s: a load after close()", self.settings.job)

    def _end_leases(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> MemoryStorageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        found, loaded = self._report, ""
        if found is not None:
            step = "" if found.step is None else f" (step {found.step})"
            loaded = f", loaded {found.checkpoint_id}{step} from {found.source}"
        return states.summary(self, self.settings, loaded)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open: another process opens its own."""
        return {**self.__dict__, "_load": None, "_opened": None, "_failure": None}

    # -- details -----------------------------------------------------------------------------------

    def _elected(self, wanted: str | None = None) -> RecoveryPlan:
        """Return what all ranks together can load, and why they can't load the rest.

        `wanted`: the only name to look for; None for all of them.
        """
        call = direct_call(self._process_group, False, self.settings.purpose("load"))
        with leaving_on_error(call.ranks):
            load = LoadAttempt(self._request(call, wanted, time.monotonic(), True))
            return elect_together(load, load.search)

    def _taken_id(self) -> str | os.PathLike[str] | None:
        """Return the id that `reset` was given; without another `reset`, the next load has none."""
        asked_for, self._id = self._id, None
        return asked_for

    def _request(
        self,
        call: DcpCall,
        asked_for: str | os.PathLike[str] | None,
        started: float,
        weights_only: bool,
        *,
        plans_itself: bool = False,
    ) -> LoadRequest:
        """Return what this load was asked for; an error goes with it, to be raised on all ranks."""
        wanted = attempt(partial(self._wanted, asked_for))
        places = attempt(self._places)
        return LoadRequest(
            settings=self.settings,
            ranks=call.ranks,
            rank=call.rank,
            wanted=None if wanted.error else wanted.value,
            places=Places(None, None, self.settings.job) if places.error else places.value,
            refusal=wanted.error or places.error,
            started=started,
            verify=self._verify,
            across_nodes=self._across_nodes,
            leaves_record=self._leaves_record,
            weights_only=weights_only,
            plans_itself=plans_itself,
        )

    def _wanted(self, asked_for: str | os.PathLike[str] | None) -> str | None:
        return None if asked_for is None else checkpoint_name(self.settings.url, asked_for)

    def _places(self) -> Places:
        chosen = self.settings
        # Checkpoints that somebody has copied here have no slots beside them.
        has_memory = os.path.isdir(os.path.join(chosen.memory_root, chosen.job))
        memory = JobMemory(chosen.memory_root, chosen.job) if has_memory else None
        return Places(memory, storage_of(chosen), chosen.job)

    def _read(self, plan: LoadPlan | Reads, planner: LoadPlanner) -> None:
        load, opened, self._opened = self._load, self._opened, None
        if load is None or opened is None:
            raise ConfigError(
                "DCP calls read_metadata before this: drive the reader through dcp.load"
            )
        with leaving_on_error(load.ranks):
            try:
                wait_for_copies()  # of a save: they may be of what is loaded into
            except BaseException:
                opened.close()
                raise
            self._report = load_opened(
                load, opened, plan, planner, is_coordinator=self._is_coordinator
            )


def reader_of(chosen: Settings, process_group: dist.ProcessGroup | None) -> MemoryStorageReader:
    """Return a reader of the job that a writer's settings name."""
    return MemoryStorageReader(
        chosen.url,
        memory_root=chosen.memory_root,
        job=chosen.job,
        storage_options=chosen.storage_options,
        transport=chosen.transport,
        process_group=process_group,
    )


def _no_metadata() -> Metadata:
    return Metadata(
        state_dict_metadata={}, planner_data={}, storage_data={}, storage_meta=StorageMeta()
    )


def _completed() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


__all__ = ["MemoryStorageReader", "NoRecoverableCheckpoint", "RecoveryReport", "SegmentCorrupt"]
