"""`TrainerCheckpoints`: a Hugging Face Trainer saves into node memory, and resumes from it."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("transformers")

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import Unpack

from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import CheckpointNotFound, ConfigError
from dcp_mem.integrations.accelerate import (
    Untrained,
    bare_model,
    bare_optimizer,
    refuse_engines,
)
from dcp_mem.manager import CheckpointManager, Saved, step_of
from dcp_mem.manager.options import DEFAULTS, LoopOptions
from dcp_mem.planning.own_keys import own_keys_given, own_keys_taken
from dcp_mem.planning.tensor_choice import TensorChoice
from dcp_mem.policy.retention import Retention, any_of, keep_best, keep_last
from dcp_mem.train_state import TrainState, rng_state, set_rng_state

_TAKEN_OVER = (
    "train",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
_PREFIX = "dcp_mem-trainer-"
_BEST = re.compile(rf".*/{_PREFIX}[^/]+/best-(\d+)")
_STATE = "trainer_state.json"
_IS_BEST = "is_best"
"""Figure of the checkpoints that were the best when they were saved."""


@takes(LoopOptions, DEFAULTS)
class TrainerCheckpoints:
    """Take over a Trainer's checkpoints: they go to node memory first, to storage behind training.

    `trainer.train(resume_from_checkpoint=True)` then loads the newest whole checkpoint. If dcp_mem
    has none, it loads what the Trainer itself has left in output_dir; if that is empty too, it
    trains from the start. "step-40" loads that checkpoint; a directory is loaded as the Trainer
    does. train() returns when storage has what it should have.

    Args:
        trainer: A `transformers.Trainer` or a subclass: DDP, FSDP2 or a single process. Its
            arguments say when to save, as before (save_strategy, save_steps).
        path: As in `CheckpointManager`.
        frozen: As in `CheckpointManager`; True for all parameters that don't train, as the base
            below adapters of peft.
        weights_only: False to load a state that is more than numbers, texts, containers and
            tensors, as of a scheduler of your own. Unpickling it may run code.
        **options: Further arguments of `CheckpointManager`, which is the attribute `manager`. By
            default storage keeps save_total_limit checkpoints, and with load_best_model_at_end or
            metric_for_best_model both memory and storage keep the best one.

    Raises:
        ConfigError: An argument can't work; FSDP1 or DeepSpeed is used; or the Trainer lacks a
            method that is to be replaced.
    """

    def __init__(
        self,
        trainer: transformers.Trainer,
        path: str | os.PathLike[str] | None = None,
        /,
        *,
        frozen: TensorChoice | bool | None = None,
        weights_only: bool = True,
        **options: Unpack[LoopOptions],
    ) -> None:
        _check(trainer)
        self._untrained = Untrained()
        frozen = self._untrained.instead_of(frozen)
        chosen: LoopOptions = {**_retention(trainer.args), **options}
        self.manager = CheckpointManager(path, frozen=frozen, **chosen)
        self.last_saved: Saved | None = None
        self._weights_only = weights_only
        self._trainer: Any = trainer
        self._stock = {name: getattr(trainer, name) for name in _TAKEN_OVER}
        self._directory = Path()
        self._resumption: _Resumption | None = None
        self._random_numbers: dict[str, Any] = {}
        for name in _TAKEN_OVER:
            setattr(trainer, name, getattr(self, name.removeprefix("_")))

    # -- in place of the Trainer's methods, in the order of its calls ------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as `Trainer.train` does.

        Args:
            resume_from_checkpoint: True for the newest checkpoint; `step-<number>` for one step's;
                another text is a directory that the Trainer loads itself; None or False for none.
            *args: Handed on to `Trainer.train`.
            **kwargs: Handed on to `Trainer.train`.
        """
        with self.manager, tempfile.TemporaryDirectory(prefix=_PREFIX) as directory:
            self._directory = Path(directory)
            start = self._start(resume_from_checkpoint)
            while True:
                self._resumption = start if isinstance(start, _Resumption) else None
                where = start.directory if isinstance(start, _Resumption) else start
                if self._resumption is None:
                    self.manager._begin_anew()
                try:
                    return self._stock["train"](where, *args, **kwargs)
                except _LoadedAnother as other:
                    start = self._peek(other.step, is_asked_for=False)
                finally:
                    self._resumption = None

    def load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Leave the model of a checkpoint in memory to the later restore."""
        if self._is_ours(resume_from_checkpoint):
            return  # The model is restored with all the rest, once it is prepared.
        self._stock["_load_from_checkpoint"](resume_from_checkpoint, *args, **kwargs)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the whole training state, once the Trainer has prepared it."""
        resumption = self._resumption
        if resumption is None or not self._is_ours(checkpoint):
            self._stock["_load_optimizer_and_scheduler"](checkpoint)
            return
        found = self.manager.restore(
            {"app": self._app()},
            resumption.step if resumption.is_asked_for else None,
            weights_only=self._weights_only,
        )
        if found != resumption.step:
            raise _LoadedAnother(found)
        self._random_numbers = rng_state()

    def load_scaler(self, checkpoint: str | None) -> None:
        """Leave the scaler of a checkpoint in memory to the restore."""
        if not self._is_ours(checkpoint):
            self._stock["_load_scaler"](checkpoint)

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Put the random numbers back to where the restore left them."""
        if self._is_ours(checkpoint):
            # Once more, since skipping earlier batches has drawn random numbers.
            set_rng_state(self._random_numbers)
        else:
            self._stock["_load_rng_state"](checkpoint)

    def save_checkpoint(self, model: torch.nn.Module, trial: Any = None) -> None:
        """Save the training state in memory, where the Trainer would write a directory."""
        if trial is not None:  # Each trial of a search has its own directory.
            self._stock["_save_checkpoint"](model, trial)
            return
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        state.stateful_callbacks = _callback_states(trainer)
        is_best = state.best_global_step == state.global_step
        if is_best:  # A best step that isn't saved leaves the one before as the best checkpoint.
            state.best_model_checkpoint = self._best(state.global_step)
        self.last_saved = self.manager.save(
            state.global_step,
            {
                "app": self._untrained.noted(self._app()),
                "trainer": _as_json(state),
            },
            metrics={**_figures(state), **({_IS_BEST: 1.0} if is_best else {})},
            force_persist=is_best and _keeps_best(self._trainer.args),
        )

    def load_best_model(self) -> None:
        """Put the best step's weights into the model; keep the last ones if they are gone."""
        step = _best_step(self._trainer.state.best_model_checkpoint)
        if step is None:  # The Trainer itself has saved it, before a resume or in a search.
            self._stock["_load_best_model"]()
            return
        model = bare_model(self._trainer.accelerator, self._trainer.model)
        with own_keys_given(model) as apart:
            weights = {**get_model_state_dict(model), **apart}
        try:
            self.manager.restore({"app": {"model": weights}}, step)
        except CheckpointNotFound as error:
            log.warning(
                "the model stays that of the last step: the best one's checkpoint is gone (%s)",
                error,
            )
            return
        with own_keys_taken(model, dict(weights)):
            set_model_state_dict(model, weights)

    # -- what is saved, and what is there ----------------------------------------------------------

    def _app(self) -> TrainState:
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        return TrainState(
            bare_model(trainer.accelerator, trainer.model),
            bare_optimizer(trainer.optimizer),
            trainer.lr_scheduler,
            extra={} if scaler is None else {"scaler": scaler},
        )

    def _start(self, given: str | bool | None) -> _Resumption | str | bool | None:
        """Find what to resume from: a checkpoint of dcp_mem, or as the Trainer is told."""
        if given is True:
            return self._peek(None, is_asked_for=False) or self._trainers_own()
        step = step_of(given) if isinstance(given, str) else None
        return given if step is None else self._peek(step, is_asked_for=True)

    def _peek(self, step: int | None, *, is_asked_for: bool) -> _Resumption | None:
        """Find the newest checkpoint of ours, or a step's, and give the Trainer its state."""
        saved = {"trainer": ""}
        found = self.manager.restore(saved, step)
        if found is None:
            return None
        state = json.loads(saved["trainer"])
        saved_as = state["best_model_checkpoint"]
        best = state["best_global_step"] if saved_as is None else _best_step(saved_as)
        if best is not None:
            state["best_model_checkpoint"] = self._best(best)
        place = self._directory / f"checkpoint-{found}"
        place.mkdir(exist_ok=True)
        (place / _STATE).write_text(json.dumps(state))
        return _Resumption(found, str(place), is_asked_for)

    def _best(self, step: int) -> str | None:
        """Make a directory for the best model's checkpoint: the Trainer looks for one."""
        if not self._trainer.args.load_best_model_at_end:
            return None
        place = self._directory / f"best-{step}"
        place.mkdir(exist_ok=True)
        return str(place)

    def _trainers_own(self) -> str | None:
        output = self._trainer.args.output_dir
        found = str(get_last_checkpoint(output) or "") if os.path.isdir(output) else ""  # type: ignore[no-untyped-call]
        log.info("there is no checkpoint of dcp_mem; resuming from %s", found or "the start")
        return found or None

    def _is_ours(self, checkpoint: str | None) -> bool:
        return self._resumption is not None and checkpoint == self._resumption.directory


