"""Strategies whose checkpoints all ranks save and load together, each its part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from dcp_mem.common.log import log
from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.integrations.lightning.checkpoint_io import (
    MemoryCheckpointIO,
    Nothing,
    plugin_of,
    refuse_options,
)
from dcp_mem.integrations.lightning.flatten import REST, entries_of, split
from dcp_mem.integrations.lightning.paths import is_file
from dcp_mem.planning.entries import SavedEntry, first_of
from dcp_mem.planning.own_keys import own_keys_taken
from dcp_mem.train_state.optimizers import Optimizers, refuse_needing_closure

_MODEL = "state_dict"
_STATES = "optimizer_states"
_GROUPS = "param_groups"


class SavesTogether(Strategy):
    """The common part of the strategies below: the plugin, and how a checkpoint is removed."""

    @property
    def memory(self) -> MemoryCheckpointIO:
        """The plugin; raises ConfigError if the trainer has another one."""
        return plugin_of(self, self)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove this node's part of a checkpoint; rank 0 removes it from storage."""
        if self.local_rank == 0:
            self.memory.remove(filepath, from_storage=self.is_global_zero)

    local_rank: int


class MemoryDDPStrategy(SavesTogether, DDPStrategy):
    """DDP where each rank saves its share, instead of rank 0 all of the state.

    What the ranks save is what rank 0 alone would have saved, and loads with any DDP strategy or on
    one device. Copies and parity on other nodes (replicas=, redundancy=) need this strategy: what
    rank 0 saves alone lies in one node's memory. Buffers, callbacks and loops are rank 0's.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save on all ranks together, each its share of what all of them have."""
        refuse_options(storage_options)
        assert self.lightning_module is not None
        parameters = {name for name, _ in self.lightning_module.named_parameters()}

        def is_shared(path: tuple[Any, ...]) -> bool:
            return path[0] == _STATES or (path[0] == _MODEL and path[-1] in parameters)

        if self.is_global_zero:
            state = split(checkpoint)
        else:
            shared = {key: checkpoint[key] for key in (_MODEL, _STATES) if key in checkpoint}
            state = split(shared, is_shared)
            # Of the rest, rank 0's counts.
            state = {key: state[key] for key in shared if key in state}
        self.memory.save(
            state, self.broadcast(filepath), checkpoint.get("global_step"), no_dist=False
        )


