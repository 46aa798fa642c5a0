"""The values that the stages hand to each other. Frozen, free of torch and of I/O; sizes are in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class State(str, Enum):
    """Life of a checkpoint, in the order in which it is passed."""

    STAGING = "staging"
    COMPLETE = "complete"
    REPLICATED = "replicated"  # complete, and every segment lies verified on the other nodes that shall have it
    DURABLE = "durable"
    FAILED = "failed"  # complete in memory; the flush failed and will be tried again
    SKIPPED = "skipped"  # never became durable, on purpose; the reason is recorded
    EVICTED = "evicted"  # left memory by retention
    DELETED = "deleted"  # was durable, and left storage by retention


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
class About:
    """What a training loop says of a checkpoint: its step (None: nothing), and figures such as {"loss": 0.3}.

    persist: True takes it to storage whatever the policy says. pause: how many steps the coordinator would have pass until the
    next save; not kept.
    """

    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    persist: bool = False
    pause: int = 0


HISTORIES = "checkpointHistories.csv"
"""What became of a job's checkpoints: in its directory in memory, and in its root on storage."""

RECOVERIES = "recoveries.jsonl"
"""The loads of a job: in the same two places."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How far one node's part of a checkpoint is on its way to storage, and what that took so far, in all attempts.

    nbytes, parts: what there is to move (0: not looked at yet). stored_nbytes: what storage has of it by now.
    sent_nbytes, sent_parts: what went over the wire: less where storage had something already, more where it was lost again.
    retries: requests that were repeats. waiting_seconds: for other nodes, with this node's part done.
    """

    nbytes: int = 0
    stored_nbytes: int = 0
    sent_nbytes: int = 0
    parts: int = 0
    sent_parts: int = 0
    retries: int = 0
    segments_seconds: float = 0.0
    commit_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Bytes per second, while segments were moved."""
        return self.sent_nbytes / self.segments_seconds if self.segments_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """What is known of one checkpoint; one entry of `MemoryStorageWriter.status()`.

    in_memory: this node still holds it. persist: it is meant to reach storage.
    created, durable: seconds since the epoch (0.0: not yet). nbytes: all ranks' segments together.
    flush_stage: "segments", "commit", "waiting" (for other nodes), or "" where no flush is under way.
    flush_seconds: what all attempts took, without the pauses between them. flush_again: when a failed one is tried again,
    seconds since the epoch (0.0: it is being tried, or nothing failed).
    replicas: copies of each segment in other nodes' memory. parity: over how many other nodes there is parity instead.
    replication_error: why there is neither, or less than wanted. step, metrics: what the training loop said of it, while it is
    in memory.
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
    flush_stage: str = ""
    flush_again: float = 0.0
    transfer: Transfer = field(default_factory=Transfer)
    replicas: int = 0
    replication_seconds: float = 0.0
    replication_error: str = ""
    parity: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_replicated(self) -> bool:
        """Whether the loss of a node loses nothing of it."""
        return self.replicas > 0 or self.parity > 0
