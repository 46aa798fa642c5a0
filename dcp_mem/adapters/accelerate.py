"""`AcceleratorCheckpoints`: saves and restores all that an `accelerate.Accelerator` has prepared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves

from dcp_mem.app import TrainState, rng_state, set_rng_state
from dcp_mem.errors import ConfigError
from dcp_mem.manager import CheckpointManager, Saved

_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class AcceleratorCheckpoints:
    """Takes the place of an Accelerator's save_state and load_state: node memory first, storage behind training.

    accelerator: prepares model, optimizers, schedulers and dataloaders, before the first save or restore, as usual: DDP, FSDP2
    or a single process. path and options: those of `CheckpointManager`, which is there as `manager`.

    Call its methods on all ranks. Raises ConfigError, also for FSDP1, DeepSpeed and Megatron-LM, whose state isn't torch's.
    """

    def __init__(self, accelerator: Accelerator, path: str | os.PathLike[str] | None = None, /, **options: Any) -> None:
        refuse_engines(accelerator)
        self.manager = CheckpointManager(path, **options)
        self._accelerator = accelerator
        self._random_numbers: dict[str, Any] | None = None

    def save(self, step: int, *, metrics: Mapping[str, Any] | None = None, force_persist: bool = False) -> Saved:
        """Save what is prepared and registered, if a save is due; see `CheckpointManager.save`."""
        state = {"app": _app(self._accelerator)}
        return self.manager.save(step, state, metrics=metrics, force_persist=force_persist)

    def restore(self, step: int | None = None, *, weights_only: bool = True) -> int | None:
        """Load the newest checkpoint that is whole, or that of a step, into what is prepared and registered; returns its step.

        None where there is nothing at all; see `CheckpointManager.restore`. weights_only: False for registered objects whose
        state is more than numbers, texts, containers and tensors.
        """
        app = _app(self._accelerator)
        found = self.manager.restore({"app": app}, step, weights_only=weights_only)
        if found is not None:
            self._accelerator.step = app.extra["step"]
            self._random_numbers = rng_state()
        return found

    def skip_first_batches(self, dataloader: Any, number: int) -> Any:
        """The rest of an epoch that a checkpoint was taken in, after its first batches.

        As `Accelerator.skip_first_batches`; and random numbers that starting the dataloader and skipping have drawn are set
        back to those that were restored, as training had them at that point.
        """
        if not number:
            return dataloader
        rest: Any = self._accelerator.skip_first_batches(dataloader, number)
        if hasattr(rest, "set_epoch"):
            rest.set_epoch(dataloader.iteration)  # accelerate before 1.14 begins with the first epoch's order
        return self._rest(rest)

    def _rest(self, dataloader: Any) -> Iterator[Any]:
        for number, batch in enumerate(dataloader):
            if number == 0 and self._random_numbers is not None:
                set_rng_state(self._random_numbers)
            yield batch

    def close(self, flush: bool = True, *, progress: bool = True) -> None:
        """Wait until storage has what it should have; see `CheckpointManager.close`."""
        self.manager.close(flush, progress=progress)

    def __enter__(self) -> AcceleratorCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(flush=kind is None)


def refuse_engines(accelerator: Accelerator) -> None:
    """Raises ConfigError where models or optimizers aren't torch's own, or of FSDP1."""
    kind = accelerator.distributed_type
    if kind in _ENGINES:
        raise ConfigError(
            f"{kind.value} keeps model and optimizer in an engine of its own: use dcp_mem's adapter for that"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP1 isn't supported: choose version 2 (fsdp_version=2, in TrainingArguments' fsdp_config version)"
        )


def bare_model(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """The model without DDP and torch.compile around it, so that its tensors have the names that it gave them."""
    bare: torch.nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return bare


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Torch's optimizer: the Accelerator's does nothing for some calls of `step`."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _app(accelerator: Accelerator) -> TrainState:
    """All that the Accelerator was given; made anew each time, since it may be given more."""
    # Accelerate has no public names for these; they have been the same since its 0.3.
    models: Sequence[torch.nn.Module] = accelerator._models
    if not models:
        raise ConfigError("the Accelerator has no model: call accelerator.prepare(model, …) before this")
    bare = [bare_model(accelerator, model) for model in models]
    loaders = [loader for loader in accelerator._dataloaders if loader.use_stateful_dataloader]
    extra: dict[str, Any] = {
        f"object-{number}": _Registered(one) for number, one in enumerate(accelerator._custom_objects)
    }
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler
    return TrainState(
        bare[0] if len(bare) == 1 else torch.nn.ModuleList(bare),
        [bare_optimizer(optimizer) for optimizer in accelerator._optimizers],
        _All(accelerator._schedulers) if accelerator._schedulers else None,
        _All(loaders) if loaders else None,
        extra={"step": accelerator.step, **extra},
    )


class _All:
    """Several stateful objects as one."""

    def __init__(self, parts: Sequence[Stateful]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self._parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict) != len(self._parts):
            raise ConfigError(
                f"the checkpoint has {len(state_dict)} schedulers or dataloaders, {len(self._parts)} are prepared"
            )
        for number, part in enumerate(self._parts):
            part.load_state_dict(state_dict[str(number)])


class _Registered:
    """An object of register_for_checkpointing: whole, but for one with tensors, which may be large or sharded."""

    def __init__(self, registered: Stateful) -> None:
        self._registered = registered

    def state_dict(self) -> dict[str, Any]:
        state = self._registered.state_dict()
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state))
        return state if has_tensors else {"whole": (state,)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._registered.load_state_dict(state_dict["whole"][0] if "whole" in state_dict else state_dict)
