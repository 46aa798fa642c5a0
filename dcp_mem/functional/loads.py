"""`load`: a drop-in for torch's, by plans of dcp_mem's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from dcp_mem.comm.agreement import attempt
from dcp_mem.comm.bridge import torch_plans
from dcp_mem.comm.bridge.errors import raised_as_by_dcp
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log_once
from dcp_mem.errors import ConfigError
from dcp_mem.functional.calls import accepted_by, raised_together, refuse_other_kind
from dcp_mem.functional.stateful import (
    NEVER_STATEFUL,
    States,
    objects_of,
    optional_entries,
    room_makers,
    taking_part,
)
from dcp_mem.loading.dcp_takeover import why_not_own_plan
from dcp_mem.loading.load import casts_of, name_casts, name_left_out, name_missing
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.refusing_planners import RefusingPlanner
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.reader import MemoryStorageReader


@takes()
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
    skip: TensorChoice | None = None,
    strict: bool = True,
) -> None:
    """Load into a state dict, in place, as `torch.distributed.checkpoint.load` does.

    With a MemoryStorageReader each rank plans by itself, and no plan is exchanged. What stateful
    objects say is optional (HasOptional) may be missing in the checkpoint; all else of the state
    dict has to be there.

    Args:
        state_dict: What to load into, item by item; stateful objects are given theirs.
        checkpoint_id: Name of the checkpoint.
        storage_reader: A MemoryStorageReader; any other goes through torch's planner.
        planner: Default dcp_mem's own. A planner of your own unpickles byte items as it likes.
        process_group: The ranks that load together; default all.
        no_dist: Load alone.
        weights_only: Refuse items that could run code when unpickled (UntrustedObject): byte items,
            and tensors of classes that torch doesn't know. False loads whatever was saved.
        skip: Tensors that this rank has already, as a frozen base that was loaded from elsewhere:
            names or patterns ("model.base.*") of the flattened state dict, or a function of name
            and tensor. They stay as they are, and the checkpoint may lack them.
        strict: False loads what there is: what the checkpoint lacks stays as it is. The reader's
            report has the names, `missing` and `left_out`, of all ranks together.

    Raises:
        ConfigError: state_dict is no dict, or storage_reader no reader; skip= is of another kind;
            skip= or strict=False is given with a planner of one's own.
        CheckpointException: The load has failed, on all ranks, as from dcp.load. Its `failures`
            have this rank's own error, and a RankFailed for each other rank that failed. The error
            is EntriesMissing where the checkpoint lacks what this rank asks for.
        Exception: A stateful object's `state_dict` or `load_state_dict` raised it on this rank.
    """
    refuse_other_kind(
        "storage_reader", storage_reader, StorageReader, "read_data", "MemoryStorageReader(path)"
    )
    state_dict = taking_part(state_dict)
    # Sorted: stateful objects may wait for each other's ranks.
    keys = sorted(state_dict)
    ordered = {key: state_dict[key] for key in keys}
    usual = partial(
        LocalLoadPlanner,
        weights_only=weights_only,
        optional=optional_entries(ordered),
        room_for=room_makers(ordered),
        objects=objects_of(ordered),
        skip=skip,
        strict=strict,
    )
    if planner is None:
        planner = usual()
    elif isinstance(planner, DefaultLoadPlanner) and not why_not_own_plan(planner):
        planner = usual(allow_partial_load=planner.allow_partial_load)
    states = States(ordered)
    plans_alone = isinstance(planner, LocalLoadPlanner) and not torch_plans()
    if isinstance(storage_reader, MemoryStorageReader) and plans_alone:
        assert isinstance(planner, LocalLoadPlanner)
        group = process_group if process_group is not None else storage_reader._process_group
        with raised_as_by_dcp("load", group, no_dist, states.has_raised_or_left_to_torch):
            loaded = storage_reader._load_collectively(
                states.make, checkpoint_id, process_group, no_dist, planner
            )
    else:
        if not isinstance(storage_reader, MemoryStorageReader):
            why = "the storage_reader isn't a MemoryStorageReader"
            log_once(f"dcp_mem.load leaves loads to dcp.load: {why}")
        made = attempt(partial(_checked, states, planner, skip, strict=strict))
        loaded = made.value if made.error is None else {}
        restrictions: AbstractContextManager[None] = nullcontext()
        if isinstance(storage_reader, MemoryStorageReader):
            restrictions = storage_reader._unpickling(weights_only=weights_only)
        with restrictions, raised_together(made.error):
            dcp.load(
                loaded,
                checkpoint_id=checkpoint_id,
                storage_reader=storage_reader,
                planner=planner if made.error is None else RefusingPlanner(made.error),
                process_group=process_group,
                **accepted_by(dcp.load, no_dist=(no_dist, False)),
            )
        if isinstance(planner, LocalLoadPlanner) and (no_dist or not dist.is_initialized()):
            # Of several ranks, each needn't load all; only our own reader has them compare.
            name_left_out(planner.names_of(planner.left_out()), planner.objects)
            if not isinstance(storage_reader, MemoryStorageReader):
                name_missing(planner.missing)
                name_casts(len(planner.casts), casts_of(planner))
    if isinstance(planner, LocalLoadPlanner):
        planner.take_out_lacking()
    _put_into(state_dict, loaded, keys)


def _checked(
    states: States, planner: LoadPlanner, skip: TensorChoice | None, *, strict: bool
) -> dict[str, Any]:
    """Return the state dict to load into; refuse what its planner can't leave out."""
    if not isinstance(planner, LocalLoadPlanner) and (skip is not None or not strict):
        option = "skip=" if skip is not None else "strict=False"
        raise ConfigError(f"{option} needs dcp_mem's planner or torch's default one")
    return states.make()


def _put_into(state_dict: dict[str, Any], loaded: dict[str, Any], keys: Sequence[str]) -> None:
    """Give what is loaded to the caller's state dict, item by item, as DCP does.

    A dict with a `__setitem__` of its own sees each item. A planner may have added keys, which come
    last.
    """
    for key in keys:
        if key not in state_dict or key not in loaded:
            continue
        value = state_dict[key]
        if type(value) not in NEVER_STATEFUL and isinstance(value, Stateful):
            value.load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]
    known = set(keys)
    for key in [key for key in loaded if key not in known]:
        state_dict[key] = loaded[key]
