"""A load leaves a record: in memory, where the job has any, and in the job's root on storage. Nothing of that can fail a load."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_mem.errors import DcpMemError, StorageKeyMissing, StorageRefused
from dcp_mem.events import log
from dcp_mem.format.recoveries import RecoveryRecord, from_lines, joined, to_lines
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.recoveries import add_recovery
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import daemon
from dcp_mem.values import RECOVERIES

_LINES = 1_000
_PATIENCE = 1.0
"""Seconds that training waits for storage to take it; after that it goes on behind training."""


def leave_record(recovery: RecoveryRecord, memory: JobMemory | None, storage: Storage | None) -> None:
    """Write down a load, in the places that there are. What goes wrong is logged."""
    known: Sequence[RecoveryRecord] = [recovery]
    if memory is not None:
        try:
            known = add_recovery(memory, recovery)
        except (OSError, DcpMemError) as error:
            log.warning("that %s was loaded can't be written down in memory: %s", recovery.name, error)
    if storage is not None:
        daemon(lambda: _put(storage, recovery.name, known)).join(_PATIENCE)


def recoveries_on(storage: Storage) -> list[RecoveryRecord]:
    """What is written down in the job's root, in the order of time. Raises StorageUnavailable, StorageRefused."""
    try:
        return joined(from_lines(storage.get(RECOVERIES)), most=_LINES)
    except StorageKeyMissing:
        return []


def _put(storage: Storage, name: str, known: Sequence[RecoveryRecord]) -> None:
    """known: also earlier ones, which storage may not have taken at their time."""
    try:
        storage.put(RECOVERIES, to_lines(joined(recoveries_on(storage), known, most=_LINES)))
    except StorageRefused as error:  # who only reads may not be allowed to
        log.info("that %s was loaded isn't written down in %s: %s", name, storage.url, error)
    except Exception as error:  # it is loaded, whatever this may be
        log.warning("that %s was loaded can't be written down in %s: %s", name, storage.url, error)
