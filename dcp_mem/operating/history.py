"""What became of a job's checkpoints, and its loads: from the histories in this node's memory and on storage, joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from dcp_mem.config import Settings
from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import histories
from dcp_mem.format.histories import Line, line_of
from dcp_mem.format.recoveries import RecoveryRecord, joined
from dcp_mem.memory.job import Held
from dcp_mem.memory.recoveries import recoveries_in
from dcp_mem.operating.inventory import job_memory
from dcp_mem.reading.recorded import recoveries_on
from dcp_mem.storage import Storage
from dcp_mem.storage.patient import PATIENCE, Patience
from dcp_mem.storage.routes import open_storage
from dcp_mem.values import HISTORIES

_MOST_RECOVERIES = 1_000
_LAST_MOMENT = 32_503_680_000.0  # the year 3000: what says later is damaged
_LARGEST = 1 << 63


class Fate(str, Enum):
    """What became of a checkpoint."""

    DURABLE = "durable"  # also where retention has taken it off storage since
    MEMORY = "memory only"
    WAITING = "on its way"
    SKIPPED = "skipped"
    FAILED = "failed"


_FATES = {"durable": Fate.DURABLE, "deleted": Fate.DURABLE, "evicted": Fate.MEMORY, "skipped": Fate.SKIPPED}


@dataclass(frozen=True, slots=True)
class Past:
    """A checkpoint, or a save that never began, and what became of it. is_held: it lies in this node's memory."""

    line: Line
    fate: Fate
    is_held: bool = False

    @property
    def flushed(self) -> tuple[float, float] | None:
        """When its flush began and ended, in seconds since the epoch; pauses between attempts are left out."""
        line = self.line
        return (line.durable - line.flush_seconds, line.durable) if self.fate is Fate.DURABLE and line.durable else None

    @property
    def throughput(self) -> float:
        """Bytes per second of the flush, of all nodes together; 0.0 where there was none."""
        is_known = self.flushed is not None and self.line.flush_seconds > 0
        return self.line.nbytes / self.line.flush_seconds if is_known else 0.0


@dataclass(frozen=True, slots=True)
class History:
    """checkpoints, recoveries: oldest first. troubles: why there may be more of them. has_memory: this node's was looked at."""

    job: str
    url: str | None
    checkpoints: tuple[Past, ...]
    recoveries: tuple[RecoveryRecord, ...]
    troubles: tuple[str, ...] = ()
    has_memory: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of a history. Times in seconds, sizes in bytes.

    first, last: when the first and the last thing happened, since the epoch. blocked_seconds: that saves kept training.
    blocked_share: of the time from the first to the last. flushed_nbytes: that reached storage. *_median: 0.0 where there is
    none.
    """

    saves: int
    durable: int
    memory_only: int
    waiting: int
    skipped: int
    failed: int
    recoveries: int
    first: float
    last: float
    blocked_seconds: float
    blocked_share: float
    blocked_median: float
    flushed_nbytes: int
    flush_median: float
    throughput_median: float
    retries: int
    recovery_seconds: float
    recovery_median: float


def history(settings: Settings, *, patience: Patience = PATIENCE) -> History:
    """All that is known of a job's past. Without a URL in the settings, storage isn't asked.

    Raises StorageUnavailable, StorageRefused, MemoryRootRefused, MemoryUnavailable.
    """
    memory = job_memory(settings)
    held = memory.held() if memory is not None else []
    lines = memory.history() if memory is not None else []
    recoveries = recoveries_in(memory) if memory is not None else []
    troubles = []
    if settings.url is not None:
        storage = open_storage(settings.url, settings.storage_options, patience)
        try:
            lines = [*_stored_lines(storage), *lines]
        except ManifestInvalid as error:
            troubles.append(f"{HISTORIES} in {settings.url} can't be read: {error}")
        recoveries = joined(recoveries_on(storage), recoveries, most=_MOST_RECOVERIES)
    checkpoints = sorted(_joined(lines, held), key=lambda one: (one.line.created, one.line.name))
    sane = [one for one in recoveries if 0 < one.time < _LAST_MOMENT]
    return History(
        settings.job, settings.url, tuple(checkpoints), tuple(sane), tuple(troubles), has_memory=memory is not None
    )


def totals(history: History) -> Totals:
    """The sums of a history; zeros where it is empty."""
    checkpoints, recoveries = history.checkpoints, history.recoveries
    saves = [one for one in checkpoints if one.line.save_id]
    flushes = [one for one in checkpoints if one.flushed is not None]
    counts = {fate: sum(one.fate is fate for one in checkpoints) for fate in Fate}
    moments = [one.line.created for one in checkpoints] + [one.time for one in recoveries]
    moments += [one.line.durable for one in flushes]
    first, last = min(moments, default=0.0), max(moments, default=0.0)
    blocked = [one.line.stage_seconds for one in saves]
    return Totals(
        saves=len(saves),
        durable=counts[Fate.DURABLE],
        memory_only=counts[Fate.MEMORY],
        waiting=counts[Fate.WAITING],
        skipped=counts[Fate.SKIPPED],
        failed=counts[Fate.FAILED],
        recoveries=len(recoveries),
        first=first,
        last=last,
        blocked_seconds=sum(blocked),
        blocked_share=min(1.0, sum(blocked) / (last - first)) if last > first else 0.0,
        blocked_median=_median(blocked),
        flushed_nbytes=sum(one.line.nbytes for one in flushes),
        flush_median=_median(one.line.flush_seconds for one in flushes),
        throughput_median=_median(one.throughput for one in flushes if one.throughput),
        retries=sum(one.line.retries for one in checkpoints),
        recovery_seconds=sum(one.seconds for one in recoveries),
        recovery_median=_median(one.seconds for one in recoveries),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _stored_lines(storage: Storage) -> list[Line]:
    try:
        return histories.from_csv(storage.get(HISTORIES))
    except StorageKeyMissing:
        return []


def _joined(lines: Sequence[Line], held: Sequence[Held]) -> list[Past]:
    """Each checkpoint once: what has become durable somewhere counts, else what is said last. lines: storage's, then memory's."""
    found: dict[object, Past] = {}
    for line in filter(_is_sane, lines):
        key: object = line.save_id or (line.name, line.created)
        before = found.get(key)
        if before is None or _rank(line) >= _rank(before.line):
            found[key] = Past(line, _FATES.get(line.outcome, Fate.FAILED))
    for one in held:
        past, before = _of_held(one), found.get(one.manifest.save_id)
        if before is not None and _rank(before.line) > _rank(past.line):
            past = replace(before, is_held=True)
        found[one.manifest.save_id] = past
    return list(found.values())


def _of_held(held: Held) -> Past:
    outcome = held.flush.outcome
    unflushed = Fate.WAITING if held.pending else Fate.MEMORY
    fate = Fate.FAILED if outcome in ("failed", "refused") else _FATES.get(outcome, unflushed)
    return Past(line_of(held.manifest, held.flush), fate, is_held=True)


def _rank(line: Line) -> int:
    return {"durable": 1, "deleted": 2}.get(line.outcome, 0)


def _is_sane(line: Line) -> bool:
    """Whether the figures can be those of a checkpoint: the file may have been edited."""
    figures = (line.stage_seconds, line.flush_seconds, line.throughput_mib_s)
    are_finite = all(math.isfinite(figure) and 0 <= figure < _LAST_MOMENT for figure in figures)
    moments = 0 < line.created < _LAST_MOMENT and 0 <= line.durable < _LAST_MOMENT
    return are_finite and moments and all(0 <= number < _LARGEST for number in (line.nbytes, line.retries))
