"""The save, from one end to the other: the same stages, whatever is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcp_mem.comm.agreement import attempt
from dcp_mem.saving.agree import agree
from dcp_mem.saving.background import start_background_work
from dcp_mem.saving.complete import complete
from dcp_mem.saving.stage import stage
from dcp_mem.saving.values import (
    Agreed,
    Completed,
    NoCommonPlan,
    Planned,
    SaveContext,
    Unplanned,
)

Plan = Callable[[SaveContext], Planned | Unplanned]
"""Returns this rank's part of a save. Asked again once the ranks have found a plan in common."""

FindCommonPlan = Callable[[SaveContext, str, str], bool]
"""Has the next plan fit together with that of the other ranks, which all call this.

By why they must leave the save to DCP's planner, and the id of a plan that fits on all of them; ""
for neither. Returns False where they can't, for the NoCommonPlan that says this.
"""


@dataclass(frozen=True, slots=True)
class Settled:
    """A save that all ranks have settled on, and that has written nothing yet."""

    planned: Planned
    agreed: Agreed


def save(
    context: SaveContext, plan: Plan, find_common_plan: FindCommonPlan | None = None
) -> Completed | None:
    """Save what is planned, on all ranks together; return once it is complete in memory.

    What goes wrong on one rank before an exchange travels with the exchange, so that all ranks
    raise together and none is left waiting (invariant 8).

    Returns None where the save was skipped: memory was full. Raises Exception.
    """
    settled = settle(context, plan, find_common_plan)
    return None if settled is None else carry_out(context, settled)


def settle(
    context: SaveContext, plan: Plan, find_common_plan: FindCommonPlan | None = None
) -> Settled | None:
    """Plan until the ranks have a plan in common, and agree on the save.

    1. Plan: this rank's part of the save, and the layout of its segment (`plan.py`).
    2. Agree: all ranks settle on one save, and make room for it (`agree.py`).

    Returns None where the save is skipped: memory is full. Raises NoCommonPlan,
    MemoryBudgetExceeded, CheckpointExists, ConfigError, RankFailed.
    """
    while True:
        planned = attempt(lambda: plan(context))
        try:
            agreed = agree(context, planned)
        except NoCommonPlan as reason:
            # Within the clause, which forgets the reason: its traceback keeps this frame, and with
            # it the state dict, until the cycle collector runs.
            if find_common_plan is None or not find_common_plan(
                context, reason.why_not, reason.in_common
            ):
                raise
            continue
        if agreed is None:
            if context.ranks.rank == 0:
                context.session.memory.note_skipped(context.name, "memory was full")
            return None
        assert isinstance(planned.value, Planned)  # agree has raised for all else
        return Settled(planned.value, agreed)


def carry_out(context: SaveContext, settled: Settled) -> Completed:
    """Carry out what the ranks have settled on; return once the checkpoint is complete in memory.

    1. Stage: this rank's items are copied into a segment (`stage.py`).
    2. Complete: receipts, catalog, and the manifest on every node (`complete.py`).
    3. Background: flush, copies, slots for the next saves (`background.py`).

    Raises MemoryBudgetExceeded, RankFailed.
    """
    planned, agreed = settled.planned, settled.agreed
    staged = attempt(lambda: stage(context, agreed, planned))
    completed = complete(context, agreed, planned, staged)
    start_background_work(context, completed)
    return completed
