"""A job's past, as runs leave it: `checkpointHistories.csv` and `recoveries.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcp_mem.common.values import HISTORIES, RECOVERIES
from dcp_mem.format.history import HistoryRow, to_csv
from dcp_mem.format.recoveries import RecoveryRecord, to_lines

EPOCH = 1e9


def past(number: int, outcome: str = "durable", **facts: Any) -> HistoryRow:
    """A checkpoint of 1 GiB, saved 300 s after the one before it."""
    created = EPOCH + 300 * number
    known: dict[str, Any] = {"nbytes": 1 << 30, "stage_seconds": 0.5, "created": created}
    if outcome in ("durable", "deleted"):
        known |= {"durable": created + 20, "flush_seconds": 8.0}
    known |= {"name": f"step-{number}", "save_id": f"{number:08x}", "outcome": outcome, **facts}
    return HistoryRow(**known)


def load_of(name: str, time: float, **facts: Any) -> RecoveryRecord:
    """A load of two seconds from memory."""
    known = {"token": f"{time}", "save_id": "", "step": None, "seconds": 2.0, **facts}
    known.setdefault("sources", {"memory": 5})
    return RecoveryRecord(name=name, time=time, **known)


def write_past(
    root: Path, rows: Sequence[HistoryRow], loads: Sequence[RecoveryRecord] = ()
) -> None:
    """Put what runs have left into a root, behind what is there."""
    own = root / ".dcp_mem"
    own.mkdir(parents=True, exist_ok=True)
    lines, head = to_csv(rows), to_csv([])
    there = own.joinpath(HISTORIES).exists()
    with own.joinpath(HISTORIES).open("ab") as stream:
        stream.write(lines.removeprefix(head) if there else lines)
    with own.joinpath(RECOVERIES).open("ab") as stream:
        stream.write(to_lines(loads))
