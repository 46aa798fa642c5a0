"""The records of a job's loads, as its directory in a node's memory has them."""

from __future__ import annotations

import os

from dcp_mem.common import files
from dcp_mem.common.values import RECOVERIES
from dcp_mem.format.recoveries import (
    MOST_RECOVERIES,
    RecoveryRecord,
    from_lines,
    merge_recoveries,
    to_lines,
)
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import in_turn


def recoveries_in(memory: JobMemory) -> list[RecoveryRecord]:
    """Return the records, in the order of time."""
    try:
        return merge_recoveries(from_lines(files.read_bytes(_path(memory))), most=MOST_RECOVERIES)
    except FileNotFoundError:
        return []


def add_recovery(memory: JobMemory, recovery: RecoveryRecord) -> None:
    """Add a record; others are kept as they are, unread, since every load waits for this."""
    with in_turn(memory.directory):
        try:
            before = files.read_bytes(_path(memory)).splitlines()
        except FileNotFoundError:
            before = []
        kept = b"".join(line + b"\n" for line in before[1 - MOST_RECOVERIES :])
        files.write_atomically(_path(memory), kept + to_lines([recovery]))


def _path(memory: JobMemory) -> str:
    return os.path.join(memory.directory, RECOVERIES)
