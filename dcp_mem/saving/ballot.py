"""The messages between ranks before they stage: reports, and a ballot that joins them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from dcp_mem.common.sendable import sendable
from dcp_mem.policy.admission import NodeMemory
from dcp_mem.policy.order import UNNUMBERED, SaveNumber
from dcp_mem.policy.slots import FreeSlot

Proposal = tuple[Any, ...]
"""The coordinator's proposal for a save.

Save id, whether to persist the checkpoint, its time, the generation that the run goes on with (0 to
begin one) and the run's token in one number, and the fields of the manifest's `persisted`, or None.
The fields of SaveInfo follow, and what the manifest has as `replaces`; where both are empty they
are left out of the plain tuple.
"""

_RUNS = 1 << 32


def packed_run(generation: int, run: str) -> int:
    """Return generation and token of a run as one number."""
    return generation * _RUNS + int(run, 16)


def unpacked_run(packed: int) -> tuple[int, str]:
    """Return generation and token of a run."""
    generation, run = divmod(packed, _RUNS)
    return generation, f"{run:08x}"


@sendable
@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's report before it stages: its needs, and its objections to the save."""

    name: str
    proposal: Proposal | None = None
    needed: int = 0  # bytes of the slot for this rank's segment
    frozen: int = 0  # bytes of another slot, for frozen tensors that are copied; 0 for none
    # bytes of the slots that other nodes set aside for copies of these; 0 where they have them
    shared: int = 0
    slots: tuple[FreeSlot, ...] = ()  # free slots that this rank could claim, the largest first
    is_written: bool = False  # whether this rank has claimed and filled its own slots already
    # of the rank's node; from the node's leader alone, like `exists`
    node: NodeMemory | None = None
    exists: bool = False  # whether the checkpoint is there already, and must not be overwritten
    # the greatest number that the rank knows of; of the node's memory, from its leader
    newest: SaveNumber = UNNUMBERED
    plan_id: str = ""
    other_plan_ids: tuple[str, ...] = ()  # plans that would fit here just as well
    why_not: str = ""
    error: str = ""  # what went wrong; "" for nothing


@sendable
class Ballot(NamedTuple):
    """The reports of some ranks, joined; about as small as this however many ranks there are.

    A tuple, which is sent by position: each save sends one.
    """

    name: bytes
    plan_id: str  # "" where the ranks have no plan in common
    is_usual: bool  # whether no rank sees anything against staging at once, but for plans
    newest: int  # the greatest number that a rank knows of, packed
    proposal: Proposal | None
    other_plan_ids: tuple[str, ...] = ()  # plans that fit on every rank as well
    # (rank, why only DCP's planner can plan its state dict); of one rank at most
    why_not: tuple[tuple[int, str], ...] = ()
    # whether some rank still has copies of an older checkpoint under way
    is_replicating: bool = False

    def join(self, other: Ballot) -> Ballot:
        """Return what two sets of ranks say together."""
        fitting = {self.plan_id, *self.other_plan_ids} & {other.plan_id, *other.other_plan_ids}
        plan_id = self.plan_id if self.plan_id == other.plan_id else ""
        return Ballot(
            name=self.name,
            plan_id=plan_id,
            is_usual=self.name == other.name and self.is_usual and other.is_usual,
            newest=max(self.newest, other.newest),
            proposal=self.proposal or other.proposal,
            other_plan_ids=tuple(sorted(fitting - {plan_id, ""})),
            why_not=tuple(sorted(self.why_not + other.why_not)[:1]),
            is_replicating=self.is_replicating or other.is_replicating,
        )


def ballot_of(rank: int, report: RankReport, *, has_room: bool, is_replicating: bool) -> Ballot:
    """Return one rank's ballot.

    `is_replicating`: whether it still has copies of an older checkpoint under way.
    """
    return Ballot(
        name=hashlib.sha256(report.name.encode()).digest()[:6],
        plan_id=report.plan_id,
        is_usual=has_room and not (report.error or report.exists),
        newest=report.newest.packed,
        proposal=report.proposal,
        other_plan_ids=report.other_plan_ids,
        why_not=((rank, report.why_not),) if report.why_not else (),
        is_replicating=is_replicating,
    )
