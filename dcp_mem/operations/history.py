"""Join what is known of a job's checkpoints and loads, from memory's and storage's histories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from statistics import median

from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import HISTORIES, RECOVERIES, Outcome
from dcp_mem.config import Settings
from dcp_mem.errors import ManifestInvalid, StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.history import HistoryRow, from_csv, row_of
from dcp_mem.format.recoveries import MOST_RECOVERIES, RecoveryRecord, merge_recoveries
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.records import recoveries_in
from dcp_mem.policy.order import newest_first
from dcp_mem.runtime.states import job_memory
from dcp_mem.storage import OfOneFile
from dcp_mem.storage.recoveries import recoveries_on
from dcp_mem.storage.retry import RETRIES, RetryPolicy
from dcp_mem.storage.routes import storage_of

_LAST_MOMENT = 32_503_680_000.0  # the year 3000: a row with a later moment is damaged
_LARGEST = 1 << 63


class Fate(str, Enum):
    """The fate of a checkpoint, in words for people; it groups what an `Outcome` tells apart."""

    DURABLE = "durable"  # also where retention has taken it off storage since
    MEMORY_ONLY = "memory only"
    WAITING = "on its way"
    SUPERSEDED = "superseded"  # a newer one was flushed in its place
    SKIPPED = "skipped"
    FAILED = "failed"


_FATES = {  # By the text of a row; a damaged row may hold any text.
    Outcome.DURABLE.value: Fate.DURABLE,
    Outcome.DELETED.value: Fate.DURABLE,
    Outcome.EVICTED.value: Fate.MEMORY_ONLY,
    Outcome.SUPERSEDED.value: Fate.SUPERSEDED,
    Outcome.SKIPPED.value: Fate.SKIPPED,
    Outcome.NONE.value: Fate.WAITING,
}


def fate_of(row: HistoryRow) -> Fate:
    """Return what became of a checkpoint; FAILED for an outcome that isn't known."""
    return _FATES.get(row.outcome, Fate.FAILED)


def flush_span(row: HistoryRow) -> tuple[float, float] | None:
    """Return when the flush began, without pauses, and ended; None where it never ended well."""
    is_durable = fate_of(row) is Fate.DURABLE and row.durable
    return (row.durable - row.flush_seconds, row.durable) if is_durable else None


def flush_throughput(row: HistoryRow) -> float:
    """Return the bytes per second of the flush, of all nodes together; 0.0 where there was none."""
    is_known = flush_span(row) is not None and row.flush_seconds > 0
    return row.nbytes / row.flush_seconds if is_known else 0.0


@value_class(kw_only=True)
class History:
    job: str
    url: str | None  # its root on storage; None where storage wasn't asked
    # a row for each checkpoint, and for each save that never began; oldest first
    checkpoints: tuple[HistoryRow, ...]
    recoveries: tuple[RecoveryRecord, ...]  # its loads, oldest first
    troubles: tuple[str, ...] = ()  # why there may be more than these
    # save ids of the checkpoints that lie in this node's memory
    in_memory: frozenset[str] = frozenset()
    has_memory: bool = False  # whether the job has memory on this node


@value_class(kw_only=True)
class Totals:
    """Sums of a history: times in seconds, sizes in bytes."""

    saves: int  # Saves that began. The next six count them by their fate.
    durable: int
    memory_only: int
    waiting: int
    superseded: int
    skipped: int
    failed: int
    recoveries: int
    first: float  # when the first thing happened, since the epoch
    last: float  # when the last thing happened, since the epoch
    blocked_seconds: float
    blocked_share: float  # the share of that in the time from the first to the last
    blocked_median: float  # per save; 0.0 where there was none, as in the other medians
    flushed_nbytes: int
    # what of that storage copied from earlier checkpoints, as far as the nodes that wrote the
    # history know
    reused_nbytes: int
    flush_median: float
    throughput_median: float
    retries: int
    recovery_seconds: float
    recovery_median: float
    lost_seconds: float  # to saves, work done twice, pauses and loads
    goodput: float  # effective training time ratio: the share of the time that wasn't lost


def read_history(settings: Settings, *, retry_policy: RetryPolicy = RETRIES) -> History:
    memory = job_memory(settings)
    local = memory.checkpoints() if memory is not None else []
    rows = memory.history.rows() if memory is not None else []
    recoveries = recoveries_in(memory.directory) if memory is not None else []
    troubles = []
    storage = storage_of(settings, retry_policy)
    if storage is not None:
        try:
            rows = [*from_csv(storage.get(names.job_file(HISTORIES))), *rows]
        except StorageKeyMissing:
            pass
        except (ManifestInvalid, OfOneFile) as error:
            troubles.append(f"{HISTORIES} in {settings.url} can't be read: {error}")
        try:
            recoveries = merge_recoveries(recoveries_on(storage), recoveries, most=MOST_RECOVERIES)
        except OfOneFile as error:
            troubles.append(f"{RECOVERIES} in {settings.url} can't be read: {error}")
    checkpoints = newest_first(_joined(rows, local), lambda one: one.place)[::-1]
    return History(
        job=settings.job,
        url=settings.url,
        checkpoints=tuple(checkpoints),
        recoveries=tuple(one for one in recoveries if 0 < one.time < _LAST_MOMENT),
        troubles=tuple(troubles),
        in_memory=frozenset(one.manifest.save_id for one in local),
        has_memory=memory is not None,
    )