@value_class
class _Resumption:
    """A checkpoint that is being resumed from."""

    step: int
    directory: str
    is_asked_for: bool  # whether it was asked for by name, so that no other one will do


class _LoadedAnother(Exception):
    """The newest checkpoint was damaged, an older one was loaded: count from that."""

    def __init__(self, step: int | None) -> None:
        super().__init__(f"step {step} was loaded")
        self.step = step


def _best_step(directory: str | None) -> int | None:
    """Tell which step of ours a best checkpoint is of; None if the Trainer has saved it."""
    match = _BEST.fullmatch(directory or "")
    return None if match is None else int(match[1])


def _check(trainer: transformers.Trainer) -> None:
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(
            f"{type(trainer).__name__} is no transformers.Trainer: "
            f"make the Trainer first, and pass it"
        )
    if isinstance(getattr(trainer.train, "__self__", None), TrainerCheckpoints):
        raise ConfigError("this Trainer has TrainerCheckpoints already: make them once")
    missing = [name for name in _TAKEN_OVER if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}: "
            f"versions from 4.52 to 5.23 are known to work"
        )
    refuse_engines(trainer.accelerator)


def _keeps_best(args: Any) -> bool:
    """Tell whether the best checkpoint is to stay; the metric may be for the scheduler alone."""
    is_for_scheduler = args.lr_scheduler_type == "reduce_lr_on_plateau"
    is_chosen = args.metric_for_best_model is not None and not is_for_scheduler
    return bool(args.load_best_model_at_end or is_chosen)


