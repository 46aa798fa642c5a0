"""A sharded optimizer, as an entry of a state dict to load into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_mem.planning.entries import SavedEntry
from dcp_mem.train_state.optimizers import Optimizers

_GROUPS = "param_groups"


class ShardedOptimizer:
    """Loads an optimizer's state by the names of its parameters, and all options of its groups.

    The optimizer is fresh. `with_state` has the names of parameters whose state the checkpoint has.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, with_state: Collection[str]
    ) -> None:
        self._module, self._optimizer, self._with_state = module, optimizer, with_state
        self._restored = Optimizers(module, [optimizer])

    def state_dict(self) -> dict[str, Any]:
        """Return the state to load into; the checkpoint alone says what the groups have."""
        with self._restored.having_state() as is_fresh:
            found: dict[str, Any] = dict(get_optimizer_state_dict(self._module, self._optimizer))
        self._restored.saved(found, is_fresh)
        state = {name: dict(of) for name, of in found.get("state", {}).items() if of}
        return {"state": state} if state else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what was loaded."""
        records = {
            str(number): (_record(group, self._with_state),)
            for number, group in enumerate(state_dict.get(_GROUPS, []))
        }
        self._restored.restore({"state": state_dict.get("state", {}), "groups": records})

    def is_optional(self, key: str) -> bool:
        """Return True: what a fresh optimizer has and the saved one hadn't stays as it is."""
        return True

    def room_for(self, entry: SavedEntry) -> Any:
        """Return what to load an entry into that a fresh optimizer lacks; see `MakesRoom`."""
        if entry.path[0] == "state" and len(entry.path) > 2:
            return self._restored.room_for(entry)
        return () if entry.size is None else torch.empty(entry.size, dtype=entry.dtype)


def names_with_state(metadata: Metadata, key: str) -> set[str]:
    """Return the parameters of which a checkpoint has optimizer state below a key."""
    paths = metadata.planner_data or {}
    known = (paths.get(name, ()) for name in metadata.state_dict_metadata)
    return {str(path[2]) for path in known if len(path) > 3 and path[:2] == (key, "state")}


def _record(group: Mapping[str, Any], with_state: Collection[str]) -> dict[str, Any]:
    names = [str(name) for name in group["params"]]
    return {
        "params": names,
        "options": {key: value for key, value in group.items() if key != "params"},
        "stateless": [name for name in names if name not in with_state],
        "keys": [],
        "fresh": False,
    }
