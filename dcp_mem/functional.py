"""`dcp_mem.save` and `dcp_mem.load`: drop-ins for torch's, by plans of dcp_mem's own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor

from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.saving.values import NoCommonPlan
from dcp_mem.writer import MemoryStorageWriter

_NEVER_STATEFUL = frozenset(
    {
        torch.Tensor,
        torch.nn.Parameter,
        DTensor,
        dict,
        list,
        tuple,
        str,
        int,
        float,
        bool,
        type(None),
    }
)


@runtime_checkable
class HasOptional(Protocol):
    """A stateful object that can do without some entries of its state dict."""

    def is_optional(self, key: str) -> bool:
        """Return whether a checkpoint may lack this entry, or have it where the state dict hasn't.

        The object's `load_state_dict` gets a state dict without what is lacking.

        Args:
            key: The keys of the dicts that lead to the entry, all of them texts, joined by dots
                ("rng.rank-3"). An entry of a list is never optional.
        """


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state dict as `torch.distributed.checkpoint.save` does, by a plan of dcp_mem's own.

    The first save of a structure plans it with all ranks. While names, shapes, dtypes and sharding
    stay the same on every rank, later saves only agree that they do; any change is noticed, and
    planned again. The files are those that dcp.save with the same writer makes, and load with
    everything that loads those.

    What dcp_mem can't plan (planners of your own, nested ShardedTensors, other tensor subclasses)
    goes through torch's planner, on all ranks alike, and the log says why.

    Args:
        state_dict: What to save; stateful objects are asked for theirs.
        checkpoint_id: Name of the checkpoint.
        storage_writer: A MemoryStorageWriter; any other goes through torch's planner.
        planner: Default torch's.
        process_group: The ranks that save together; default all.
        no_dist: Save alone.
        use_collectives: As in dcp.save, which False leaves the save to.

    Returns:
        The checkpoint's metadata, made when it is first looked at.

    Raises:
        Exception: What dcp.save raises, without wrapping it in CheckpointException.
    """
    why_not = _why_not(storage_writer, planner, use_collectives)
    if not why_not:
        assert isinstance(storage_writer, MemoryStorageWriter)
        make_state = partial(_without_stateful, state_dict)
        try:
            return storage_writer._save_collectively(
                make_state, checkpoint_id, process_group, no_dist
            )
        except NoCommonPlan as reason:
            why_not = reason.why_not
    log.info("%s is planned by torch: %s", checkpoint_id, why_not)
    metadata: Metadata = dcp.save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        **_accepted(dcp.save, no_dist=(no_dist, False), use_collectives=(use_collectives, True)),
    )
    return metadata


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
) -> None:
    """Load into a state dict, in place, as `torch.distributed.checkpoint.load` does.

    With a MemoryStorageReader each rank plans by itself, and no plan is exchanged. What stateful
    objects say is optional (HasOptional) may be missing in the checkpoint; all else of the state
    dict has to be there.

    Args:
        state_dict: What to load into; stateful objects are given theirs.
        checkpoint_id: Name of the checkpoint.
        storage_reader: A MemoryStorageReader; any other goes through torch's planner.
        planner: Default dcp_mem's own. A planner of your own decides for itself what it unpickles.
        process_group: The ranks that load together; default all.
        no_dist: Load alone.
        weights_only: Refuse byte items that could run code when unpickled (UntrustedObject). False
            loads whatever was saved, as torch's planner does.

    Raises:
        Exception: What dcp.load raises, without wrapping it in CheckpointException; on all ranks or
            on none.
    """
    # Sorted: stateful objects may wait for each other's ranks.
    ordered = {key: state_dict[key] for key in sorted(state_dict)}
    usual = partial(LocalLoadPlanner, weights_only=weights_only, optional=_optional(ordered))
    if planner is None:
        planner = usual()
    elif (
        type(planner) is DefaultLoadPlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
    ):
        planner = usual(allow_partial_load=planner.allow_partial_load)
    make_state = partial(_without_stateful, ordered)
    if isinstance(storage_reader, MemoryStorageReader) and isinstance(planner, LocalLoadPlanner):
        plain = storage_reader._load_collectively(
            make_state, checkpoint_id, process_group, no_dist, planner
        )
    else:
        log.info(
            "%s is planned by torch: its reader or planner isn't dcp_mem's or the default",
            checkpoint_id,
        )
        plain = make_state()
        dcp.load(
            plain,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            **_accepted(dcp.load, no_dist=(no_dist, False)),
        )
    if isinstance(planner, LocalLoadPlanner):
        planner.take_out_lacking()
    for key in _stateful_keys(ordered):
        ordered[key].load_state_dict(plain.pop(key))
    state_dict.update(plain)


def _accepted(function: Callable[..., Any], **options: tuple[bool, bool]) -> dict[str, bool]:
    """Return the options that this torch's function has, each given as (value, default).

    Raises ConfigError for one that it hasn't, and that isn't the default.
    """
    known = inspect.signature(function).parameters
    for name, (value, default) in options.items():
        if name not in known and value != default:
            raise ConfigError(f"{name}={value} needs a newer torch")
    return {name: value for name, (value, _) in options.items() if name in known}


def _without_stateful(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the states of stateful objects in their place."""
    keys = _stateful_keys(state)
    return {**state, **{key: state[key].state_dict() for key in keys}} if keys else state


def _stateful_keys(state: dict[str, Any]) -> list[str]:
    if _NEVER_STATEFUL.issuperset(map(type, state.values())):
        return []
    # Asking a tensor whether it is an instance of the protocol takes 20 µs.
    return [
        key
        for key, value in state.items()
        if type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)
    ]


def _optional(state: dict[str, Any]) -> Callable[[str], bool] | None:
    """Return what tells whether an entry, by its flattened name, may be missing; None: none may."""
    objects = [
        (f"{key}.", state[key])
        for key in _stateful_keys(state)
        if isinstance(state[key], HasOptional)
    ]

    def is_optional(name: str) -> bool:
        return any(
            name.startswith(prefix) and value.is_optional(name[len(prefix) :])
            for prefix, value in objects
        )

    return is_optional if objects else None


def _why_not(
    writer: StorageWriter | None, planner: SavePlanner | None, use_collectives: bool
) -> str:
    """Return why a save needs torch's planner; "" where it doesn't. The same on all ranks."""
    if not isinstance(writer, MemoryStorageWriter):
        return "the storage_writer isn't a MemoryStorageWriter"
    if not use_collectives:
        return "use_collectives=False"
    if planner is None:
        return ""
    if type(planner) is not DefaultSavePlanner:
        return f"a planner of its own, {type(planner).__name__}"
    usual = (
        planner.flatten_state_dict
        and planner.flatten_sharded_tensors
        and not planner.dedup_save_to_lowest_rank
    )
    return "" if usual else "DefaultSavePlanner with options"
