"""This rank's part of a plan, with the frozen tensors apart: they get a segment of their own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch

from dcp_mem.runtime.frozen import ItemKey
from dcp_mem.saving.frozen import FrozenItems, Split, split, with_known_segment
from dcp_mem.saving.values import Planned, SaveContext


def frozen_apart(
    context: SaveContext,
    planned: Planned,
    keys: Sequence[ItemKey],
    tensors: Sequence[torch.Tensor],
    last: Split | None = None,
) -> tuple[Planned, Split | None]:
    """Return the same part of a plan with the frozen tensors apart, where there are enough of them.

    Returns the part of the plan, and how its tensors were divided; None where they weren't.
    """
    assert context.frozen is not None
    session, whole = context.session, planned.layout
    parts = split(session, context.frozen, keys, tensors, whole, last)
    if parts is None:
        return planned, None
    sources = planned.sources
    is_frozen, is_other = parts.is_frozen, list(map(operator.not_, parts.is_frozen))
    frozen = FrozenItems(
        rows=list(compress(planned.tensors, is_frozen)),
        keys=parts.keys,
        tensors=list(compress(tensors, is_frozen)),
        layout=parts.frozen,
        sources=None if sources is None else sources.only(is_frozen),
        is_lasting=not context.has_copies,  # those of a copy the next save won't find
    )
    if frozen.is_lasting:
        frozen = with_known_segment(session, context.group, frozen)
    others = replace(
        planned,
        tensors=list(compress(planned.tensors, is_other)),
        layout=parts.others,
        nbytes=planned.nbytes - whole.layout.nbytes + parts.others.layout.nbytes,
        sources=None if sources is None else sources.only(is_other),
        frozen=frozen,
        group=context.group,
    )
    return others, parts
