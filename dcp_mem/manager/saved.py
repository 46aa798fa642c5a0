"""`Saved`: what `CheckpointManager.save` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
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
