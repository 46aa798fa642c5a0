"""The values that the stages hand to each other: frozen, free of torch and of I/O.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Literal

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class


class State(str, Enum):
    """A state in the life of a checkpoint."""

    STAGING = "staging"
    COMPLETE = "complete"
    # Complete, and other nodes hold verified copies, or parity, of every segment.
    REPLICATED = "replicated"
    DURABLE = "durable"
    FAILED = "failed"  # complete in memory; the flush failed and will be tried again
    SKIPPED = "skipped"  # never became durable, mostly since newer ones did; the reason is recorded
    EVICTED = "evicted"  # left memory by retention
    DELETED = "deleted"  # was durable, and left storage by retention


StateText = Literal["complete", "replicated", "durable"]
"""The states that can be waited for, as texts."""


class Outcome(str, Enum):
    """The outcome of a checkpoint, of its flush or of its copies, as files spell it.

    Records and history rows hold these texts; a member equals, prints and hashes as its text.
    """

    NONE = ""  # nothing yet
    DURABLE = "durable"
    FAILED = "failed"  # is tried again; for copies: there are fewer than wanted
    REFUSED = "refused"  # storage refused; is tried again, but rarely
    SKIPPED = "skipped"  # is not tried again
    SUPERSEDED = "superseded"  # in histories: a newer one took its place before its turn came
    REPLICATED = "replicated"
    EVICTED = "evicted"  # left memory, and was never meant for storage
    DELETED = "deleted"  # was durable, and left storage by retention

    __str__ = str.__str__


class ExportState(str, Enum):
    """A state in the life of one checkpoint's export, as files spell it."""

    WAITING = "waiting"
    RUNNING = "running"
    EXPORTED = "exported"
    FAILED = "failed"  # is tried again
    GIVEN_UP = "given up"  # failed too often
    SKIPPED = "skipped"  # the checkpoint is gone, or nobody knows whether its turn has come

    __str__ = str.__str__


@sendable
@value_class(kw_only=True)
class Segment:
    """One rank's file of one checkpoint."""

    # its number: the rank that saved it, with `names.FROZEN` added for its second segment
    rank: int
    node: str
    file: str
    nbytes: int  # length of the segment; its file may be longer, because slots are recycled
    layout: str = ""  # key of the layout, which says where its dense items lie; "" if it has none
    # (offset, bytes) of each item behind the layout's: byte items, and tensors without a plain
    # dense payload
    tail: tuple[tuple[int, int], ...] = ()


@value_class
class SaveInfo:
    """The training loop's information about a save."""

    step: int | None = None  # the training step; None if it wasn't given
    metrics: Mapping[str, float] = field(default_factory=dict)
    persist: bool = False  # True takes the checkpoint to storage whatever the policy says
    # how many steps should pass until the next save, to the coordinator; not recorded
    pause: int = 0


HISTORIES = "checkpointHistories.csv"
"""File name of a job's history of checkpoints, in its memory directory and on storage."""

RECOVERIES = "recoveries.jsonl"
RESUMES = "resumes.json"
"""File name of a job's history of loads, in the same two places."""

MEMORY, STORAGE = "memory", "storage"
"""The places of a checkpoint: this node's memory, and storage."""


