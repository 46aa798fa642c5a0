"""The records of a job's loads, as its root on storage has them."""

from __future__ import annotations

from dcp_mem.common.values import RECOVERIES
from dcp_mem.errors import StorageKeyMissing
from dcp_mem.format import names
from dcp_mem.format.recoveries import (
    MOST_RECOVERIES,
    RecoveryRecord,
    from_lines,
    merge_recoveries,
)
from dcp_mem.storage import Storage


def recoveries_on(storage: Storage) -> list[RecoveryRecord]:
    """Return the records on storage, oldest first.

    Raises StorageUnavailable, StorageRefused.
    """
    try:
        found = from_lines(storage.get(names.job_file(RECOVERIES)))
        return merge_recoveries(found, most=MOST_RECOVERIES)
    except StorageKeyMissing:
        return []
