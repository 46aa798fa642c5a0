"""Eager copies: a save in the call, such as `dcp.save`, copies while its ranks agree.

Where a state dict is recognised and a slot is free, its tensors are copied in the background from
the moment that this rank has begun. So a rank that is early copies while it waits for the others,
and the agreement of many ranks costs next to nothing. What has been copied is sealed once all have
agreed, or else given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.memory.copying import Chosen, Columns, StillAtWork, WorkUnderWay, copies_of
from dcp_mem.memory.device_copies import DeviceCopies
from dcp_mem.policy.slots import SlotNeed, growth
from dcp_mem.runtime.last_saves import SavedPlan
from dcp_mem.saving.ahead import AheadCopy
from dcp_mem.saving.own_plans import OwnPlanItems
from dcp_mem.saving.plan import claims_of
from dcp_mem.saving.stage import fill
from dcp_mem.saving.values import (
    Agreed,
    CatalogSource,
    Planned,
    SaveContext,
    Staged,
    Unplanned,
)

LEAST_NBYTES = 8 << 20
"""Below this, handing over to a thread costs more than it gains."""


class EagerItems:
    """The items of a state dict, copied while the ranks agree: an ItemProvider for one save.

    Leave its context once the save has ended: it gives back what wasn't sealed.

    `items`: plans the save, and stages it where nothing is copied eagerly.
    """

    def __init__(self, items: OwnPlanItems) -> None:
        self._items = items
        self._planned: Planned | None = None
        self._ahead: AheadCopy | None = None

    def plan(self, context: SaveContext) -> Planned | Unplanned:
        """Recognise the state dict and begin to copy it, or look at its structure."""
        planned = self._items.plan(context)
        if isinstance(planned, Unplanned) or not _is_copied_eagerly(context, planned):
            return planned
        self._planned, self._ahead = planned, _begun(context, planned)
        return planned if self._ahead is None else self._ahead.plan(context)

    def find_common_plan(self, context: SaveContext, why_not: str, in_common: str) -> bool:
        """Give back what was copied by a plan that doesn't fit all ranks; find one that does."""
        self.give_back()
        return self._items.find_common_plan(context, why_not, in_common)

    def stage(self, context: SaveContext, agreed: Agreed, planned: Planned) -> Staged:
        """Seal what has been copied, or copy now."""
        ahead = self._ahead
        if ahead is None:
            return self._items.stage(context, agreed, planned)
        if ahead.is_there:
            return ahead.stage(context, agreed, planned)
        # A signal handler, say, has saved meanwhile in this thread, which ended this save's turn.
        assert self._planned is not None
        return self._items.stage(context, agreed, self._planned)

    def has_changed(self, saved: SavedPlan | None) -> bool:
        """Return whether the plan was made for this save."""
        return self._items.has_changed(saved)

    def catalog_source(self, planned: Planned) -> CatalogSource:
        """Return what makes a catalog of the global plan and the ranks' rows."""
        return self._items.catalog_source(planned)

    def settle(self, saved: SavedPlan) -> None:
        """Do nothing: the plan is kept already."""

    def give_back(self) -> None:
        """Give back the slot of what was copied, unless it is sealed; no thread copies any more."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.give_back()

    def __enter__(self) -> EagerItems:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


def _is_copied_eagerly(context: SaveContext, planned: Planned) -> bool:
    """Tell whether this rank may copy before its ranks have agreed, and gains by it.

    It may where it needs no new memory, which is for all ranks to agree on, and leaves the slots
    that copies from other nodes will need. Where some tensors are frozen, or can't be copied as
    bytes, all are copied afterwards.
    """
    session = context.session
    if planned.sources is None or planned.frozen is not None:
        return False
    if planned.layout.layout.nbytes < LEAST_NBYTES or session.replicator.is_busy:
        return False
    session.prefaulting.stop()
    free = [one for one in session.slots.free() if one.is_held]
    copies = session.last_saves.expected_copies.get(context.group, ())
    return not growth([*claims_of(planned), *map(SlotNeed, copies)], free)


def _begun(context: SaveContext, planned: Planned) -> AheadCopy | None:
    """Begin to copy into a free slot; None where that fails.

    The stage after the agreement meets the error again then, and tells all ranks.
    """
    session, copies = context.session, _EagerCopies(planned)
    session.unsealed.add(copies)
    try:
        filled = fill(session, planned, copies)
    except Exception:
        log.debug("%s is copied once its ranks have agreed", context.name, exc_info=True)
        return None
    ahead = AheadCopy(context, planned, filled, copies)
    session.unsealed.add(ahead)
    return ahead


class _EagerCopies:
    """Makes all copies of a plan in the background: a `Later`.

    `planned`: what is saved; kept, with its tensors, until it has been copied.
    """

    def __init__(self, planned: Planned) -> None:
        self._planned: Planned | None = planned
        self._copies: WorkUnderWay[Callable[[], None]] | None = None
        self._from_devices = DeviceCopies()

    def take(self, destination: Columns, source: Columns, nbytes: Columns) -> Chosen:
        """Begin with all copies, in as many threads as torch uses; none is left."""
        copies = copies_of(destination, source, nbytes)
        self._copies = WorkUnderWay(copies, self._make)
        self._copies.start(min(torch.get_num_threads(), len(copies)))
        return np.zeros(len(nbytes), bool)

    def take_from_devices(self, targets: Columns, sources: Sequence[torch.Tensor]) -> None:
        """Have the devices begin with all copies."""
        self._from_devices.begin(targets, sources)

    def begin(self) -> None:
        """Do nothing: the copies have begun."""

    def finish(self) -> None:
        """Help with the copies until all have been made."""
        if self._copies is not None:
            self._copies.finish()
        self._from_devices.finish()
        self._copies = self._planned = None
        faults.point("eager.copied")

    def cancel(self, then: Callable[[], None]) -> None:
        """Make no further copy, and call `then` once none is being made."""
        try:
            self.give_back()
        except StillAtWork:
            raise  # in the middle of a piece: what is still written to stays claimed
        except BaseException:
            then()
            raise
        then()

    def give_back(self) -> None:
        """Cancel. The slot isn't this object's: `fill`, or the copy ahead, gives it back."""
        try:
            if self._copies is not None:
                self._copies.cancel()
        finally:
            self._from_devices.finish()
        self._copies = self._planned = None

    def _make(self, copy: Callable[[], None]) -> None:
        """Make a copy; whoever does holds this object, and with it the tensors."""
        faults.point("eager.copying")
        copy()
