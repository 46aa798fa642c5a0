"""A rank's plan of what to read from an opened checkpoint, made by itself: no plan is exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import on_all_ranks
from dcp_mem.common.sharded_tensor import ShardedTensor
from dcp_mem.errors import NotOfOneSave, SegmentCorrupt, UntrustedMetadata
from dcp_mem.format.metadata_by_entry import numel_of
from dcp_mem.format.sizes import refuse_beyond_file
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.sources.base import PEERS
from dcp_mem.memory.cuda_batches import may_copy_to_device
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.reads import DirectRead, ItemRead, Reads, Saved


def plan_together(
    ranks: Ranks,
    opened: OpenCheckpoint,
    planner: DefaultLoadPlanner,
    state: Callable[[], dict[str, Any]],
    *,
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan, once every rank has one; one all-reduce.

    `state`: returns what to load into, or raises why there is none. Raises Exception, RankFailed.
    """
    return on_all_ranks(
        ranks,
        f"planning the load of {opened.choice.name}",
        lambda: plan_alone(opened, planner, state(), is_coordinator),
    )


def plan_alone(
    opened: OpenCheckpoint,
    planner: DefaultLoadPlanner,
    state: dict[str, Any],
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan: by the catalog where that will do, else as DCP has it.

    Raises Exception.
    """
    known = opened.description
    if known.catalog is not None and isinstance(planner, LocalLoadPlanner):
        into_devices = may_copy_to_device()
        reads = planner.plan(
            state, known.catalog, known.save_id, known.tails, into_devices=into_devices
        )
        if reads is not None:
            return reads
    planner.set_up_planner(state, opened.metadata, is_coordinator)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    return planner.finish_plan(plan)


def plan_again(
    ranks: Ranks,
    opened: OpenCheckpoint,
    planner: LoadPlanner,
    written: Collection[str],
    *,
    is_coordinator: bool,
) -> LoadPlan | Reads:
    """Return this rank's plan for another checkpoint than the planner has planned for.

    `written`: names of what may have been read of other checkpoints, which the plan has to cover:
    the state would be of two checkpoints. Raises NotOfOneSave, Exception, RankFailed.
    """
    assert isinstance(planner, DefaultLoadPlanner)
    begins_anew = isinstance(planner, _EmptyStateDictLoadPlanner)  # it fills the state dict

    def plan() -> LoadPlan | Reads:
        state: dict[str, Any] = planner.original_state_dict
        if begins_anew:
            state.clear()
        found = plan_alone(opened, planner, state, is_coordinator)
        left = set(written).difference(planned_names(found), _taken_out(planner))
        if left and not begins_anew:
            raise NotOfOneSave(opened.choice.name, sorted(left))
        return found

    return on_all_ranks(ranks, f"planning the load of {opened.choice.name}", plan)


def planned_names(plan: LoadPlan | Reads) -> set[str]:
    """Return the flattened names of what a rank is to read."""
    if isinstance(plan, Reads):
        return {one.request.dest_index.fqn for one in plan.everything()}
    return {request.dest_index.fqn for request in plan.items}


def _taken_out(planner: LoadPlanner) -> Collection[str]:
    """Return the names of optional entries that the checkpoint lacks: they leave the state dict."""
    return planner.lacking_names if isinstance(planner, LocalLoadPlanner) else ()


def plans_alone(planner: LoadPlanner) -> bool:
    """Return whether ranks may plan again by themselves.

    They may where the global plan exchanges nothing, as that of torch's default planner.
    """
    default: Callable[..., Any] = DefaultLoadPlanner.create_global_plan
    return isinstance(planner, DefaultLoadPlanner) and type(planner).create_global_plan is default


# -- what torch's plans say ------------------------------------------------------------------------


def reads_of(opened: OpenCheckpoint, plan: LoadPlan, planner: LoadPlanner) -> Reads:
    """Return what a plan of torch's reads, item by item, by DCP's metadata.

    Raises UntrustedMetadata, SizeRefused, SegmentCorrupt.
    """
    _refuse_gaps(opened, plan, planner)
    items = list(_items_of(opened, plan))
    none = np.empty(0, np.int64)
    return Reads(
        files=(),
        payloads=DirectRead(file=none, address=none, offset=none, nbytes=none, device=none),
        rest=lambda: items,
        items_beside_host=lambda: items,
        everything=lambda: items,
        casts={},
    )


def _refuse_gaps(opened: OpenCheckpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Raise SegmentCorrupt where the checkpoint lacks a part of a tensor that is to be loaded.

    Torch leaves such a part as it was. Tensors of another size are the planner's own business.
    """
    if not isinstance(planner, DefaultLoadPlanner):
        return
    found: Counter[str] = Counter()
    for request in plan.items:
        found[request.dest_index.fqn] += prod(request.lengths)
    for name, saved in opened.metadata.state_dict_metadata.items():
        tensor: Any = planner.state_dict.get(name)
        if not isinstance(saved, TensorStorageMetadata) or not hasattr(tensor, "size"):
            continue
        held = numel_of(saved.chunks)
        if held < prod(saved.size) and tensor.size() == saved.size:
            wanted = _local_elements(tensor)
            if found[name] < wanted:
                lack = f"it has {found[name]} of the {wanted} elements of {name} that are wanted"
                raise _corrupt(opened, lack)


def _local_elements(tensor: Any) -> int:
    """Return how many elements of a tensor this rank holds."""
    if isinstance(tensor, ShardedTensor):
        return sum(shard.tensor.numel() for shard in tensor.local_shards())
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel()


def _corrupt(opened: OpenCheckpoint, detail: str) -> SegmentCorrupt:
    source = opened.sources[0].label if opened.sources else PEERS
    return SegmentCorrupt(opened.choice.name, 0, source, detail)


def _items_of(opened: OpenCheckpoint, plan: LoadPlan) -> Iterator[ItemRead]:
    metadata, file_nbytes = opened.metadata, opened.description.file_nbytes
    for request in plan.items:
        info = metadata.storage_data.get(request.storage_index)
        if info is None:
            missing = f"its metadata doesn't say where {request.storage_index.fqn} lies"
            raise _corrupt(opened, missing)
        if "/" in info.relative_path or info.relative_path in ("", "..", "."):
            raise UntrustedMetadata(
                f"metadata that names a file outside of the checkpoint: {info.relative_path}"
            )
        if file_nbytes is not None:
            _refuse_beyond_file(opened, info, file_nbytes, request)
        transforms = getattr(info, "transform_descriptors", None) or ()
        yield ItemRead(
            request=request,
            file=info.relative_path,
            offset=info.offset,
            length=info.length,
            saved=_saved(metadata, request),
            transforms=transforms,
        )


def _refuse_beyond_file(
    opened: OpenCheckpoint, info: Any, file_nbytes: Mapping[str, int], request: ReadItem
) -> None:
    """Hold an item of a checkpoint that torch's own writer made against its file's size."""
    file = info.relative_path
    if file not in file_nbytes:
        raise _corrupt(opened, f"{file} does not exist")
    what = f"{request.storage_index.fqn} in {file} of checkpoint {opened.choice.name!r}"
    refuse_beyond_file(info.offset, info.length, file_nbytes[file], what)


def _saved(metadata: Metadata, request: ReadItem) -> Saved | None:
    """Return dtype and shape of a chunk as it was saved; None for what isn't a tensor."""
    known = metadata.state_dict_metadata.get(request.storage_index.fqn)
    if not isinstance(known, TensorStorageMetadata):
        return None
    chunks, hint, offset = known.chunks, request.storage_index.index, request.storage_index.offset
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == offset:
        return known.properties.dtype, chunks[hint].sizes
    return next(
        ((known.properties.dtype, chunk.sizes) for chunk in chunks if chunk.offsets == offset), None
    )
