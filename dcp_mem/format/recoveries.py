"""`recoveries.jsonl`: a line of JSON for each load, with what it took from where."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from dcp_mem.common.value_class import value_class
from dcp_mem.format.records import DAMAGE, facts_of, made, moment_of, moment_text

MOST_RECOVERIES = 1_000
"""Records that a job keeps, in each of its places."""
_LONGEST_REASON = 500
_MOST_REASONS = 20


@value_class(kw_only=True)
class RecoveryRecord:
    """One load of a checkpoint, on all ranks together."""

    token: str
    time: float  # when the load was done, in seconds since the epoch
    name: str
    save_id: str
    step: int | None  # the checkpoint's step; None where it isn't known
    seconds: float
    # bytes that the ranks took, by "memory" (of their own node), "peers", "storage"
    sources: Mapping[str, int] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    world_size: int = 0


def to_lines(recoveries: Sequence[RecoveryRecord]) -> bytes:
    """Return a file with these records."""
    return b"".join(map(_line, recoveries))


def from_lines(data: bytes) -> list[RecoveryRecord]:
    """Return the records of a file, in order, without lines that are damaged."""
    return [one for line in data.splitlines() if (one := _recovery(line)) is not None]


def merge_recoveries(*sets: Sequence[RecoveryRecord], most: int) -> list[RecoveryRecord]:
    """Return all records, each once, in order of time."""
    found = {one.token: one for recoveries in sets for one in recoveries}
    return sorted(found.values(), key=lambda one: one.time)[-most:]


def _line(one: RecoveryRecord) -> bytes:
    reasons = [reason[:_LONGEST_REASON] for reason in one.passed_over[:_MOST_REASONS]]
    short = {"seconds": round(one.seconds, 6), "passed_over": reasons}
    facts = {**facts_of(one), **short, "time": moment_text(one.time)}
    return json.dumps(facts, default=facts_of).encode() + b"\n"


def _recovery(line: bytes) -> RecoveryRecord | None:
    try:
        facts = json.loads(line)
        found = made(RecoveryRecord, {**facts, "time": moment_of(facts["time"])})
        is_sound = found.time > 0 and 0 <= found.seconds < math.inf and bool(found.token)
    except (*DAMAGE, RecursionError):
        return None
    return found if is_sound and all(nbytes >= 0 for nbytes in found.sources.values()) else None