def totals(history: History) -> Totals:
    """Return the sums of a history; zeros where it is empty."""
    checkpoints, recoveries = history.checkpoints, history.recoveries
    saves = [one for one in checkpoints if one.save_id]
    flushes = [one for one in checkpoints if flush_span(one) is not None]
    counts = {one.name.lower(): sum(fate_of(row) is one for row in checkpoints) for one in Fate}
    moments = [one.created for one in checkpoints] + [one.time for one in recoveries]
    moments += [one.durable for one in flushes]
    first, last = min(moments, default=0.0), max(moments, default=0.0)
    blocked = [one.stage_seconds for one in saves]
    lost = lost_seconds(
        ((one.created, one.created + one.stage_seconds) for one in saves), _resumes(history)
    )
    return Totals(
        saves=len(saves),
        **counts,
        recoveries=len(recoveries),
        first=first,
        last=last,
        blocked_seconds=sum(blocked),
        blocked_share=min(1.0, sum(blocked) / (last - first)) if last > first else 0.0,
        blocked_median=_median(blocked),
        flushed_nbytes=sum(one.nbytes for one in flushes),
        reused_nbytes=sum(one.reused_nbytes for one in flushes),
        flush_median=_median(one.flush_seconds for one in flushes),
        throughput_median=_median(filter(None, map(flush_throughput, flushes))),
        retries=sum(one.retries for one in checkpoints),
        recovery_seconds=sum(one.seconds for one in recoveries),
        recovery_median=_median(one.seconds for one in recoveries),
        lost_seconds=lost,
        goodput=max(0.0, 1 - lost / (last - first)) if last > first else 0.0,
    )


def lost_seconds(
    saves: Iterable[tuple[float, float]], resumes: Iterable[tuple[float, float]]
) -> float:
    """Return the seconds in which no training was done whose result is kept.

    Each span is (begin, end): of a save, while it held training up; of a resume, from the save of
    the checkpoint that was loaded to the end of the load. Spans that overlap count once.
    """
    lost, until = 0.0, float("-inf")
    for begin, end in sorted([*saves, *resumes]):
        lost += max(0.0, end - max(begin, until))
        until = max(until, end)
    return lost


def _resumes(history: History) -> Iterator[tuple[float, float]]:
    """Yield from when each load's checkpoint was saved until it was loaded."""
    created = {one.save_id: one.created for one in history.checkpoints if one.save_id}
    for one in history.recoveries:
        yield min(one.time, created.get(one.save_id, one.time - one.seconds)), one.time


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


def _joined(rows: Sequence[HistoryRow], local: Sequence[LocalCheckpoint]) -> list[HistoryRow]:
    """Return one row for each checkpoint: the one that says "durable" or "deleted", else the last.
    The records of the checkpoints in memory are newer than any row.
    """
    found: dict[object, HistoryRow] = {}
    for row in [*filter(_is_sane, rows), *map(_row_of, local)]:
        key: object = row.save_id or (row.name, row.created)
        if key not in found or _finality(row) >= _finality(found[key]):
            found[key] = row
    return list(found.values())


def _row_of(checkpoint: LocalCheckpoint) -> HistoryRow:
    row = row_of(checkpoint.manifest, checkpoint.flush)
    is_unsettled = checkpoint.pending and not checkpoint.flush.outcome
    # Never written to a file: the checkpoint awaits its flush.
    return replace(row, outcome=Outcome.NONE) if is_unsettled else row


def _finality(row: HistoryRow) -> int:
    return {Outcome.DURABLE.value: 1, Outcome.DELETED.value: 2}.get(row.outcome, 0)


def _is_sane(row: HistoryRow) -> bool:
    """Tell whether the figures can be those of a checkpoint: people may have edited the file."""
    figures = (row.stage_seconds, row.flush_seconds, row.throughput_mib_s)
    are_finite = all(math.isfinite(figure) and 0 <= figure < _LAST_MOMENT for figure in figures)
    are_moments = 0 < row.created < _LAST_MOMENT and 0 <= row.durable < _LAST_MOMENT
    counts = (row.nbytes, row.retries, row.sent_nbytes, row.reused_nbytes)
    are_counts = all(0 <= number < _LARGEST for number in counts)
    return are_finite and are_moments and are_counts
