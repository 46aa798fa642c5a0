"""TensorBoard. Needs the extra `tensorboard`."""

from __future__ import annotations

import os

from torch.utils.tensorboard import SummaryWriter

from dcp_mem.errors import ConfigError
from dcp_mem.trackers.base import Event


class TensorBoard:
    """Writes figures as scalars by step (`checkpoint/save_seconds`, …), and what fails as text (`checkpoint/trouble`).

    log_dir: where to. writer: one of yours instead, which stays open. Raises ConfigError unless it is one of both.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        writer: SummaryWriter | None = None,
        prefix: str = "checkpoint",
    ) -> None:
        if (log_dir is None) == (writer is None):
            raise ConfigError("TensorBoard: give log_dir, or a writer of yours")
        self._log_dir = log_dir
        self._writer, self._is_ours = writer, writer is None
        self._prefix = prefix

    def track(self, event: Event) -> None:
        if self._writer is None:  # on rank 0 alone: each one that is made makes a file
            self._writer = SummaryWriter(str(self._log_dir))
        step = event.step or 0
        for name, value in event.scalars().items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step, event.time)
        if event.detail:
            text = f"{event.kind} of {event.checkpoint}: {event.outcome}; {event.detail}"
            self._writer.add_text(f"{self._prefix}/trouble", text, step, event.time)
        self._writer.flush()

    def close(self) -> None:
        if self._is_ours and self._writer is not None:
            self._writer.close()
