"""What the stages of a save hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_mem.config import Settings
from dcp_mem.memory.slots import Slot
from dcp_mem.ranks import Ranks
from dcp_mem.session import PlanLayout, Session, Topology
from dcp_mem.values import About, Segment

T = TypeVar("T")


class Items(Protocol):
    """What the items of a plan stand for; the stages only hand them on."""

    def resolve(self, item: Any) -> Any:
        """The tensor to copy, or io.BytesIO for a byte item."""

    def index(self, item: Any) -> MetadataIndex:
        """What DCP knows the item by."""

    def fingerprint(self, items: Sequence[Any]) -> int:
        """The same for the same names and offsets in the same order."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One rank's part in one save. scope: "" or the rank that saves alone. plan_id: as in Planned.

    about: what this rank says of the checkpoint; the coordinator's word counts.
    """

    settings: Settings
    session: Session
    ranks: Ranks
    rank: int
    scope: str
    name: str
    plan_id: str = ""
    about: About = field(default_factory=About)

    @property
    def group(self) -> tuple[str, str]:
        """Tells the ranks that save together from others."""
        return self.scope, self.ranks.key

    @property
    def plan_key(self) -> tuple[str, str, str]:
        """Saves with the same key follow each other with the same plan, as a rule."""
        return self.scope, self.ranks.key, self.plan_id


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all ranks agreed on for this save. replicate: no older checkpoint's replication is in the way.

    about: the coordinator's.
    """

    save_id: str
    created: float
    persist: bool
    topology: Topology
    started: float
    replicate: bool = True
    about: About = field(default_factory=About)


@dataclass(frozen=True, slots=True)
class Staged:
    """This rank's sealed segment, and where its items lie in it, in the order of `items`. plan: what they stand for."""

    segment: Segment
    plan: Items
    items: Sequence[Any]
    offsets: Sequence[int]
    lengths: Sequence[int]
    slot: Slot
    layout: PlanLayout


DCP_PLAN = "dcp"
"""Plan id of whatever DCP has planned: it hands the parts of one plan to all ranks."""


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A state dict that isn't part of a plan of all ranks yet. why_not: "" or why only DCP's planner can make one."""

    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """This rank's plan, taken apart.

    nbytes: what its segment will take, as far as plan and last save can tell. sources: addresses of the tensors' data
    where all of them are plain CPU memory; None where they have to be looked at one by one. plan: what the items stand
    for. plan_id: which plan of all ranks this is a part of. others: plans that would fit here just as well.
    is_written: a slot holds all of it already.
    """

    plan: Items
    tensors: Sequence[Any]
    objects: Sequence[Any]
    layout: PlanLayout
    nbytes: int
    sources: Sequence[int] | None = None
    plan_id: str = DCP_PLAN
    others: tuple[str, ...] = ()
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A value, or the reason why there is none, on its way to the other ranks."""

    value: T | None = None
    error: str = ""
