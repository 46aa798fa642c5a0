"""`MemoryStorageReader`: DCP's storage reader, which loads the newest checkpoint that can be proved whole."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_mem.config import checkpoint_name, settings
from dcp_mem.dcp_call import DcpCall, dcp_call, direct_call, is_called_by_dcp
from dcp_mem.errors import ConfigError, DcpMemError, NoRecoverableCheckpoint, RankFailed, SegmentCorrupt, picklable
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.recoveries import RecoveryRecord
from dcp_mem.heap import collector_paused
from dcp_mem.memory.job import JobMemory
from dcp_mem.mending import bring_back, restore_redundancy
from dcp_mem.planning.load import LocalLoadPlanner
from dcp_mem.planning.reads import Reads
from dcp_mem.ranks import Alone, Ranks
from dcp_mem.reading.read import read_items
from dcp_mem.reading.recorded import leave_record
from dcp_mem.reading.together import Company
from dcp_mem.recover import Damage, Opened, Origin, Recovery, open_next, recover, survey, without
from dcp_mem.sources.base import Failures
from dcp_mem.sources.elsewhere import PEERS
from dcp_mem.sources.memory import MemorySource
from dcp_mem.storage.routes import open_storage


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a load did, on all ranks together.

    source: "memory" (of the rank's own node), "peers" (other nodes' memory), "storage", or several of them with "and".
    passed_over: candidates not taken, and why. step: of which training step the checkpoint is, where the writer was told.
    sources: bytes that ranks took, by "memory", "peers" and "storage"; what several ranks need counts for each.
    """

    checkpoint_id: str
    save_id: str
    source: str
    passed_over: tuple[str, ...]
    seconds: float
    step: int | None = None
    sources: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that ranks took, all together."""
        return sum(self.sources.values())


class MemoryStorageReader(StorageReader):
    """Loads checkpoints from the nearest place that has each segment: this node's memory, other nodes' memory, storage.

    `dcp.load` without a checkpoint id loads the newest checkpoint that can be proved whole; with one, that checkpoint or
    an error that lists what there is. The arguments are those of `MemoryStorageWriter`; verify=False skips the checksums of
    what is read from storage, or was copied between nodes; broadcast=True has nodes pass on to each other what several of
    them need of storage, which gives each byte once then (otherwise once for each node). record=False leaves no line of the
    load in `recoveries.jsonl`, for whoever only looks. All ranks take the same checkpoint, or raise alike.

    It also loads what torch's own FileSystemWriter or FsspecWriter wrote under `path`. Metadata is unpickled restrictedly:
    a pickle that holds anything else is refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        memory: str | os.PathLike[str] | None = None,
        job: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        broadcast: bool = False,
        record: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings(path, memory=memory, job=job, storage_options=storage_options)
        self._verify = verify
        self._broadcast = broadcast
        self._records = record
        self._process_group = process_group
        self._id: str | os.PathLike[str] | None = None
        self._recovery: Recovery | None = None
        self._opened: Opened | None = None
        self._failure: Exception | None = None
        self._report: RecoveryReport | None = None
        self._started = 0.0
        self._is_coordinator = True

    # -- DCP's contract, in the order of its calls -------------------------------------------------------------------

    @picklable
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = checkpoint_id

    # No **kwargs here: torch would take that for an offer to try again with a rank, which `recover` does by itself.
    @picklable
    def read_metadata(self) -> Metadata:
        self._started = time.monotonic()
        self.close()
        call = dcp_call(self._process_group, f"load {self.settings.job}")
        try:
            self._recovery = self._begin(call)
            with collector_paused():
                self._opened = recover(self._recovery)
        except (DcpMemError, OSError) as error:
            if not is_called_by_dcp():
                raise
            # torch would bury it in an AssertionError's text; set_up_storage_reader, its next call, raises it as it is.
            self._failure = error
            return Metadata(state_dict_metadata={}, planner_data={}, storage_data={}, storage_meta=StorageMeta())
        return self._opened.metadata

    @picklable
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @picklable
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._read_all(plan, planner)
        return _completed()

    def _read_all(self, plan: LoadPlan | Reads, planner: LoadPlanner) -> None:
        if self._recovery is None or self._opened is None:
            raise ConfigError("DCP calls read_metadata before this: drive the reader through dcp.load")
        recovery, opened, used = self._recovery, self._opened, Counter[str]()
        try:
            while True:
                used, failure = self._read(opened, plan, planner, _company(recovery))
                told = recovery.ranks.exchange((_text(failure), _damage_in_memory(recovery, opened, failure)))
                failures = [(rank, text) for rank, (text, _) in enumerate(told) if text]
                if not failures:
                    break
                recovery.reasons.append(f"{opened.choice.name}: {failures[0][1]}")
                damage = {one for _, one in told if one is not None}
                opened, plan = self._next(recovery, opened, plan, planner, failure, failures, damage)
        finally:
            self.close()
        self._report, recorder = self._reported(recovery, opened, used)
        if self._records and recovery.ranks.rank == recorder:
            self._leave_record(recovery, self._report)
        restore_redundancy(self.settings, recovery, opened.choice)
        log.info("loaded %s from %s in %.2f s", opened.choice.name, self._report.source, self._report.seconds)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    # -- the road of dcp_mem.load ------------------------------------------------------------------------------------

    def load_collectively(
        self,
        make_state: Callable[[], dict[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        planner: LocalLoadPlanner,
    ) -> dict[str, Any]:
        """Load by plans that each rank makes by itself; see `dcp_mem.load`. All ranks raise, or none does.

        make_state: gives the state dict, and may raise; what it gave is loaded into, and returned.
        """
        try:
            state: dict[str, Any] | Exception = make_state()
        except Exception as error:  # it travels with the exchange after planning
            state = error
        self.reset(checkpoint_id)
        self._started = time.monotonic()
        self.close()
        group = process_group if process_group is not None else self._process_group
        call = direct_call(group, no_dist, f"load {self.settings.job}")
        self._recovery = recovery = self._begin(call)
        self._is_coordinator = call.rank == 0
        with collector_paused():
            self._opened = opened = recover(recovery)
            try:
                plan, trouble = _plan(planner, state, opened, self._is_coordinator)
                self._raise_together(recovery, f"planning the load of {opened.choice.name}", trouble)
                assert not isinstance(state, Exception)
            except BaseException:
                self.close()
                raise
        assert plan is not None
        self._read_all(plan, planner)
        return state

    # -- around the load ---------------------------------------------------------------------------------------------

    def recoverable(self) -> list[str]:
        """Names of the checkpoints that can be loaded, newest first, as all ranks find it together. Call it on all of them."""
        call = direct_call(self._process_group, False, f"load {self.settings.job}")
        self._id = None
        return list(dict.fromkeys(choice.name for choice in survey(self._begin(call)).choices))

    def report(self) -> RecoveryReport:
        """What the last successful load took, from where, and what it passed over. Raises ConfigError before one."""
        if self._report is None:
            raise ConfigError("nothing has been loaded through this reader yet")
        return self._report

    def close(self) -> None:
        """End the leases on what is open, so that memory may recycle it. Closing twice is fine."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> MemoryStorageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, call: DcpCall) -> Recovery:
        asked_for, self._id = self._id, None
        origin = Origin(None, None, self.settings.job)
        recovery = Recovery(origin, call.ranks, call.rank, None, bring_back=partial(bring_back, self.settings))
        try:
            recovery.wanted = None if asked_for is None else checkpoint_name(self.settings.url, asked_for)
            recovery.origin = self._origin()
        except Exception as error:  # raised by `recover`, on all ranks: the others wait for this one
            recovery.refused = error
        return recovery

    def _origin(self) -> Origin:
        chosen = self.settings
        has_memory = os.path.isdir(os.path.join(chosen.memory_root, chosen.job))
        memory = JobMemory(chosen.memory_root, chosen.job) if has_memory else None
        storage = open_storage(chosen.url, chosen.storage_options) if chosen.url is not None else None
        return Origin(memory, storage, chosen.job)

    def _read(
        self, opened: Opened, plan: LoadPlan | Reads, planner: LoadPlanner, ranks: Ranks
    ) -> tuple[Counter[str], Exception | None]:
        company = Company(ranks, self.settings.memory_root, across_nodes=self._broadcast)
        try:
            with collector_paused():
                return read_items(opened, plan, planner, company, verify=self._verify), None
        except Exception as error:  # it travels with the next exchange: the other ranks wait for one
            return Counter(), error

    def _next(
        self,
        recovery: Recovery,
        opened: Opened,
        plan: LoadPlan | Reads,
        planner: LoadPlanner,
        failure: Exception | None,
        failures: list[tuple[int, str]],
        damage: Collection[Damage],
    ) -> tuple[Opened, LoadPlan | Reads]:
        """Go on without what turned out to be damaged: with another copy of it, else with the next older checkpoint."""
        may_be_older = recovery.wanted is None and _plans_alone(planner)
        if not all(text.startswith(_DAMAGE) for _, text in failures) or not (damage or may_be_older):
            raise failure or RankFailed(f"loading {opened.choice.name}", failures)
        opened.close()
        try:
            self._opened = found = without(recovery, damage) if damage else open_next(recovery)
        except NoRecoverableCheckpoint:
            if may_be_older:
                raise
            raise failure or RankFailed(f"loading {opened.choice.name}", failures) from None
        if (found.choice.name, found.choice.save_id) == (opened.choice.name, opened.choice.save_id):
            log.warning("%s is damaged (%s); loading it from elsewhere", opened.choice.name, failures[0][1])
            return found, plan
        if not may_be_older:
            raise failure or RankFailed(f"loading {opened.choice.name}", failures)
        log.warning("%s is damaged (%s); loading %s", opened.choice.name, failures[0][1], found.choice.name)
        older_plan, trouble = _plan_again(planner, found, self._is_coordinator)
        self._raise_together(recovery, f"planning the load of {found.choice.name}", trouble)
        assert older_plan is not None
        return found, older_plan

    def _raise_together(self, recovery: Recovery, what: str, trouble: Exception | None) -> None:
        troubles = [(rank, text) for rank, text in enumerate(recovery.ranks.exchange(_text(trouble))) if text]
        if trouble is not None:
            raise trouble
        if troubles:
            raise RankFailed(what, troubles)

    def _reported(self, recovery: Recovery, opened: Opened, used: Counter[str]) -> tuple[RecoveryReport, int]:
        """The report, and the rank that leaves a record of it: one whose node has memory of the job, where there is any."""
        told = recovery.ranks.exchange((used, recovery.origin.memory is not None))
        everywhere: Counter[str] = Counter()
        for of_rank, _ in told:
            for label, nbytes in of_rank.items():
                everywhere[label if label in (MemorySource.label, PEERS) else _STORAGE] += nbytes
        sources = {kind: everywhere[kind] for kind in (MemorySource.label, PEERS, _STORAGE) if kind in everywhere}
        source = " and ".join(sources) or ("memory" if opened.choice.memory else "storage")
        report = RecoveryReport(
            opened.choice.name,
            opened.choice.save_id,
            source,
            tuple(recovery.reasons),
            time.monotonic() - self._started,
            opened.description.step,
            sources,
        )
        return report, next((rank for rank, (_, has_memory) in enumerate(told) if has_memory), 0)

    def _leave_record(self, recovery: Recovery, report: RecoveryReport) -> None:
        is_one_of_many = isinstance(recovery.ranks, Alone) and dist.is_initialized() and dist.get_rank() > 0
        if is_one_of_many:
            return  # each rank loads for itself, and rank 0 tells
        record = RecoveryRecord(
            uuid.uuid4().hex[:12],
            time.time(),
            report.checkpoint_id,
            report.save_id,
            report.step,
            report.seconds,
            report.sources,
            report.passed_over,
            recovery.ranks.size,
        )
        leave_record(record, recovery.origin.memory, None if recovery.silence else recovery.origin.storage)


_STORAGE = "storage"
_DAMAGE = "damaged: "


def _text(failure: Exception | None) -> str:
    if failure is None:
        return ""
    kind = _DAMAGE if isinstance(failure, Failures) else f"{type(failure).__name__}: "
    return f"{kind}{failure}"


def _damage_in_memory(recovery: Recovery, opened: Opened, failure: Exception | None) -> Damage | None:
    """What of a checkpoint that several nodes hold together this node can't be asked for any more."""
    memory = recovery.origin.memory
    is_of_memory = isinstance(failure, SegmentCorrupt) and failure.source == MemorySource.label
    if not is_of_memory or memory is None or opened.choice.holders is None:
        return None
    assert isinstance(failure, SegmentCorrupt)
    known = (opened.choice.save_id, failure.rank) in recovery.damaged
    return None if known else (memory.node, opened.choice.save_id, failure.rank)


def _company(recovery: Recovery) -> Ranks:
    """Who may read together: not ranks that saved alone, who load a checkpoint of their own each."""
    return recovery.ranks if recovery.scope == names.COLLECTIVE else Alone()


def _plans_alone(planner: LoadPlanner) -> bool:
    """Whether a rank may plan again by itself: torch's default planner exchanges nothing in its global plan."""
    default: Callable[..., Any] = DefaultLoadPlanner.create_global_plan
    return isinstance(planner, DefaultLoadPlanner) and type(planner).create_global_plan is default


def _plan_again(
    planner: LoadPlanner, opened: Opened, is_coordinator: bool
) -> tuple[LoadPlan | Reads | None, Exception | None]:
    assert isinstance(planner, DefaultLoadPlanner)
    state = planner.original_state_dict
    if hasattr(planner, "keys"):  # torch's planner that fills an empty state dict from the metadata
        state.clear()
    return _plan(planner, state, opened, is_coordinator)


def _plan(
    planner: DefaultLoadPlanner, state: dict[str, Any] | Exception, opened: Opened, is_coordinator: bool
) -> tuple[LoadPlan | Reads | None, Exception | None]:
    """This rank's plan, or why there is none: an error travels with the next exchange."""
    try:
        if isinstance(state, Exception):
            raise state
        reads = _plan_by_catalog(planner, state, opened)
        if reads is not None:
            return reads, None
        planner.set_up_planner(state, opened.metadata, is_coordinator)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        return planner.finish_plan(plan), None
    except Exception as error:
        return None, error


def _plan_by_catalog(planner: DefaultLoadPlanner, state: dict[str, Any], opened: Opened) -> Reads | None:
    catalog = opened.description.catalog
    if catalog is None or not isinstance(planner, LocalLoadPlanner):
        return None
    return planner.plan(state, catalog, opened.description.save_id, opened.description.tails)


def _completed() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


__all__ = ["MemoryStorageReader", "NoRecoverableCheckpoint", "RecoveryReport", "SegmentCorrupt"]
