"""`recoveries.jsonl`: a line of JSON for each load, with what it took from where."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

_LONGEST_REASON = 500
_MOST_REASONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return b"".join(json.dumps(_facts(one)).encode() + b"\n" for one in recoveries)


def from_lines(data: bytes) -> list[RecoveryRecord]:
    """Return the records of a file, in order, without lines that are damaged."""
    return [one for line in data.splitlines() if (one := _recovery(line)) is not None]


def merge_recoveries(*sets: Sequence[RecoveryRecord], most: int) -> list[RecoveryRecord]:
    """Return all records, each once, in order of time."""
    found = {one.token: one for recoveries in sets for one in recoveries}
    return sorted(found.values(), key=lambda one: one.time)[-most:]


def _facts(one: RecoveryRecord) -> dict[str, Any]:
    reasons = [reason[:_LONGEST_REASON] for reason in one.passed_over[:_MOST_REASONS]]
    return {
        "version": 1,
        "token": one.token,
        "time": datetime.fromtimestamp(one.time, timezone.utc).isoformat(timespec="microseconds"),
        "name": one.name,
        "save_id": one.save_id,
        "step": one.step,
        "seconds": round(one.seconds, 6),
        "sources": dict(one.sources),
        "passed_over": reasons,
        "world_size": one.world_size,
    }


def _recovery(line: bytes) -> RecoveryRecord | None:
    try:
        facts = json.loads(line)
        when = datetime.fromisoformat(facts["time"])
        found = RecoveryRecord(
            token=str(facts["token"]),
            time=when.timestamp(),
            name=str(facts["name"]),
            save_id=str(facts.get("save_id", "")),
            step=None if facts.get("step") is None else int(facts["step"]),
            seconds=float(facts.get("seconds", 0.0)),
            sources={
                str(source): int(nbytes)
                for source, nbytes in dict(facts.get("sources", {})).items()
            },
            passed_over=tuple(map(str, facts.get("passed_over", ()))),
            world_size=int(facts.get("world_size", 0)),
        )
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError, RecursionError):
        return None
    is_sound = (
        when.tzinfo is not None
        and math.isfinite(found.seconds)
        and found.seconds >= 0
        and bool(found.token)
    )
    return found if is_sound and all(nbytes >= 0 for nbytes in found.sources.values()) else None
