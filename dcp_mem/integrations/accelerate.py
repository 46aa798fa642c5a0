"""`AcceleratorCheckpoints`: checkpoints of all that an `accelerate.Accelerator` has prepared."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("accelerate")

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Unpack

from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.errors import ConfigError
from dcp_mem.manager import CheckpointManager, Saved
from dcp_mem.manager.options import DEFAULTS, LoopOptions
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.train_state import TrainState, rng_state, set_rng_state

_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


@takes(LoopOptions, DEFAULTS)
class AcceleratorCheckpoints:
    """Replace an Accelerator's save_state and load_state: memory first, storage behind training.

    Call its methods on all ranks.

    Args:
        accelerator: Has prepared model, optimizers, schedulers and dataloaders before the first
            save or restore, as usual: DDP, FSDP2 or a single process.
        path: As in `CheckpointManager`.
        frozen: As in `CheckpointManager`; True for all parameters that don't train, as the base
            below adapters of peft.
        **options: Further options of `CheckpointManager`, which is the attribute `manager`.

    Raises:
        ConfigError: An argument can't work, or FSDP1, DeepSpeed or Megatron-LM is used, whose state
            isn't torch's.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        path: str | os.PathLike[str] | None = None,
        /,
        *,
        frozen: TensorChoice | bool | None = None,
        **options: Unpack[LoopOptions],
    ) -> None:
        refuse_engines(accelerator)
        self._untrained = Untrained()
        frozen = self._untrained.instead_of(frozen)
        self.manager = CheckpointManager(path, frozen=frozen, **options)
        self._accelerator = accelerator
        self._random_numbers: dict[str, Any] | None = None
        self._has_told_of_hooks = False

    def save(
        self, step: int, *, metrics: Mapping[str, Any] | None = None, force_persist: bool = False
    ) -> Saved:
        """Save what is prepared and registered, if a save is due, as `CheckpointManager.save`."""
        self._random_numbers = None  # Training has gone on since the restore.
        state = {"app": self._untrained.noted(self._app())}
        return self.manager.save(step, state, metrics=metrics, force_persist=force_persist)

    def restore(self, step: int | None = None, *, weights_only: bool = True) -> int | None:
        """Load the newest whole checkpoint, or a step's, into what is prepared and registered.

        Args:
            step: The step to load; None for the newest.
            weights_only: False for registered objects whose state is more than numbers, texts,
                containers and tensors.

        Returns:
            The step that was loaded; None if there is no checkpoint at all.
        """
        app = self._app()
        found = self.manager.restore({"app": app}, step, weights_only=weights_only)
        if found is not None:
            self._accelerator.step = app.extra["step"]
            self._random_numbers = rng_state()
        return found

    def skip_first_batches(self, dataloader: Any, number: int) -> Any:
        """Return the rest of an epoch, as `Accelerator.skip_first_batches` does.

        Starting the dataloader and skipping batches draw random numbers: until the first `save`
        after a restore, their state is set back to the restored one, which is what training had at
        that point.

        Args:
            dataloader: One that the Accelerator has prepared.
            number: Batches to skip; 0 returns the dataloader itself.
        """
        if not number:
            return dataloader
        rest: Any = self._accelerator.skip_first_batches(dataloader, number)
        if hasattr(rest, "set_epoch"):
            # Accelerate before 1.15 begins with the first epoch's order.
            rest.set_epoch(dataloader.iteration)
        return self._rest(rest)

    def _app(self) -> TrainState:
        accelerator = self._accelerator
        # Accelerate has no public names for these either.
        hooks = accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook
        if hooks and not self._has_told_of_hooks:
            self._has_told_of_hooks = True
            log.warning(
                "hooks of register_save_state_pre_hook and register_load_state_pre_hook aren't "
                "called: give what they save to register_for_checkpointing"
            )
        return _app(accelerator)

    def _rest(self, dataloader: Any) -> Iterator[Any]:
        for number, batch in enumerate(dataloader):
            if number == 0 and self._random_numbers is not None:
                set_rng_state(self._random_numbers)
            yield batch

    def close(
        self, flush: bool = True, *, progress: bool = True, persist_newest: bool = True
    ) -> None:
        """Wait until storage has what it should have, as `CheckpointManager.close` does."""
        self.manager.close(flush, progress=progress, persist_newest=persist_newest)

    def __enter__(self) -> AcceleratorCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)


class Untrained:
    """What `frozen=True` declares: parameters that don't train, as the last state has them."""

    def __init__(self) -> None:
        self._state: TrainState | None = None

    def noted(self, state: TrainState) -> TrainState:
        """Go by this state from now on, and return it."""
        self._state = state
        return state

    def instead_of(self, frozen: TensorChoice | bool | None) -> TensorChoice | None:
        """Return what a manager is told to take for frozen."""
        if isinstance(frozen, bool):
            return self if frozen else None
        return frozen

    def __call__(self, name: str, tensor: torch.Tensor) -> bool:
        return self._state is not None and self._state.is_frozen(name, tensor)


def refuse_engines(accelerator: Accelerator) -> None:
    """Raise ConfigError if models or optimizers aren't torch's own, or if FSDP1 is used."""
    kind = accelerator.distributed_type
    if kind in _ENGINES:
        raise ConfigError(
            f"{kind.value} keeps model and optimizer in an engine of its own: "
            f"use dcp_mem's adapter for that"
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP1 isn't supported: choose version 2 "
            "(fsdp_version=2, in TrainingArguments' fsdp_config version)"
        )


def bare_model(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without DDP and torch.compile around it, so that its names are its own."""
    bare: torch.nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return bare


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's own optimizer; the Accelerator's skips some calls of `step`."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _app(accelerator: Accelerator) -> TrainState:
    """Collect all that the Accelerator was given; anew each time, since it may be given more."""
    # Accelerate has no public names for these; they have been the same since its 0.3.
    models: Sequence[torch.nn.Module] = accelerator._models
    if not models:
        raise ConfigError(
            "the Accelerator has no model: call accelerator.prepare(model, …) before this"
        )
    bare = [bare_model(accelerator, model) for model in models]
    loaders = [loader for loader in accelerator._dataloaders if loader.use_stateful_dataloader]
    extra: dict[str, Any] = {
        f"object-{number}": one for number, one in enumerate(accelerator._custom_objects)
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
                f"the checkpoint has {len(state_dict)} schedulers or dataloaders, "
                f"{len(self._parts)} are prepared"
            )
        for number, part in enumerate(self._parts):
            part.load_state_dict(state_dict[str(number)])
