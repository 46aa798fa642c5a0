"""The journal of a rank's run: one JSON line per event, written as it happens.

Losses are kept as hexadecimal floats, so that comparing them compares bits.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args


@dataclass(frozen=True, slots=True)
class Started:
    """The model is built; nothing is trained or loaded yet."""

    parameters: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """A checkpoint was loaded; `source` is where its bytes came from."""

    checkpoint_id: str
    source: str
    seconds: float
    passed_over: list[str]


@dataclass(frozen=True, slots=True)
class StepTaken:
    """One training step; `loss` is the mean over all ranks, as a hexadecimal float."""

    step: int
    loss: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """`dcp.save` is about to be called."""

    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class SaveReturned:
    """`dcp.save` has returned after blocking the training for `seconds`."""

    checkpoint_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint is on storage; what dcp_mem says of the time it took.

    `stage_seconds` is its part of the time for which the save blocked; `flush_seconds` passed
    behind the training.
    """

    checkpoint_id: str
    stage_seconds: float
    flush_seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception ended the run."""

    error: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last step is taken, and what is meant for storage is there.

    `digest` is the SHA-256 of this rank's part of the parameters and the optimizer state.
    """

    step: int
    digest: str


Event = Started | Recovered | StepTaken | SaveBegun | SaveReturned | Stored | Failed | Finished
EVENTS: Final[dict[str, type[Event]]] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True, slots=True)
class Entry:
    """An event, the attempt (torchrun's restart count) it belongs to, and its Unix time."""

    attempt: int
    at: float
    event: Event


def current_attempt() -> int:
    """Return how often torchrun has restarted this worker."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Journal:
    """Appends events to a file of its own, each whole before the next thing happens."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = journal_path(directory, rank).open("a", encoding="utf-8")
        self._attempt = current_attempt()

    def record(self, event: Event) -> None:
        """Append an event; a process that is killed right after has still recorded it."""
        stamp = {"event": type(event).__name__, "attempt": self._attempt, "at": time.time()}
        self._file.write(json.dumps(stamp | asdict(event)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; nothing more can be recorded."""
        self._file.close()


def read_journal(directory: Path, rank: int) -> list[Entry]:
    """Read everything that a rank recorded, in order."""
    lines = journal_path(directory, rank).read_text(encoding="utf-8").splitlines()
    return [_parse(json.loads(line)) for line in lines]


def journal_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's journal of one run."""
    return directory / f"rank-{rank}.jsonl"


def _parse(fields: dict[str, Any]) -> Entry:
    kind = EVENTS[fields.pop("event")]
    attempt, at = fields.pop("attempt"), fields.pop("at")
    return Entry(attempt=attempt, at=at, event=kind(**fields))
