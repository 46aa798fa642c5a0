"""Last stage of a load: a line in `recoveries.jsonl`, in memory and on storage.

Nothing of this can fail a load.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid

import torch.distributed as dist

from dcp_mem.comm import SingleRank
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.values import RECOVERIES
from dcp_mem.errors import DcpMemError, StorageKeyMissing, StorageRefused
from dcp_mem.format import names
from dcp_mem.format.recoveries import RecoveryRecord, from_lines, merge_recoveries, to_lines
from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.report import RecoveryReport
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.recoveries import add_recovery, recoveries_in
from dcp_mem.storage import OfOneFile, Storage

_MOST_LINES = 1_000
_STORAGE_TIMEOUT = 1.0
"""Seconds that training waits for storage to take the record; after that it goes on meanwhile."""


def record_load(load: LoadAttempt, report: RecoveryReport) -> None:
    """Leave a record of a load; one rank does so for all."""
    if isinstance(load.ranks, SingleRank) and dist.is_initialized() and dist.get_rank() > 0:
        return  # every rank loads by itself, and rank 0 leaves the record
    record = RecoveryRecord(
        token=uuid.uuid4().hex[:12],
        time=time.time(),
        name=report.checkpoint_id,
        save_id=report.save_id,
        step=report.step,
        seconds=report.seconds,
        sources=report.sources,
        passed_over=report.passed_over,
        world_size=load.ranks.size,
    )
    leave_record(record, load.memory, None if load.storage_survey.silence else load.storage)


def leave_record(record: RecoveryRecord, memory: JobMemory | None, storage: Storage | None) -> None:
    """Add a record to memory and storage, where there are such. What goes wrong is logged.

    `storage`: the job's; None also where it was silent.
    """
    if memory is not None:
        try:
            add_recovery(memory, record)
        except (OSError, DcpMemError) as error:
            log.warning(
                "that %s was loaded can't be written down in memory: %s", record.name, error
            )
    if storage is not None:
        daemon(lambda: _put(storage, record, memory)).join(_STORAGE_TIMEOUT)


def recoveries_on(storage: Storage) -> list[RecoveryRecord]:
    """Return the records on storage, oldest first.

    Raises StorageUnavailable, StorageRefused.
    """
    try:
        found = from_lines(storage.get(names.job_file(RECOVERIES)))
        return merge_recoveries(found, most=_MOST_LINES)
    except StorageKeyMissing:
        return []


def _put(storage: Storage, record: RecoveryRecord, memory: JobMemory | None) -> None:
    """Add a record to those on storage; also earlier ones, which it may not have taken then."""
    name, earlier = record.name, list[RecoveryRecord]()
    if memory is not None:
        with contextlib.suppress(OSError):  # it was said, when the record was to go there
            earlier = recoveries_in(memory)
    try:
        known = merge_recoveries(recoveries_on(storage), earlier, [record], most=_MOST_LINES)
        storage.put(names.job_file(RECOVERIES), to_lines(known))
    except Exception as error:  # the checkpoint is loaded, whatever this may be
        # A job that only reads may not be allowed to write.
        is_expected = isinstance(error, StorageRefused) and not isinstance(error, OfOneFile)
        level = logging.INFO if is_expected else logging.WARNING
        text = "that %s was loaded can't be written down in %s: %s"
        log.log(level, text, name, storage.url, error)
