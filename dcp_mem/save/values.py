"""What the stages of a save hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.distributed.checkpoint.planner import WriteItem

from dcp_mem.config import Settings
from dcp_mem.memory.slots import Slot
from dcp_mem.ranks import Ranks
from dcp_mem.session import PlanLayout, Session, Topology
from dcp_mem.values import Segment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """One rank's part in one save. scope: "" or the rank that saves alone."""

    settings: Settings
    session: Session
    ranks: Ranks
    rank: int
    scope: str
    name: str

    @property
    def plan_key(self) -> tuple[str, str]:
        """Saves with the same key follow each other with the same plan, as a rule."""
        return self.scope, self.ranks.key


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all ranks agreed on for this save."""

    save_id: str
    created: float
    persist: bool
    topology: Topology
    started: float


@dataclass(frozen=True, slots=True)
class Staged:
    """This rank's sealed segment, and where its items lie in it, in the order of `items`."""

    segment: Segment
    items: Sequence[WriteItem]
    offsets: Sequence[int]
    lengths: Sequence[int]
    slot: Slot
    layout: PlanLayout


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's plan, taken apart.

    nbytes: what its segment will take, as far as plan and last save can tell. sources: addresses of the tensors' data
    where all of them are plain CPU memory; None where they have to be looked at one by one.
    """

    tensors: Sequence[WriteItem]
    objects: Sequence[WriteItem]
    layout: PlanLayout
    nbytes: int
    sources: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A value, or the reason why there is none, on its way to the other ranks."""

    value: T | None = None
    error: str = ""
