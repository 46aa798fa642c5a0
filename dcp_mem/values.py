"""The values that the stages hand to each other. Frozen, free of torch and of I/O; sizes are in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    """Life of a checkpoint, in the order in which it is passed."""

    STAGING = "staging"
    COMPLETE = "complete"
    DURABLE = "durable"
    FAILED = "failed"  # complete in memory; the flush failed and will be tried again
    SKIPPED = "skipped"  # never became durable, on purpose; the reason is recorded
    EVICTED = "evicted"  # left memory by retention


@dataclass(frozen=True, slots=True)
class Segment:
    """One rank's file of one checkpoint.

    nbytes: length of the segment; its file may be longer, because slots are recycled.
    layout: key of the columns that say where each item's payload lies ("" where there is none).
    tail: (offset, nbytes) of the items behind the layout's: byte items and tensors that took the slow road.
    """

    rank: int
    node: str
    file: str
    nbytes: int
    layout: str = ""
    tail: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """What is known of one checkpoint; one entry of `MemoryStorageWriter.status()`.

    in_memory: this node still holds it. persist: it is meant to reach storage.
    created, durable: seconds since the epoch (0.0: not yet). nbytes: all ranks' segments together.
    """

    name: str
    save_id: str
    state: State
    in_memory: bool
    persist: bool
    nbytes: int
    created: float
    durable: float = 0.0
    stage_seconds: float = 0.0
    flush_seconds: float = 0.0
    flush_attempts: int = 0
    error: str = ""