class _Sharded(SavesTogether):
    """Save what Lightning collects of each rank, and load into what the rank has."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        refuse_needing_closure(getattr(optimizer, "_optimizer", optimizer))
        return super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        refuse_options(storage_options)
        optimizers = checkpoint.pop(_STATES, None)
        state = {_MODEL: checkpoint.pop(_MODEL)}
        state |= {f"optimizer_{number}": of_one for number, of_one in enumerate(optimizers or [])}
        if self.is_global_zero:
            state |= entries_of(checkpoint, [], optimizers)
        self.memory.save(
            state, self.broadcast(filepath), checkpoint.get("global_step"), no_dist=False
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        try:
            return self._load(path, weights_only)
        except CheckpointNotFound:
            if not _is_lightnings(path):
                raise
        # Before Lightning 2.6 its strategies don't know weights_only, nor does its trainer.
        given = {} if weights_only is None else {"weights_only": weights_only}
        return super().load_checkpoint(path, **given)

    def _load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        assert self.lightning_module is not None
        assert self.model is not None
        module, is_strict = self.model, self.lightning_module.strict_loading
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        wanted = self.optimizers if is_fitting else []
        state = dict[str, Any]()

        def state_for(metadata: Metadata) -> dict[str, Any]:
            there = metadata.state_dict_metadata
            if REST not in there:
                raise ConfigError(
                    f"{path} is no checkpoint of Lightning's: load it with dcp_mem.load and a "
                    f"state dict"
                )
            model = _found_in(metadata, get_model_state_dict(module), path, is_strict=is_strict)
            state.update({_MODEL: model, REST: None})
            for number, optimizer in enumerate(wanted):
                key = f"optimizer_{number}"
                if not any(name.startswith(f"{key}.") for name in there):
                    raise ConfigError(
                        f"{path} has no sharded state of optimizer {number}: it was saved with "
                        f"weights only, or by a strategy that doesn't shard"
                    )
                state[key] = _ShardedOptimizer(module, optimizer, _names_with_state(metadata, key))
            return state

        if not self.memory.load(state_for, path, weights_only):
            return Nothing()
        if is_strict:
            with own_keys_taken(module, state[_MODEL]):
                set_model_state_dict(module, dict(state[_MODEL]))
        else:
            set_model_state_dict(module, state[_MODEL], options=StateDictOptions(strict=False))
        rest: dict[str, Any] = state[REST][0]
        return rest

    def teardown(self) -> None:
        super().teardown()
        self.memory.teardown()  # Lightning's own strategies leave the plugin out.


class MemoryFSDPStrategy(_Sharded, FSDPStrategy):
    """FSDP with sharded checkpoints, which load into any number of ranks.

    Args:
        state_dict_type: "sharded".
        **kwargs: Further arguments of FSDPStrategy.

    Raises:
        ConfigError: state_dict_type is "full".
    """

    def __init__(self, *, state_dict_type: str = "sharded", **kwargs: Any) -> None:
        if state_dict_type != "sharded":
            raise ConfigError(
                f'state_dict_type={state_dict_type!r}: leave it at "sharded", or take '
                f"Lightning's FSDPStrategy"
            )
        super().__init__(state_dict_type="sharded", **kwargs)


class MemoryModelParallelStrategy(_Sharded, ModelParallelStrategy):
    """FSDP2 and tensor parallelism with sharded checkpoints through `MemoryCheckpointIO`.

    They load into any number of ranks, and any sizes of the mesh.

    Args:
        *args: ModelParallelStrategy's.
        save_distributed_checkpoint: True.
        **kwargs: ModelParallelStrategy's.

    Raises:
        ConfigError: save_distributed_checkpoint is False.
    """

    def __init__(self, *args: Any, save_distributed_checkpoint: bool = True, **kwargs: Any) -> None:
        if not save_distributed_checkpoint:
            raise ConfigError(
                "save_distributed_checkpoint=False: leave it out, or take Lightning's "
                "ModelParallelStrategy"
            )
        super().__init__(*args, **kwargs)


class _ShardedOptimizer:
    """Loads a fresh optimizer's state by the names of its parameters, and its groups' options."""

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


def _names_with_state(metadata: Metadata, key: str) -> set[str]:
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


def _is_lightnings(path: str | Path) -> bool:
    """Return whether Lightning's own strategies that shard have written this file or directory."""
    return is_file(path) or is_file(Path(path, "meta.pt"))


def _found_in(
    metadata: Metadata, model: dict[str, Any], path: str | Path, *, is_strict: bool
) -> dict[str, Any]:
    """Return what of a model's state the checkpoint has; name or refuse what either lacks."""
    paths = metadata.planner_data or {}
    known = (paths.get(name, (name,)) for name in metadata.state_dict_metadata)
    saved = {str(one[1]) for one in known if one[0] == _MODEL and len(one) > 1}
    lacking, unknown = sorted(model.keys() - saved), sorted(saved - model.keys())
    texts = [f"lacks {first_of(lacking)} of the model"] * bool(lacking)
    texts += [f"has {first_of(unknown)}, which the model lacks"] * bool(unknown)
    if texts and is_strict:
        raise ConfigError(
            f"{path} {' and '.join(texts)}: set strict_loading=False in the LightningModule to "
            "load the rest"
        )
    if texts:
        log.warning("%s %s: the rest is loaded", path, " and ".join(texts))
    return {name: value for name, value in model.items() if name in saved}
