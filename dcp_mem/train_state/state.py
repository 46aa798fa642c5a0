"""`dcp_mem.TrainState`: all state of a training loop, as one entry of a state dict."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_mem.comm import rank_in, world_size
from dcp_mem.common.arguments import shown, takes
from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError, kind_of
from dcp_mem.planning.entries import SavedEntry
from dcp_mem.planning.own_keys import own_keys_given, own_keys_taken
from dcp_mem.planning.wrapper_tensors import has_memory
from dcp_mem.train_state.optimizers import Optimizers
from dcp_mem.train_state.values import Tensors, as_tuple, is_fixed, put_together, taken_apart


@takes()
class TrainState:
    """A training loop's state, saved and loaded as an entry of a state dict.

    Use it as in `{"app": TrainState(model, optimizer)}`.

    `dcp_mem.load` may run on another number of ranks than the save. Ranks for which the checkpoint
    has no generators or dataloader keep their own, and with another number of ranks no dataloader
    is restored; the log says so. With plain `dcp.load`, missing entries are an error. A load that
    fails leaves a fresh optimizer as it was.

    Args:
        model: As `torch.distributed.checkpoint.state_dict` takes it: FSDP2, TP, HSDP, DDP or plain.
        optimizer: One, or several as a sequence.
        scheduler: An LR scheduler, or any other object with `state_dict` and `load_state_dict`, the
            same on all ranks.
        dataloader: Such an object with a state of its own on each rank, as torchdata's
            `StatefulDataLoader`.
        rng: Whether to save each rank's random number generators: Python's, numpy's, torch's, and
            those of all CUDA devices that the rank sees.
        extra: More by name: stateful objects, and values that are the same on all ranks. Loaded
            values replace those in the attribute `extra`.

    Raises:
        ConfigError: `scheduler`, `dataloader` or `extra` isn't of the right kind.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        *,
        rng: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is {kind_of(model)}: give the torch.nn.Module")
        for name, value in (("scheduler", scheduler), ("dataloader", dataloader)):
            if value is not None and not isinstance(value, Stateful):
                raise ConfigError(
                    f"{name} is {kind_of(value)}, which lacks state_dict() or load_state_dict()"
                )
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(f"extra is {kind_of(extra)}: give values by name, as a dict")
        self.extra: dict[str, Any] = dict(extra or {})
        if not all(isinstance(name, str) for name in self.extra):
            raise ConfigError(f"extra={list(self.extra)!r}: give names as keys")
        self._model = model
        self._optimizer_list = _optimizers(optimizer)
        self._optimizers = Optimizers(model, self._optimizer_list)
        self._scheduler = scheduler
        self._dataloader = dataloader
        self._rng = rng
        self._held: dict[str, Tensors] = {}  # tensors of `extra`, as of the last `state_dict`
        self._frozen: set[int] = set()  # addresses of storages, as of the last `state_dict`

    def __repr__(self) -> str:
        parts = [type(one).__name__ for one in (self._model, *self._optimizer_list)]
        parts += [
            type(one).__name__ for one in (self._scheduler, self._dataloader) if one is not None
        ]
        return f"<{type(self).__name__} of {', '.join([*parts, *self.extra])}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the state, sharded as it is on this rank.

        Tensors of model, optimizers and extra are those in use, not copies. A fresh optimizer makes
        its state for this, and is fresh again afterwards.
        """
        rank, size = rank_in(), world_size()
        with own_keys_given(self._model) as apart, self._optimizers.having_state() as is_fresh:
            model, found = self._optimizers.state_dicts()
        model.update(apart)
        self._frozen = _frozen_storages(self._model)
        values = {name: taken_apart(_state_of(value)) for name, value in self.extra.items()}
        self._held = {name: tensors for name, (_, tensors) in values.items()}
        state: dict[str, Any] = {
            "model": model,
            "optimizer": self._optimizers.saved(found, is_fresh),
            "world_size": size,
            "extra": {name: held for name, held in self._held.items() if held is not None},
            "values": {name: as_tuple(value) for name, (value, _) in values.items()},
        }
        role = _role(model)
        if self._scheduler is not None:
            state["scheduler"] = as_tuple(self._scheduler.state_dict())
        if self._dataloader is not None:
            state["dataloader"] = {f"rank-{rank}": (role, self._dataloader.state_dict())}
        if self._rng:  # last: making the other states may draw random numbers
            state["rng"] = {f"rank-{rank}": (role, rng_state())}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        Args:
            state_dict: As `state_dict` returned it, with loaded values.

        Raises:
            KeyError: An entry is missing.
            DcpMemError: The checkpoint has something that wasn't loaded, or can't be restored.
        """
        if self._optimizers.are_unnamed:
            self.state_dict()
        model = state_dict["model"]
        with own_keys_taken(self._model, model):
            set_model_state_dict(self._model, dict(model))  # torch takes keys out
        self._optimizers.restore(state_dict["optimizer"])
        for name, (value,) in state_dict["values"].items():
            self._load_extra(name, value, state_dict["extra"].get(name))
        if self._scheduler is not None:
            (saved,) = state_dict["scheduler"]
            self._scheduler.load_state_dict(saved)
        self._load_own(state_dict, _role(model))

    def is_frozen(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter that doesn't train; made for `frozen=`.

        As in `CheckpointManager(url, frozen=state.is_frozen)`. Which parameters have
        `requires_grad=False` is looked up at each save: they may thaw and freeze at any time.

        Args:
            name: Of the tensor in the flattened state dict; any.
            tensor: Of the last `state_dict`; of a DTensor, this rank's part.
        """
        return has_memory(tensor) and tensor.untyped_storage().data_ptr() in self._frozen

    def is_optional(self, key: str) -> bool:
        """Return whether a checkpoint may lack this entry.

        It may if the entry belongs to one rank, as the checkpoint may be of fewer ranks, if it is a
        parameter's optimizer state, which begins with its first gradient, or a tensor of a value
        whose form the checkpoint has.

        Args:
            key: Flattened name within this state.
        """
        return key.startswith(_OF_A_RANK + _OF_A_FORM)

    def room_for(self, entry: SavedEntry) -> Any:
        """Return what to load an entry into that this state lacks; see `MakesRoom`.

        Args:
            entry: Of the checkpoint, with its path within this state.
        """
        kind, *below = entry.path or ("",)
        if not below:
            return NotImplemented
        if kind in ("rng", "dataloader"):
            return None
        if kind == "optimizer" and self._optimizer_list and len(below) > 1:
            return self._optimizers.room_for(replace(entry, path=tuple(below)))
        if kind not in ("extra", "values") or below[0] not in self.extra:
            return NotImplemented
        if entry.size is None:
            return ()
        held = self._held.get(below[0])
        known = held.get(".".join(map(str, below[1:]))) if isinstance(held, dict) else held
        if known is not None and is_fixed(known):
            return NotImplemented  # a sharded tensor takes what fits
        device = "cpu" if known is None else known.device
        return torch.empty(entry.size, dtype=entry.dtype, device=device)

    def _load_extra(self, name: str, saved: Mapping[str, Any], tensors: Tensors) -> None:
        value = put_together(saved, tensors, self._held.get(name), f"extra[{name!r}]")
        current = self.extra[name]
        if isinstance(current, Stateful):
            current.load_state_dict(value)
        else:
            self.extra[name] = value

    def _load_own(self, state_dict: dict[str, Any], role: tuple[Any, ...]) -> None:
        """Restore the dataloader and generators of this rank, where the checkpoint has them."""
        rank, size = rank_in(), world_size()
        before = state_dict["world_size"]
        missing, others = [], []
        own: dict[str, Any] = {}
        for kind in ["dataloader"] * (self._dataloader is not None) + ["rng"] * self._rng:
            saved = state_dict[kind].get(f"rank-{rank}")
            if kind == "dataloader" and before != size:
                if rank == 0:
                    log.warning(
                        "dataloaders aren't restored: %d ranks had saved theirs, and %d load",
                        before,
                        size,
                    )
            elif saved is None:
                missing.append(_KINDS[kind])
            elif before == size and saved[0] != role:
                others.append(_KINDS[kind])
            else:
                own[kind] = saved[1]
        if "dataloader" in own and self._dataloader is not None:
            self._dataloader.load_state_dict(own["dataloader"])
        if "rng" in own:  # last: loading the other states may draw random numbers
            set_rng_state(own["rng"])
        if missing:
            log.info(
                "the checkpoint has no %s of rank %d, which keeps its own",
                " and ".join(missing),
                rank,
            )
        if others:
            log.warning(
                "rank %d had another part of the model or another place in the mesh when it saved: "
                "it keeps its own %s",
                rank,
                " and ".join(others),
            )


_KINDS = {"dataloader": "dataloader", "rng": "random numbers"}
_OF_A_RANK = ("rng.rank-", "dataloader.rank-")
_OF_A_FORM = ("optimizer.", "extra.")


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    if given is None:
        return []
    found = [given] if isinstance(given, torch.optim.Optimizer) else given
    if isinstance(found, (type, str)) or not isinstance(found, Iterable):
        raise ConfigError(
            f"optimizer={shown(given)}: give the optimizer, or several as a list; any other object "
            "with a state goes into extra="
        )
    return list(found)


def _state_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _frozen_storages(model: nn.Module) -> set[int]:
    """Return the addresses of storages with parameters of which none trains."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for parameter in model.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if has_memory(local):
            found[parameter.requires_grad].add(local.untyped_storage().data_ptr())
    return found[False] - found[True] - {0}


def _role(model: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells this rank from those with other parts of the model, or another mesh."""
    meshes = {
        id(one.device_mesh): one.device_mesh for one in model.values() if type(one) is DTensor
    }
    places = {
        (tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
        for mesh in meshes.values()
    }
    return zlib.crc32("\0".join(sorted(model)).encode()), *sorted(places)


# -- random number generators ----------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Return the states of this rank's generators, in types that unpickle without running code."""
    name, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)  # numpy's type says that it may also be a text
    return {
        "python": random.getstate(),
        "numpy": (str(name), keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `rng_state` returned, of as many devices as this rank sees."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, device)
