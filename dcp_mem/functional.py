"""`dcp_mem.save`, `async_save` and `load`: drop-ins for torch's, by plans of dcp_mem's own."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_mem.comm.agreement import Attempted, attempt
from dcp_mem.comm.dcp_call import StagingCall, can_save_staged
from dcp_mem.comm.dcp_errors import raised_as_by_dcp
from dcp_mem.common.background import KeptThreads
from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.planning.refusing_planners import RefusingLoadPlanner, RefusingSavePlanner
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.saving.ahead import refused_state
from dcp_mem.saving.dcp_takeover import saves_to_lowest_rank, why_not_own_plan
from dcp_mem.saving.overlap import Overlap, overlap_of
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
        CheckpointException: The save has failed, as from dcp.save. Its `failures` have this rank's
            own error, and a RankFailed for each other rank that failed.
        Exception: A stateful object's `state_dict` raised it on this rank.
    """
    return _save(
        raised_as_by_dcp,
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


def save_or_raise_cause(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save as `save` does, and raise dcp_mem's errors as they are: no CheckpointException.

    For the manager and the integrations.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`.
        process_group: As for `save`.
        no_dist: As for `save`.

    Raises:
        RankFailed: Another rank has failed.
        Exception: This rank has failed.
    """
    return _save(
        _raised_as_is,
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        process_group=process_group,
        no_dist=no_dist,
    )


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overlap: Overlap | Optimizer | Sequence[Optimizer] | None = None,
) -> Any:
    """Save as `torch.distributed.checkpoint.async_save` does: copy, return, save in the background.

    With a MemoryStorageWriter the state dict is copied straight into node memory, once. Saves of
    one process take turns, so several may be under way; each makes the checkpoint that it was
    called for, or raises.

    Args:
        state_dict: What to save; stateful objects are asked for theirs.
        checkpoint_id: Name of the checkpoint.
        storage_writer: A MemoryStorageWriter; any other as with dcp.async_save.
        planner: Default torch's.
        process_group: The ranks that save together; default all.
        async_checkpointer_type: As in dcp.async_save; default threads.
        async_stager: As in dcp.async_save; default the writer.
        no_dist: Save alone.
        use_collectives: As in dcp.async_save.
        overlap: Optimizers (or an `Overlap`) that change parameters and their own state in `step`
            and nowhere else. These are copied behind the next forward and backward passes, and the
            next step of each of the optimizers waits for the copies; all else is copied at once.

    Returns:
        What dcp.async_save returns: a future of the checkpoint's metadata. It raises what dcp.save
        raises.

    Raises:
        ConfigError: overlap= with another writer, with a stager, or without an optimizer.
        Exception: A stateful object's `state_dict` raised it.
    """
    copies: AbstractContextManager[None] = nullcontext()
    if overlap is not None:
        if not isinstance(storage_writer, MemoryStorageWriter) or async_stager is not None:
            raise ConfigError("overlap= needs a MemoryStorageWriter that stages by itself")
        copies = storage_writer._saver.overlapping(overlap_of(overlap))
    made: Attempted[dict[str, Any]] = Attempted((state_dict,))
    if isinstance(storage_writer, MemoryStorageWriter) and async_stager is None:
        made = attempt(lambda: without_stateful(state_dict))
    stages_itself = (
        isinstance(storage_writer, MemoryStorageWriter)
        and type(storage_writer).stage is MemoryStorageWriter.stage
        and async_stager is None
        and (async_checkpointer_type is None or "THREAD" in str(async_checkpointer_type))
        and use_collectives
        and _can_begin_itself(process_group)
    )
    begin = _begin_own if stages_itself else _begin_by_dcp
    with copies:
        begun = begin(
            made.value if made.error is None else refused_state(made.error),
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    if made.error is not None:
        # The other ranks raise it as well, once this one has told them behind training.
        response: Any = begun
        wait([getattr(response, "upload_completion", response)])
        raise made.error
    return begun


def _begin_by_dcp(state_dict: dict[str, Any], **arguments: Any) -> Any:
    """Begin a save as dcp.async_save does."""
    defaults = {
        "async_checkpointer_type": None,
        "async_stager": None,
        "no_dist": False,
        "use_collectives": True,
    }
    options = {name: (arguments.pop(name), default) for name, default in defaults.items()}
    accepted = _accepted(dcp.async_save, **options)
    chosen = {name: value for name, value in accepted.items() if value is not None}
    return dcp.async_save(state_dict, **arguments, **chosen)


def _can_begin_itself(process_group: dist.ProcessGroup | None) -> bool:
    """Tell whether `_begin_own` may stand in for dcp.async_save, which wouldn't refuse the save."""
    if not can_save_staged():
        return False
    if not dist.is_initialized():
        return True
    group = process_group if process_group is not None else dist.group.WORLD
    return torch.device("cpu") in getattr(group, "_device_types", ())


def _begin_own(state_dict: dict[str, Any], **arguments: Any) -> Future[Metadata]:
    """Begin a save as dcp.async_save does with a writer that stages, in half of its time.

    1. Stage: the writer copies the state dict, in this thread.
    2. Save: dcp.save takes what is staged, in another thread.
    """
    save, may_begin = _staged_save(state_dict, **arguments), threading.Event()
    try:
        return _saving.submit(_save_later, may_begin, save)
    finally:
        may_begin.set()  # not before: the two would compete for the interpreter's lock


_MOST_SAVES = 64
_saving = KeptThreads(_MOST_SAVES, "dcp_mem-async-save")


def _save_later(may_begin: threading.Event, save: Callable[[], Metadata]) -> Metadata:
    may_begin.wait()
    return save()


def _staged_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: MemoryStorageWriter,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    **_: object,
) -> Callable[[], Metadata]:
    """Stage a state dict; return the call that saves it."""
    call = StagingCall(
        planner=planner,
        process_group=process_group,
        is_alone=no_dist,
        uses_collectives=True,
        is_in_process=False,
    )
    return partial(
        dcp.save,
        storage_writer._saver.stage(call, state_dict),
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        **_accepted(dcp.save, no_dist=(no_dist, False)),
    )


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

    Raises:
        ConfigError: skip= is of another kind, or given with a planner of one's own.
        CheckpointException: The load has failed, on all ranks, as from dcp.load. Its `failures`
            have this rank's own error, and a RankFailed for each other rank that failed.
        Exception: A stateful object's `state_dict` or `load_state_dict` raised it on this rank.
    """
    _load(
        raised_as_by_dcp,
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        weights_only=weights_only,
        skip=skip,
    )


def load_or_raise_cause(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    weights_only: bool = True,
    skip: TensorChoice | None = None,
) -> None:
    """Load as `load` does, and raise dcp_mem's errors as they are: no CheckpointException.

    For the manager, the integrations and the command line.

    Args:
        state_dict: As for `load`.
        checkpoint_id: As for `load`.
        storage_reader: As for `load`.
        planner: As for `load`.
        process_group: As for `load`.
        no_dist: As for `load`.
        weights_only: As for `load`.
        skip: As for `load`.

    Raises:
        ConfigError: As from `load`.
        RankFailed: Another rank has failed.
        Exception: This rank has failed.
    """
    _load(
        _raised_as_is,
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        weights_only=weights_only,
        skip=skip,
    )


def _save(
    raising: _Raising,
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    use_collectives: bool = True,
) -> Metadata:
    why_not = _why_not(storage_writer, planner, use_collectives)
    left_to_torch: AbstractContextManager[None] = nullcontext()
    if not why_not:
        assert isinstance(storage_writer, MemoryStorageWriter)
        states = _States(state_dict)
        group = process_group if process_group is not None else storage_writer._saver.process_group
        try:
            with raising("save", group, no_dist, states.has_raised_or_left_to_torch):
                return storage_writer._saver.save_collectively(
                    states.make,
                    checkpoint_id,
                    process_group,
                    no_dist,
                    to_lowest_rank=saves_to_lowest_rank(planner),
                )
        except NoCommonPlan:
            left_to_torch = storage_writer._saver.left_to_torch()  # The writer has logged why.
    elif not isinstance(storage_writer, MemoryStorageWriter):
        log.info("%s is planned by torch: %s", checkpoint_id, why_not)
    accepted = _accepted(
        dcp.save, no_dist=(no_dist, False), use_collectives=(use_collectives, True)
    )
    made = attempt(lambda: without_stateful(state_dict))
    with left_to_torch, _raised_together(made.error):
        metadata: Metadata = dcp.save(
            made.value if made.error is None else {},
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner if made.error is None else RefusingSavePlanner(made.error),
            process_group=process_group,
            **accepted,
        )
    return metadata


def _load(
    raising: _Raising,
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_reader: StorageReader | None,
    planner: LoadPlanner | None,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
    weights_only: bool,
    skip: TensorChoice | None,
) -> None:
    # Sorted: stateful objects may wait for each other's ranks.
    keys = sorted(state_dict)
    ordered = {key: state_dict[key] for key in keys}
    usual = partial(
        LocalLoadPlanner, weights_only=weights_only, optional=_optional(ordered), skip=skip
    )
    if planner is None:
        planner = usual()
    elif (
        type(planner) is DefaultLoadPlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
    ):
        planner = usual(allow_partial_load=planner.allow_partial_load)
    states = _States(ordered)
    if isinstance(storage_reader, MemoryStorageReader) and isinstance(planner, LocalLoadPlanner):
        group = process_group if process_group is not None else storage_reader._process_group
        with raising("load", group, no_dist, states.has_raised_or_left_to_torch):
            loaded = storage_reader._load_collectively(
                states.make, checkpoint_id, process_group, no_dist, planner
            )
    else:
        log.info(
            "%s is planned by torch: its reader or planner isn't dcp_mem's or the default",
            checkpoint_id,
        )
        made = attempt(partial(_checked, states, planner, skip))
        loaded = made.value if made.error is None else {}
        restrictions: AbstractContextManager[None] = nullcontext()
        if isinstance(storage_reader, MemoryStorageReader):
            restrictions = storage_reader._unpickling(weights_only=weights_only)
        with restrictions, _raised_together(made.error):
            dcp.load(
                loaded,
                checkpoint_id=checkpoint_id,
                storage_reader=storage_reader,
                planner=planner if made.error is None else RefusingLoadPlanner(made.error),
                process_group=process_group,
                **_accepted(dcp.load, no_dist=(no_dist, False)),
            )
    if isinstance(planner, LocalLoadPlanner):
        planner.take_out_lacking()
    _put_into(state_dict, loaded, keys)


def _checked(states: _States, planner: LoadPlanner, skip: TensorChoice | None) -> dict[str, Any]:
    """Return the state dict to load into; refuse what its planner can't leave out."""
    if skip is not None and not isinstance(planner, LocalLoadPlanner):
        raise ConfigError("skip= needs dcp_mem's planner or torch's default one")
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
        if type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful):
            value.load_state_dict(loaded[key])
        else:
            state_dict[key] = loaded[key]
    known = set(keys)
    for key in [key for key in loaded if key not in known]:
        state_dict[key] = loaded[key]


@contextmanager
def _raised_together(error: Exception | None) -> Iterator[None]:
    """Raise an error that DCP raises in the block on all ranks; as it is on this one.

    Args:
        error: Why this rank can't take part, which its planner raises; None for nothing.
    """
    try:
        yield
    except CheckpointException:
        if error is None:
            raise
    if error is not None:
        raise error


_Raising = Callable[
    [str, dist.ProcessGroup | None, bool, Callable[[Exception], bool]],
    AbstractContextManager[None],
]
"""Raises errors of a block in one of two ways: `raised_as_by_dcp`, or `_raised_as_is`."""


def _raised_as_is(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


class _States:
    """Makes the state dict to save or load, and knows the error that a stateful object has raised.

    DCP asks stateful objects before it talks to other ranks, and passes their errors on as they
    are.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._state_dict = state_dict
        self._error: Exception | None = None

    def make(self) -> dict[str, Any]:
        """Return the state dict with the states of stateful objects in their place.

        Args:
            state: The state dict.
        """
        try:
            return without_stateful(self._state_dict)
        except Exception as error:
            self._error = error
            raise

    def has_raised_or_left_to_torch(self, error: Exception) -> bool:
        """Tell whether an error is a stateful object's own, or only says that torch has to plan."""
        return error is self._error or isinstance(error, NoCommonPlan)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _accepted(function: Callable[..., Any], **options: tuple[Any, Any]) -> dict[str, Any]:
    """Return the options that this torch's function has, each given as (value, default).

    Raises ConfigError for one that it hasn't, and that isn't the default.
    """
    known = _parameters(function)
    for name, (value, default) in options.items():
        if name not in known and value != default:
            raise ConfigError(f"{name}={value} needs a newer torch")
    return {name: value for name, (value, _) in options.items() if name in known}


def without_stateful(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the states of stateful objects in their place.

    Args:
        state: The state dict.
    """
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
    return why_not_own_plan(planner)
