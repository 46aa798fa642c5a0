"""`WandB`: figures as metrics of a Weights & Biases run. Needs the extra `wandb`."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("wandb")

from collections import deque
from typing import Any

import wandb

from dcp_mem.errors import ConfigError
from dcp_mem.manager.tracker import KINDS, Event


class WandB:
    """Log figures as metrics of a run (`checkpoint/save_seconds`, …), each over its event's step.

    W&B's own step stays yours: a row of yours that comes after takes the figures along, and no row
    is committed before the end. The run is never finished here.

    Args:
        run: By default the run that is active when the tracker is made.
        prefix: First part of the metrics' names.
    """

    def __init__(self, run: wandb.Run | None = None, *, prefix: str = "checkpoint") -> None:
        self._run = wandb.run if run is None else run
        self._prefix = prefix
        self._waiting: deque[dict[str, Any]] = deque()
        self._row: int | None = None  # W&B's step of the row that isn't committed yet.
        self._taken: set[str] = set()  # What of it is ours.

    def track(self, event: Event) -> None:
        run = self._open()
        name, step = f"{self._prefix}/{event.kind}", event.step or 0
        values = {f"{self._prefix}/{key}": value for key, value in event.scalars().items()}
        self._waiting.append({f"{name}_step": step, **values})
        run.summary[f"{self._prefix}/last_{event.kind}"] = event.summary
        self._hand_over(run)

    def close(self) -> None:
        if self._run is None:
            return
        self._hand_over(self._run)
        while self._waiting:  # Nobody's rows come any more: ours may have some of their own.
            self._run.log({}, commit=True)
            self._hand_over(self._run)

    def _open(self) -> wandb.Run:
        if self._run is None:  # Raised only now, since other ranks need no run.
            raise ConfigError(
                "WandB: no run was active when this tracker was made: make it after wandb.init, "
                "or give run="
            )
        if self._row is None:
            for kind in KINDS:
                step = f"{self._prefix}/{kind}_step"
                self._run.define_metric(step, hidden=True)
                self._run.define_metric(f"{self._prefix}/{kind}_*", step_metric=step)
        return self._run

    def _hand_over(self, run: wandb.Run) -> None:
        """Add what waits to the row that isn't committed yet, as far as nothing is overwritten."""
        if run.step != self._row:
            self._row, self._taken = run.step, set()
        while self._waiting and self._taken.isdisjoint(self._waiting[0]):
            row = self._waiting.popleft()
            self._taken |= row.keys()
            run.log(row, commit=False)
            if run.step != self._row:
                # The loop has begun a row meanwhile, and nobody knows which of the two took ours.
                self._row, self._taken = run.step, set(row)
