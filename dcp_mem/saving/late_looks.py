"""What a warm overlapped save looks at behind its call, as the save before has looked at it.

Parameters and optimizer state lie, from save to save, where the last save has found them. Then the
call takes the state dict apart, holds their memory, and copies what may change at any time. What
the tensors in that memory are like is looked at behind the call, before any of them is copied. A
save whose tensors aren't those of the plan fails: nothing is copied that hasn't been looked at.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
import torch
from torch.optim import Optimizer

from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError
from dcp_mem.memory.copying import Chosen, Columns, addresses_of
from dcp_mem.planning.plain_tensors import Sources, Where, lacks_memory, where
from dcp_mem.planning.state_structure import Collected, Structure
from dcp_mem.saving.overlap import Overlap, parameters_of, why_not_later
from dcp_mem.saving.values import Later

_REQUIRES_GRAD, _STORAGE = operator.attrgetter("requires_grad"), torch.Tensor.untyped_storage


@value_class(kw_only=True)
class LastOverlap:
    """Where an overlapped save found what it left to the background; it keeps none of that."""

    optimizers: Sequence[weakref.ref[Optimizer]]
    parameters: Sequence[weakref.ref[torch.Tensor]]
    requires_grad: Sequence[bool]  # of each parameter
    is_written: Chosen  # of each tensor of the plan, whether this rank writes it
    is_later: Chosen  # of those, whether it was left
    addresses: Columns  # of what was left
    storages: Sequence[weakref.ref[torch.UntypedStorage]]

    @classmethod
    def of(
        cls,
        overlap: Overlap,
        is_written: Sequence[bool],
        tensors: Sequence[torch.Tensor],
        addresses: Columns,
        is_later: Chosen,
    ) -> LastOverlap | None:
        """Return what the next save may go by; None where it has to look at all of its tensors.

        `tensors`: those that this rank writes, at these `addresses`.
        """
        if torch.cuda.is_initialized() or overlap.validate or not is_later.any():
            return None
        parameters = parameters_of(overlap.optimizers)
        storages = map(_STORAGE, compress(tensors, is_later.tolist()))
        return cls(
            optimizers=list(map(weakref.ref, overlap.optimizers)),
            parameters=list(map(weakref.ref, parameters)),
            requires_grad=list(map(_REQUIRES_GRAD, parameters)),
            is_written=np.array(is_written),
            is_later=is_later,
            addresses=addresses[is_later],
            storages=list(map(weakref.ref, storages)),
        )

    def left_again(
        self, overlap: Overlap, structure: Structure, found: Collected, nbytes: Columns
    ) -> tuple[Sources, Later] | None:
        """Return where a state dict's tensors lie, and which of them are looked at later.

        `nbytes`: of the tensors that this rank writes. Returns None where the optimizers are
        others, where what was left lies elsewhere, and where the rest doesn't fit the plan.
        """
        parameters = parameters_of(overlap.optimizers)
        if (
            overlap.validate
            or torch.cuda.is_initialized()
            or not _are(overlap.optimizers, self.optimizers)
            or not _are(parameters, self.parameters)
            or list(map(_REQUIRES_GRAD, parameters)) != self.requires_grad
            or why_not_later(overlap.optimizers, ())
        ):
            return None
        tensors = list(compress(structure.tensors_of(found.values), self.is_written.tolist()))
        left = list(compress(tensors, self.is_later.tolist()))
        # What lies at an address, while the storage lives that it was in, lies in that storage.
        storages = [one for reference in self.storages if (one := reference()) is not None]
        if len(storages) < len(left) or (addresses_of(left) != self.addresses).any():
            return None
        at_once = list(compress(tensors, (~self.is_later).tolist()))
        place = np.flatnonzero(self.is_written)
        addresses = np.empty(len(tensors), np.int64)
        addresses[self.is_later], addresses[~self.is_later] = self.addresses, addresses_of(at_once)
        look = _LateLook(
            structure,
            found,
            left,
            storages,
            self.addresses,
            nbytes[self.is_later],
            place[self.is_later],
        )
        if at_once:
            left_out = np.ones(len(self.is_written), bool)
            left_out[place[~self.is_later]] = False
            if any(map(lacks_memory, at_once)) or not look.are_alike(left_out):
                return None
        return Sources(tensors=tensors, addresses=addresses.tolist()), Later(
            self.is_later, storages, look.check
        )


def _are(objects: Sequence[object], known: Sequence[Callable[[], object]]) -> bool:
    return len(objects) == len(known) and all(
        map(operator.is_, objects, [reference() for reference in known])
    )


@value_class
class _LateLook:
    """The look at tensors whose save has returned, and at the memory that was held in the call."""

    structure: Structure
    found: Collected
    tensors: Sequence[torch.Tensor]  # those that are looked at; what follows is of each
    storages: Sequence[torch.UntypedStorage]
    addresses: Columns
    nbytes: Columns
    places: Columns  # in the plan's tensors

    def check(self) -> None:
        """Raise DcpMemError unless the tensors are those of the plan.

        A tensor that was given other memory meanwhile (`parameter.data = …`) is saved as it was.
        All that is known of it is that it lay, in the call, where the last save had found it.
        """
        for _ in range(2):  # another may be given other memory during the first look
            is_moved = addresses_of(self.tensors) != self.addresses
            left_out = np.ones(self.structure.tensor_count, bool)
            left_out[self.places[~is_moved]] = False
            moved = np.flatnonzero(is_moved).tolist()
            if self.are_alike(left_out) and all(map(self._is_there, moved)):
                return
        raise DcpMemError(
            "the shape, dtype or kind of parameters or optimizer state has changed since the last "
            "save, within the same memory. The next save looks at all of them in its call"
        )

    def are_alike(self, left_out: Chosen) -> bool:
        """Return whether the plan's tensors, but for some, fit it and can be copied as bytes."""
        lie: set[Where | None] = set()

        def look_at(start: int, block: Sequence[torch.Tensor], known: Where | None) -> None:
            wanted = (~left_out[start : start + len(block)]).tolist()
            lie.add(known or where(list(compress(block, wanted))))

        return self.structure.are_alike(self.found, look_at, left_out) and lie <= {Where.HOST}

    def _is_there(self, number: int) -> bool:
        """Return whether the memory that is held has all that is to be copied."""
        address, start = int(self.addresses[number]), self.storages[number].data_ptr()
        end = start + self.storages[number].nbytes()
        return start <= address and address + int(self.nbytes[number]) <= end
