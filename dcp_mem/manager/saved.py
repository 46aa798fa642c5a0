"""`Saved`: what `CheckpointManager.save` returns; what checkpoints of steps are called."""

from __future__ import annotations

import re
from typing import Literal

from dcp_mem.common.value_class import value_class

_NAME = r"step-(\d+)"


def name_of(step: int) -> str:
    """Return what a manager calls the checkpoint of a step."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return the step that a checkpoint is called after; None for one that no manager named."""
    match = re.fullmatch(_NAME, name)
    return int(match[1]) if match else None


@value_class(kw_only=True, frozen=True)
class Saved:
    """The result of one call of `save`; true if it made, or began, a checkpoint.

    Attributes:
        step: The training step.
        name: The checkpoint id, `step-<number>`.
        outcome: "complete" (in memory), "begun" (with async_save: it becomes complete behind
            training), "not due" (by save_interval_steps), "skipped" (memory was full) or "failed".
        seconds: How long the call blocked training.
        nbytes: Size of the checkpoint, all ranks together.
        persist: Whether storage will get it.
        error: Why it failed.
        troubles: Flushes and copies that have failed on this node since the call before; with
            async_save, the save before where that has failed.
    """

    step: int
    name: str
    outcome: Literal["complete", "begun", "not due", "skipped", "failed"]
    seconds: float = 0.0
    nbytes: int = 0
    persist: bool = False
    error: str = ""
    troubles: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.outcome in ("complete", "begun")
