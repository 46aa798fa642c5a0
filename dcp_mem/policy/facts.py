"""The facts about a checkpoint that policies decide by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_mem.common.sendable import sendable
from dcp_mem.policy.order import UNNUMBERED, Place, SaveNumber


@sendable
@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A file on this node that several checkpoints have among their segments.

    Attributes:
        file: Number of the file.
        nbytes: Bytes that it takes.
        names: How many checkpoints have it. Its bytes go with the last of them.
    """

    file: int
    nbytes: int
    names: int


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint as retention and admission see it.

    Retention decides by the first five fields, admission by the others (and the order).

    Attributes:
        key: Tells the checkpoint from others: a save id in memory, a name on storage.
        created: When it was saved; it counts only among checkpoints without a number.
        number: Of the save: its place in the order.
        step: Training step; None where it isn't known.
        metrics: Figures of the training loop, such as {"loss": 0.3}.
        nbytes: Bytes that its slots take on this node, which no other checkpoint shares.
        shared: Files that it shares with other checkpoints.
        persist: It is meant for storage.
        pending: It is meant for storage and isn't there yet.
        busy: It is being read, flushed or replicated at this moment, or has to wait for its flush.
        replicated: Other nodes have copies of it, and newer checkpoints are to get copies too.
        rejected: It is not to be resumed from: it doesn't count, and nothing leaves for it.
        chosen: The retention policy keeps it, as long as there is room.
    """

    key: str
    created: float
    number: SaveNumber = UNNUMBERED
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    shared: tuple[SharedBytes, ...] = ()
    persist: bool = False
    pending: bool = False
    busy: bool = False
    replicated: bool = False
    rejected: bool = False
    chosen: bool = True

    @property
    def place(self) -> Place:
        """Its place in the order of the job's checkpoints."""
        return Place(number=self.number, time=self.created, step=self.step, key=(self.key,))
