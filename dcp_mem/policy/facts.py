"""The facts about a checkpoint that policies decide by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.policy.order import UNNUMBERED, Place, SaveNumber


@sendable
@value_class
class SharedBytes:
    """A file on this node that several checkpoints have among their segments."""

    file: int
    nbytes: int
    names: int  # How many checkpoints have it. Its bytes go with the last of them.


@sendable
@value_class(kw_only=True)
class CheckpointFacts:
    """A checkpoint as retention and admission see it.

    Retention decides by the first six fields, admission by the others (and the order).
    """

    key: str  # tells the checkpoint from others: a save id in memory, a name on storage
    created: float  # when it was saved: for the order only of checkpoints without a number
    number: SaveNumber = UNNUMBERED  # of the save: its place in the order
    step: int | None = None  # training step; None where it isn't known
    # figures of the training loop, such as {"loss": 0.3}
    metrics: Mapping[str, float] = field(default_factory=dict)
    writer: str = ""  # the node whose clock `created` is of; "" where all are of one
    nbytes: int = 0  # bytes that its slots take on this node, which no other checkpoint shares
    shared: tuple[SharedBytes, ...] = ()
    persist: bool = False
    pending: bool = False  # it is meant for storage and isn't there yet
    # it is being read, flushed or replicated at this moment, or has to wait for its flush
    busy: bool = False
    # other nodes have copies of it, and newer checkpoints are to get copies too
    replicated: bool = False
    # it is not to be resumed from: it doesn't count, and nothing leaves for it
    rejected: bool = False
    chosen: bool = True  # the retention policy keeps it, as long as there is room

    @property
    def place(self) -> Place:
        """Its place in the order of the job's checkpoints."""
        return Place(number=self.number, time=self.created, step=self.step, key=(self.key,))
