"""Stateful objects in a state dict: asked for their states, and given them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_mem.config import checked_state
from dcp_mem.errors import ConfigError
from dcp_mem.planning.entries import RoomFor, SavedEntry
from dcp_mem.saving.values import NoCommonPlan

NEVER_STATEFUL = frozenset(
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


@runtime_checkable
class MakesRoom(Protocol):
    """A stateful object that takes entries which its state dict lacks, or has otherwise."""

    def room_for(self, entry: SavedEntry) -> Any:
        """Return what to load an entry of the checkpoint into; it takes its place in the state.

        Args:
            entry: With its path below the object.

        Returns:
            A tensor of the entry's size; for an entry that is no tensor, anything but what follows.
            None for an entry that is another rank's, and NotImplemented for one that isn't loaded.
        """


class States:
    """Makes the state dict to save or load, and knows the error that a stateful object has raised.

    DCP asks stateful objects before it talks to other ranks, and passes their errors on as they
    are.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self._state_dict = state_dict
        self._error: Exception | None = None

    def make(self) -> dict[str, Any]:
        """Return the state dict with the states of stateful objects in their place."""
        try:
            return without_stateful(self._state_dict)
        except Exception as error:
            self._error = error
            raise

    def has_raised_or_left_to_torch(self, error: Exception) -> bool:
        """Tell whether an error is a stateful object's own, or only says that torch has to plan."""
        return error is self._error or isinstance(error, NoCommonPlan)


class Refusing:
    """Stands for a state that this rank can't give, in a call that the other ranks wait in."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


def taking_part(state: object) -> dict[str, Any]:
    """Return the state dict, or one that raises, once the other ranks hear it, why it is none."""
    try:
        return checked_state(state)
    except ConfigError as error:
        return {"": Refusing(error)}


def without_stateful(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the states of stateful objects in their place."""
    keys = _stateful_keys(state)
    return {**state, **{key: state[key].state_dict() for key in keys}} if keys else state


def _stateful_keys(state: dict[str, Any]) -> list[str]:
    if NEVER_STATEFUL.issuperset(map(type, state.values())):
        return []
    # Asking a tensor whether it is an instance of the protocol takes 20 µs.
    return [
        key
        for key, value in state.items()
        if type(value) not in NEVER_STATEFUL and isinstance(value, Stateful)
    ]


def optional_entries(state: dict[str, Any]) -> Callable[[str], bool] | None:
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


def room_makers(state: dict[str, Any]) -> RoomFor | None:
    """Return what makes room below stateful objects; None where there are none."""
    objects = {key: state[key] for key in _stateful_keys(state)}

    def room_for(entry: SavedEntry) -> Any:
        key, *below = entry.path or ("",)
        value = objects.get(str(key))
        if isinstance(value, MakesRoom):
            return value.room_for(replace(entry, path=tuple(below)))
        if isinstance(value, HasOptional) and value.is_optional(".".join(map(str, below))):
            return None
        return NotImplemented

    return room_for if objects else None


def objects_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the keys of stateful objects, with what to do where a checkpoint has more of one."""
    return {
        key: _FRESH if isinstance(value, Optimizer) and not value.state else ""
        for key in _stateful_keys(state)
        for value in (state[key],)
    }


_FRESH = (
    "a fresh optimizer has no state to restore into: save and load "
    "dcp_mem.TrainState(model, optimizer), which makes it"
)
