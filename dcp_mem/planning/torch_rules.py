"""Specimens of a state dict, held against torch's own planner.

dcp_mem plans by rules of its own, which have to come to what torch's planner would plan. A newer
torch may know kinds that dcp_mem doesn't. So torch is asked about a few values of each state dict
that is new: one of each kind, as far as kinds can be told apart. If torch plans one of them
otherwise, torch plans the whole.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from dcp_mem.common.log import log
from dcp_mem.format.catalog import Ints
from dcp_mem.format.torch_names import dtype_named
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, NotDescribable, numbered

_MOST = 24
"""Specimens: torch takes most of a millisecond for a DTensor."""

_ATTRIBUTES = operator.attrgetter("__dict__")
_Item = tuple[Any, ...]


def refuse_other_save(plan: LocalPlan, leaves: Sequence[Any]) -> None:
    """Raise NotDescribable where torch would save a specimen otherwise; warn once."""
    try:
        _hold(_written_by_torch, plan, leaves, np.arange(len(leaves)))
    finally:
        gc.collect(1)  # torch 2.6 leaves cycles that hold the values


def refuse_other_load(plan: LocalPlan, leaves: Sequence[Any]) -> None:
    """Raise NotDescribable where torch would load into a specimen otherwise; warn once.

    `leaves`: in the order of `plan.names`. Those that aren't tensors are what was saved.
    """
    counts = np.bincount(plan.name[plan.kind != ItemKind.OBJECT])
    _hold(_read_by_torch, plan, leaves, np.flatnonzero(counts))


def _hold(
    ask: Callable[[_Specimens], Mapping[str, list[_Item]]],
    plan: LocalPlan,
    leaves: Sequence[Any],
    numbers: Ints,
) -> None:
    specimens = _Specimens(plan, leaves, numbers)
    try:
        expected = ask(specimens)
    except Exception as error:  # torch will raise it where all ranks hear of it
        _refuse(f"{', '.join(specimens.names[:3])}: torch refuses them ({error})")
    for name in dict.fromkeys((*specimens.names, *expected)):
        ours, torchs = specimens.items.get(name), expected.get(name)
        if ours is None or torchs is None or sorted(ours) != sorted(torchs):
            _refuse(f"{name}: {_described(torchs)} to torch, {_described(ours)} to dcp_mem")


def _refuse(what: str) -> None:
    text = f"torch {torch.__version__} plans it otherwise than dcp_mem would: {what}"
    _warn(text)
    raise NotDescribable(text)


@cache
def _warn(text: str) -> None:
    log.warning("torch plans what follows, which takes longer: %s", text)


def _described(items: Sequence[_Item] | None) -> str:
    if items is None:
        return "no entry"
    shown = ", ".join(
        "bytes" if size is None else f"{list(extent)} at {list(offset)} of {list(size)}"
        for _, size, offset, extent in items[:2]
    )
    return f"{len(items)} items ({shown})" if items else "nothing of this rank's"


class _Specimens:
    """Values of a state dict: the first of each kind, by what can be told of all at once.

    `items`: what dcp_mem plans for each: kind, and size, offset and extent of a tensor. `paths`: of
    each, in the state dict. `dtypes`: of each that is a tensor with an item.
    """

    def __init__(self, plan: LocalPlan, leaves: Sequence[Any], numbers: Ints) -> None:
        chosen = _chosen(plan, leaves, numbers)
        self.names = [plan.names[number] for number in chosen]
        self.leaves = {plan.names[number]: leaves[number] for number in chosen}
        self.paths = {plan.names[number]: plan.paths[number] for number in chosen}
        self.items: dict[str, list[_Item]] = {name: [] for name in self.names}
        self.dtypes: dict[str, torch.dtype] = {}
        for row in np.flatnonzero(np.isin(plan.name, chosen)).tolist():
            name, kind = plan.names[plan.name[row]], ItemKind(plan.kind[row])
            if kind is ItemKind.OBJECT:
                self.items[name].append((kind, None, None, None))
                continue
            within = slice(int(plan.dimensions[row]))
            box = (tuple(side[row, within].tolist()) for side in _sides(plan))
            self.items[name].append((kind, *box))
            self.dtypes[name] = dtype_named(plan.table[plan.properties[row]].dtype)


def _sides(plan: LocalPlan) -> tuple[Ints, Ints, Ints]:
    return plan.size, plan.offset, plan.extent


def _chosen(plan: LocalPlan, leaves: Sequence[Any], numbers: Ints) -> list[int]:
    """Return the first of each kind: class, attributes, and how its items look in the plan."""
    kinds, classes = numbered(map(type, leaves))
    key = np.array(kinds, np.int64)
    tensors = np.array([issubclass(kind, torch.Tensor) for kind in classes], bool)[key]
    # Of other objects, whatever they carry: torch asks those about one method alone.
    attributes = np.full(len(leaves), -1, np.int64)
    own = list(map(_ATTRIBUTES, compress(leaves, tensors.tolist())))
    attributes[tensors] = numbered(map(tuple, own))[0] if any(own) else 0
    first = np.flatnonzero(np.diff(plan.name, prepend=-1))
    found = plan.name[first]
    looks = np.full((len(plan.names), 4), -1, np.int64)
    cut = (plan.extent != plan.size)[first] @ (1 << np.arange(plan.size.shape[1]))
    columns = [plan.kind[first], plan.properties[first], plan.dimensions[first], cut]
    looks[found] = np.stack(columns, axis=1)
    for column in (attributes, *looks.T):
        key = key * (int(column.max(initial=0)) + 2) + column + 1
    chosen = numbers[np.unique(key[numbers], return_index=True)[1]]
    return np.sort(chosen)[:_MOST].tolist()  # type: ignore[no-any-return]


def _written_by_torch(specimens: _Specimens) -> dict[str, list[_Item]]:
    """Return what torch's default planner would write for these, by name."""
    state: dict[str, Any] = {}
    for name, leaf in specimens.leaves.items():
        path = [part for part in specimens.paths[name] if isinstance(part, str)]
        if len(path) < len(specimens.paths[name]):
            path = [name]  # whether a list is taken apart depends on what else it holds
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = leaf
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    result: dict[str, list[_Item]] = {name: [] for name in planner.mappings}
    plan = create_default_local_save_plan(planner.state_dict, is_coordinator=False)
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            found: _Item = (ItemKind.OBJECT, None, None, None)
        else:
            kind = ItemKind.SHARD if item.type is WriteItemType.SHARD else ItemKind.TENSOR
            found = (kind, *map(tuple, (data.size, data.chunk.offsets, data.chunk.sizes)))
        result.setdefault(item.index.fqn, []).append(found)
    return result


def _read_by_torch(specimens: _Specimens) -> dict[str, list[_Item]]:
    """Return what torch's default planner would read into these, of a checkpoint that fits them.

    What it reads tells nothing of the kind of an item, and nothing of chunks without elements.
    """
    saved = {name: specimens.items[name] for name in specimens.dtypes}
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=specimens.dtypes[name]),
                torch.Size(items[0][1]),
                [ChunkStorageMetadata(torch.Size([0] * len(items[0][1])), torch.Size(items[0][1]))],
            )
            for name, items in saved.items()
        }
    )
    asked = create_default_local_load_plan(
        {name: leaf for name, leaf in specimens.leaves.items() if name in saved}, metadata
    )
    result = {
        name: [one for one in items if 0 in one[3]] for name, items in specimens.items.items()
    }
    for item in asked.items:
        if 0 not in item.lengths:
            kind, size = saved[item.dest_index.fqn][0][:2]
            chunk = tuple(item.dest_index.offset or ()), tuple(item.lengths)
            result[item.dest_index.fqn].append((kind, size, *chunk))
    return result
