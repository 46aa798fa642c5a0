"""`dcp_mem.TrainState`: all state of a training loop, as one entry of a state dict."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError
from dcp_mem.planning.wrapper_tensors import has_memory


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
        for name, value in (("scheduler", scheduler), ("dataloader", dataloader)):
            if value is not None and not isinstance(value, Stateful):
                raise ConfigError(
                    f"{name} is a {type(value).__name__}, which lacks state_dict() or "
                    "load_state_dict()"
                )
        self.extra: dict[str, Any] = dict(extra or {})
        if not all(isinstance(name, str) for name in self.extra):
            raise ConfigError(f"extra={list(self.extra)!r}: give names as keys")
        self._model = model
        self._optimizers = _optimizers(optimizer)
        self._scheduler = scheduler
        self._dataloader = dataloader
        self._rng = rng
        self._stateless: set[torch.optim.Optimizer] = set()
        self._frozen: set[int] = set()  # addresses of storages, as of the last `state_dict`

    def state_dict(self) -> dict[str, Any]:
        """Return the state, sharded as it is on this rank.

        Tensors of model, optimizers and extra are those in use, not copies. A fresh optimizer makes
        its state for this, and is fresh again afterwards.
        """
        rank, world_size = _rank_and_world_size()
        is_fresh = [not optimizer.state for optimizer in self._optimizers]
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(_with_state(optimizer, self._stateless))
            model, optimizer_state = get_state_dict(self._model, self._optimizers)
        self._frozen = _frozen_storages(self._model)
        state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer_state,
            "fresh": _as_tuple(is_fresh),
            "world_size": world_size,
            "extra": {name: _state_of(value) for name, value in self.extra.items()},
        }
        if self._scheduler is not None:
            state["scheduler"] = _as_tuple(self._scheduler.state_dict())
        if self._dataloader is not None:
            state["dataloader"] = {f"rank-{rank}": _as_tuple(self._dataloader.state_dict())}
        if self._rng:  # last: making the other states may draw random numbers
            state["rng"] = {f"rank-{rank}": _as_tuple(rng_state())}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        Args:
            state_dict: As `state_dict` returned it, with loaded values.

        Raises:
            KeyError: An entry is missing.
        """
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(_without_empty_step(optimizer))
            set_state_dict(
                self._model,
                self._optimizers,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
            )
        (was_fresh,) = state_dict["fresh"]
        if len(was_fresh) == len(self._optimizers):  # otherwise it isn't known which one was
            for optimizer, fresh in zip(self._optimizers, was_fresh, strict=True):
                if fresh:
                    optimizer.state.clear()
        for name, saved in state_dict["extra"].items():
            self._load_extra(name, saved)
        if self._scheduler is not None:
            (saved,) = state_dict["scheduler"]
            self._scheduler.load_state_dict(saved)
        self._load_own(state_dict)

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

        It may if the entry belongs to one rank, as the checkpoint may be of fewer ranks.

        Args:
            key: Flattened name within this state.
        """
        return key.startswith(("rng.rank-", "dataloader.rank-"))

    def _load_extra(self, name: str, saved: Any) -> None:
        value = self.extra[name]
        if isinstance(value, Stateful):
            value.load_state_dict(saved)
        elif not has_tensors(value):
            (self.extra[name],) = saved
        elif not isinstance(value, torch.Tensor):  # whose values have been loaded in place
            self.extra[name] = saved

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        """Restore the dataloader and generators of this rank, where the checkpoint has them."""
        (rank, world_size), before = _rank_and_world_size(), state_dict["world_size"]
        missing = []
        if self._dataloader is not None and before != world_size:
            if rank == 0:
                log.warning(
                    "dataloaders aren't restored: %d ranks had saved theirs, and %d load",
                    before,
                    world_size,
                )
        elif self._dataloader is not None:
            saved = state_dict["dataloader"].get(f"rank-{rank}")
            if saved is None:
                missing.append("dataloader")
            else:
                self._dataloader.load_state_dict(*saved)
        if self._rng:  # last: loading the other states may draw random numbers
            saved = state_dict["rng"].get(f"rank-{rank}")
            if saved is None:
                missing.append("random numbers")
            else:
                set_rng_state(*saved)
        if missing:
            log.info(
                "the checkpoint has no %s of rank %d, which keeps its own",
                " and ".join(missing),
                rank,
            )


def _optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    if given is None:
        return []
    return [given] if isinstance(given, torch.optim.Optimizer) else list(given)


def _rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# -- values ---------------------------------------------------------------------------------------


def _as_tuple(value: Any) -> tuple[Any]:
    # DCP takes dicts and lists apart, turns their keys into texts, and expects checkpoint and fresh
    # object to have the same keys. It saves a tuple as a whole.
    return (value,)


def _state_of(value: Any) -> Any:
    """Return what is saved of an extra value; DCP has to see tensors, as they may be sharded."""
    if isinstance(value, Stateful):
        return value.state_dict()
    return value if has_tensors(value) else _as_tuple(value)


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor or a container with one in it.

    Args:
        value: Of any kind.
    """
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


# -- fresh optimizers -----------------------------------------------------------------------------


@contextmanager
def _with_state(
    optimizer: torch.optim.Optimizer, stateless: set[torch.optim.Optimizer]
) -> Iterator[None]:
    """Give a fresh optimizer the state that a step with gradients of 0 makes; then clear it again.

    Parameters, gradients, options of the groups and schedulers stay as they are.

    Args:
        optimizer: The optimizer.
        stateless: Optimizers known to make no state; this one is added if it makes none.
    """
    if optimizer.state:
        yield
        return
    if optimizer not in stateless:
        _take_zero_step(optimizer)
    if not optimizer.state:
        stateless.add(optimizer)
    try:
        with _without_empty_step(optimizer):
            yield
    finally:
        optimizer.state.clear()


@torch.no_grad()
def _take_zero_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients and rate 0, which makes the state and changes nothing else.

    The parameters are copied before the step and restored after it: some optimizers change their
    bits all the same.
    """
    parameters = _trained(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters]
    options = [dict(group) for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                rate = group["lr"]
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        # The class's method: schedulers count calls of the object's.
        type(optimizer).step(optimizer, closure=None)
    finally:
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
        for group, known in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(known)


@contextmanager
def _without_empty_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer without state a gradient, so that torch takes no empty step for it."""
    parameters = _trained(optimizer)
    if (
        optimizer.state
        or not parameters
        or any(parameter.grad is not None for parameter in parameters)
    ):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]


# -- random numbers -------------------------------------------------------------------------------


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
    """Restore the states that `rng_state` returned, of as many devices as this rank sees.

    Args:
        state: What `rng_state` returned: "python", "numpy", "torch", and "cuda" with one tensor per
            device.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, device)


def _frozen_storages(model: nn.Module) -> set[int]:
    """Return the addresses of storages with parameters of which none trains."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for parameter in model.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if has_memory(local):
            found[parameter.requires_grad].add(local.untyped_storage().data_ptr())
    return found[False] - found[True] - {0}