@value_class(kw_only=True, frozen=True)
class Transfer:
    """The progress and cost of flushing one node's segments, over all attempts so far.

    Attributes:
        nbytes: Bytes to move; 0 if that isn't known yet.
        stored_nbytes: Bytes of these that storage has.
        sent_nbytes: Bytes sent. Fewer than stored where storage had some already; more where some
            were lost and sent again.
        reused_nbytes: Bytes that weren't sent, as storage copied them from an earlier checkpoint.
        parts: Parts to move; 0 if that isn't known yet.
        sent_parts: Parts sent.
        retries: Requests that were repeats.
        segments_seconds: Time in which segments were moved.
        commit_seconds: Time of the commit.
        waiting_seconds: Time of waiting for other nodes, after this node's segments were stored.
    """

    nbytes: int = 0
    stored_nbytes: int = 0
    sent_nbytes: int = 0
    reused_nbytes: int = 0
    parts: int = 0
    sent_parts: int = 0
    retries: int = 0
    segments_seconds: float = 0.0
    commit_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Bytes per second while segments were moved."""
        return self.sent_nbytes / self.segments_seconds if self.segments_seconds > 0 else 0.0


@value_class(kw_only=True, frozen=True)
class CheckpointStatus:
    """The status of one checkpoint.

    `MemoryStorageWriter.status()` and `CheckpointManager.list()` return these. `status()` goes by
    what this node's memory says, `list()` asks storage as well.

    Attributes:
        name: The checkpoint id.
        save_id: The save attempt.
        state: How far it is.
        in_memory: Whether this node holds it.
        persist: Whether it is meant to reach storage.
        nbytes: Bytes of all ranks' segments.
        created: Seconds since the epoch.
        durable: When it became durable, in seconds since the epoch; 0.0 if it isn't.
        stage_seconds: How long the save took until the checkpoint was complete.
        flush_seconds: How long all flush attempts took, without the pauses between them.
        flush_attempts: Attempts that have ended.
        error: Why the last attempt failed, or why the checkpoint was skipped; or that storage had
            it, and has it no more.
        flush_stage: "segments", "commit", "waiting" (for other nodes), or "" if no flush runs.
        flush_again: When a failed flush is tried again, in seconds since the epoch; 0.0 if it is
            being tried, or nothing failed.
        transfer: What this node has moved to storage.
        replicas: Copies of each segment in other nodes' memory.
        replication_seconds: How long replication took.
        replication_sent_nbytes: Bytes that all ranks have sent for it to each other.
        replication_reused_nbytes: Bytes of copies that weren't sent, as an earlier copy on the same
            node had them.
        replication_error: Why there is neither copy nor parity, or less than wanted.
        parity: Over how many other nodes there is parity, in place of copies.
        step: The training step; None where it wasn't given.
        metrics: The figures given with the save.
        places: MEMORY, STORAGE or both.
        scope: "", or the rank that saved alone ("r3").
        world_size: Ranks that saved it; 0 if unknown.
        problem: What is known to be wrong with it; "" for nothing.
        rejected: Why it is not to be resumed from; "" if nobody has rejected it.
        is_foreign: Whether torch's own writer made it.
        generation: Of the run that saved it; 0 if unknown. It gives the checkpoint its place in the
            job's order, with `count`.
        count: Of the save, within the generation.
        run: Token of the run.
        stored_at: When storage got its `.metadata`, in seconds since the epoch by the storage's
            clock; 0.0 if unknown.
        export: How far this node's export of it is; None where `export=` doesn't choose it, or
            another node exports it.
        exported_to: The directory that the export has made; "" for none.
        export_error: Why the last attempt at the export failed, or why there is none.
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
    replication_sent_nbytes: int = 0
    replication_reused_nbytes: int = 0
    replication_error: str = ""
    parity: int = 0
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    scope: str = ""
    world_size: int = 0
    problem: str = ""
    rejected: str = ""
    is_foreign: bool = False
    generation: int = 0
    count: int = 0
    run: str = ""
    stored_at: float = 0.0
    export: ExportState | None = None
    exported_to: str = ""
    export_error: str = ""

    @property
    def is_durable(self) -> bool:
        """Whether storage has it, with nothing known to be wrong, and it isn't rejected."""
        return STORAGE in self.places and not (self.problem or self.rejected)

    @property
    def is_replicated(self) -> bool:
        """Whether the checkpoint survives the loss of a node."""
        return self.replicas > 0 or self.parity > 0


def shown(text: str) -> str:
    """Return text that is safe to show: names come from storage, and could steer a viewer."""
    return "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text
    )


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with what it counts; `many` by default with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def figures(metrics: Mapping[str, float]) -> str:
    """Return metrics for people."""
    return ", ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items()))
