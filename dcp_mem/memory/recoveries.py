"""The loads of a job, as its directory in a node's memory knows them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dcp_mem import files
from dcp_mem.format.recoveries import RecoveryRecord, from_lines, joined, to_lines
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import in_turn
from dcp_mem.values import RECOVERIES

_LINES = 1_000


def recoveries_in(memory: JobMemory) -> list[RecoveryRecord]:
    """What is written down there, in the order of time."""
    try:
        return joined(from_lines(files.read_bytes(_path(memory))), most=_LINES)
    except FileNotFoundError:
        return []


def add_recovery(memory: JobMemory, recovery: RecoveryRecord) -> Sequence[RecoveryRecord]:
    """Write one more down; returns all of them. Raises OSError, MemoryBudgetExceeded."""
    with in_turn(memory.directory):
        after = joined(recoveries_in(memory), [recovery], most=_LINES)
        files.write_atomically(_path(memory), to_lines(after))
    return after


def _path(memory: JobMemory) -> str:
    return os.path.join(memory.directory, RECOVERIES)