def _retention(args: Any) -> LoopOptions:
    """Translate the Trainer's arguments into retention."""
    kept: LoopOptions = {}
    best: list[Retention] = []
    if _keeps_best(args):
        # The Trainer's choice, not the metric: it keeps the older one of equal ones, and a step
        # that isn't saved may be better than a later one that is.
        best.append(keep_best(_IS_BEST, mode="max"))
        # In memory too: a newer checkpoint may push out one that still awaits its flush.
        kept["keep_memory"] = any_of(keep_last(2), *best)
    if args.save_total_limit is not None and args.save_total_limit > 0:
        kept["keep_storage"] = any_of(keep_last(args.save_total_limit), *best)
    return kept


def _as_json(state: Any) -> str:
    """Return a Trainer's state as the Trainer writes it. Raises ConfigError."""
    fields = dataclasses.asdict(state)
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        callbacks = fields.pop("stateful_callbacks")
        parts = {**fields, **callbacks}
        raise ConfigError(
            f"the Trainer's state can't be saved, nor by the Trainer itself: {error}, in "
            f"{', '.join(name for name, part in parts.items() if not _is_json(part))}"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _callback_states(trainer: Any) -> dict[str, Any]:
    """Collect the states of callbacks as a TrainerState has them: a list for several of a class."""
    states: dict[str, list[Any]] = {}
    for one in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(one, ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _figures(state: Any) -> dict[str, float]:
    """Collect the figures that were logged at this step."""
    return {
        name: value
        for entry in state.log_history
        if entry.get("step") == state.global_step
        for name, value in entry.items()
        if isinstance(value, (int, float))
    }
