"""`dcp_mem.TrainState`: everything that a training loop has, as one entry of a state dict."""

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
from torch.utils._pytree import tree_leaves

from dcp_mem.errors import ConfigError
from dcp_mem.events import log


class TrainState:
    """A training loop's state, to be saved and loaded as an entry of a state dict: `{"app": TrainState(model, optimizer)}`.

    model, optimizer: as `torch.distributed.checkpoint.state_dict` takes them: FSDP2, TP, HSDP, DDP, plain; several optimizers
    as a sequence. scheduler: an LR scheduler, or whatever else has state_dict and load_state_dict, the same on all ranks.
    dataloader: the same, but each rank's own (torchdata's StatefulDataLoader, for one). rng: take along each rank's random
    number generators: Python's, numpy's, torch's, and those of all CUDA devices that the rank sees. extra: more by name:
    stateful objects, and values that are the same on all ranks; loaded values take their place in `extra`.

    A load with `dcp_mem.load` may happen on another number of ranks: those that the checkpoint has no generators or
    dataloader for keep theirs, and with another number no dataloader is restored at all; the log says so. Under plain
    `dcp.load` what is missing is an error. A load that fails leaves a fresh optimizer as it was.

    Raises ConfigError where dataloader, scheduler or extra aren't what they have to be.
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
                raise ConfigError(f"{name} is a {type(value).__name__}, which lacks state_dict() or load_state_dict()")
        self.extra: dict[str, Any] = dict(extra or {})
        if not all(isinstance(name, str) for name in self.extra):
            raise ConfigError(f"extra={list(self.extra)!r}: give names as keys")
        self._model = model
        self._optimizers = _optimizers(optimizer)
        self._scheduler = scheduler
        self._dataloader = dataloader
        self._rng = rng
        self._stateless: set[torch.optim.Optimizer] = set()

    def state_dict(self) -> dict[str, Any]:
        """The state, sharded as it is on this rank. Tensors of model, optimizers and extra are those in use, not copies."""
        rank, world_size = _place()
        is_fresh = [not optimizer.state for optimizer in self._optimizers]
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                stack.enter_context(_with_state(optimizer, self._stateless))
            model, optimizer_state = get_state_dict(self._model, self._optimizers)
        state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer_state,
            "fresh": _whole(is_fresh),
            "world_size": world_size,
            "extra": {name: _state_of(value) for name, value in self.extra.items()},
        }
        if self._scheduler is not None:
            state["scheduler"] = _whole(self._scheduler.state_dict())
        if self._dataloader is not None:
            state["dataloader"] = {f"rank-{rank}": _whole(self._dataloader.state_dict())}
        if self._rng:  # last: making the others' states may draw numbers
            state["rng"] = {f"rank-{rank}": _whole(rng_state())}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all that there is."""
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
        if len(was_fresh) == len(self._optimizers):  # otherwise nobody knows which one was
            for optimizer, fresh in zip(self._optimizers, was_fresh, strict=True):
                if fresh:
                    optimizer.state.clear()
        for name, saved in state_dict["extra"].items():
            self._load_extra(name, saved)
        if self._scheduler is not None:
            (saved,) = state_dict["scheduler"]
            self._scheduler.load_state_dict(saved)
        self._load_own(state_dict)

    def is_optional(self, key: str) -> bool:
        """Whether a checkpoint may lack this entry: only what one rank has for itself, as there may have been other ranks."""
        return key.startswith(("rng.rank-", "dataloader.rank-"))

    def _load_extra(self, name: str, saved: Any) -> None:
        value = self.extra[name]
        if isinstance(value, Stateful):
            value.load_state_dict(saved)
        elif not _has_tensors(value):
            (self.extra[name],) = saved
        elif not isinstance(value, torch.Tensor):  # whose values have been loaded in place
            self.extra[name] = saved

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        """Restore what each rank has for itself, where there is something of it."""
        (rank, world_size), before = _place(), state_dict["world_size"]
        missing = []
        if self._dataloader is not None and before != world_size:
            if rank == 0:
                log.warning("dataloaders aren't restored: %d ranks had saved theirs, and %d load", before, world_size)
        elif self._dataloader is not None:
            saved = state_dict["dataloader"].get(f"rank-{rank}")
            if saved is None:
                missing.append("dataloader")
            else:
                self._dataloader.load_state_dict(*saved)
        if self._rng:  # last: loading the others may draw numbers
            saved = state_dict["rng"].get(f"rank-{rank}")
            if saved is None:
                missing.append("random numbers")
            else:
                set_rng_state(*saved)
        if missing:
            log.info("the checkpoint has no %s of rank %d, which keeps its own", " and ".join(missing), rank)


def _optimizers(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> list[torch.optim.Optimizer]:
    if given is None:
        return []
    return [given] if isinstance(given, torch.optim.Optimizer) else list(given)


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


# -- values ------------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> tuple[Any]:
    # DCP takes dicts and lists apart, makes texts of their keys, and wants the same keys from checkpoint and fresh object; a
    # tuple it saves as one.
    return (value,)


def _state_of(value: Any) -> Any:
    """What is saved of an extra value: tensors may be sharded, so DCP has to see them."""
    if isinstance(value, Stateful):
        return value.state_dict()
    return value if _has_tensors(value) else _whole(value)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


# -- fresh optimizers --------------------------------------------------------------------------------------------------


@contextmanager
def _with_state(optimizer: torch.optim.Optimizer, stateless: set[torch.optim.Optimizer]) -> Iterator[None]:
    """Within this a fresh optimizer has its state, all as after a step with gradients of 0; afterwards it is fresh again.

    Parameters, gradients, options of the groups and schedulers don't notice. stateless: those that make no state, which are
    found out here.
    """
    if optimizer.state:
        yield
        return
    if optimizer not in stateless:
        _step_in_vain(optimizer)
    if not optimizer.state:
        stateless.add(optimizer)
    try:
        with _without_empty_step(optimizer):
            yield
    finally:
        optimizer.state.clear()


@torch.no_grad()
def _step_in_vain(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients of 0 at a rate of 0, for the state that it makes; nothing else is changed by it.

    For the time of the step there is a copy of the parameters: not every optimizer leaves them alone to the bit.
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
        type(optimizer).step(optimizer, closure=None)  # not the object's own, by which schedulers count
    finally:
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            parameter.copy_(value)
            parameter.grad = gradient
        for group, known in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(known)


@contextmanager
def _without_empty_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within this torch takes no empty step for an optimizer without state, as it takes none where there is a gradient."""
    parameters = _trained(optimizer)
    if optimizer.state or not parameters or any(parameter.grad is not None for parameter in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


# -- random numbers ----------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of this rank's generators, in types that unpickle without running code."""
    name, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)  # not the generator's name, which its type can't tell it from
    return {
        "python": random.getstate(),
        "numpy": (str(name), keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, device)
