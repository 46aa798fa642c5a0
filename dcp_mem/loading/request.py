"""The request of a load and the places to search; these values never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_mem.comm import Ranks
from dcp_mem.config import Settings
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.election import ElectedCheckpoint
from dcp_mem.storage import Storage

Eligible = Callable[[Sequence[ElectedCheckpoint]], Sequence[ElectedCheckpoint]]


@dataclass(frozen=True, slots=True)
class Places:
    """The places in which a load looks for checkpoints."""

    memory: JobMemory | None  # what this node's memory has of the job; None where that is nothing
    storage: Storage | None  # None for jobs that are kept in memory only
    job: str

    def __str__(self) -> str:
        storage = [] if self.storage is None else [self.storage.url]
        return " and ".join([f"memory (job {self.job})", *storage])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The request of a load: the wanted checkpoint, the ranks, and the places to search."""

    settings: Settings
    ranks: Ranks
    # this rank's number as DCP counts it for this call: a rank that saved alone named its files by
    # it
    rank: int
    wanted: str | None  # name of the checkpoint; None for the newest
    places: Places
    # Why this rank can't load at all. The survey raises it, on all ranks.
    refusal: Exception | None
    started: float
    verify: bool  # whether bytes are held against their checksums, where these have been made
    across_nodes: bool  # whether nodes send each other what they have fetched from storage
    leaves_record: bool
    # whether tensors that were pickled whole are unpickled with restrictions
    weights_only: bool = True
    # returns those of the candidates that will do, in their order; None: all do
    eligible: Eligible | None = None
    plans_itself: bool = False  # whether this rank plans without DCP's planner, under `dcp.load`
