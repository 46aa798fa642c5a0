"""Attributes by which a tensor of torch's own classes is of another kind to torch's planner.

Since torch 2.14 a plain tensor with the fields of `CheckpointableTensor` is a shard. With any torch
an object may have methods of its own that plan it. Both may be set on a single tensor, so its class
doesn't tell. What has such a mark is planned by torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dcp_mem.planning.plain_tensors import PLAIN

METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
"""Methods by which an object plans itself: its items, its chunks, where a chunk's values lie."""

FIELDS: tuple[str, ...] = tuple(
    getattr(getattr(dcp, "CheckpointableTensor", None), "__annotations__", ())
)
"""What makes a shard of a tensor that has all of them; before torch 2.14 nothing does."""

_FIELD = tuple(sorted(FIELDS)[:1])  # a tensor without it lacks one of them
MARKS = (*METHODS, *_FIELD)
SAVE_MARKS = ("__create_write_items__", *_FIELD)
"""Those by which torch's planner tells what to save: a look at each name costs every save."""

_ATTRIBUTES = operator.attrgetter("__dict__")


def are_marked(tensors: Sequence[torch.Tensor], marks: Sequence[str] = MARKS) -> bool:
    """Return whether any of these has any of the marks; DTensors have them by their class."""
    # A loop in C for each name that makes no objects: some 40 ns for each tensor.
    return any(any(map(hasattr, tensors, repeat(mark))) for mark in marks)


def have_own_marks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any of these has a mark of its own, whatever its class has."""
    return not set(MARKS).isdisjoint(chain.from_iterable(map(_ATTRIBUTES, tensors)))


def mark_of(tensor: torch.Tensor) -> str:
    """Return a mark of one tensor; "" where it has none."""
    if type(tensor) in PLAIN:
        return next((mark for mark in MARKS if hasattr(tensor, mark)), "")
    return next((mark for mark in MARKS if mark in _ATTRIBUTES(tensor)), "")


def fields_of(value: Any) -> Mapping[str, Any]:
    """Return those fields that a tensor has of its own, and not by its class."""
    if not FIELDS or not isinstance(value, torch.Tensor):
        return {}
    attributes = _ATTRIBUTES(value)
    return {field: attributes[field] for field in FIELDS if field in attributes}


def set_fields(tensor: torch.Tensor, fields: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor, with these fields of its own."""
    for field, value in fields.items():
        setattr(tensor, field, value)
    return tensor
