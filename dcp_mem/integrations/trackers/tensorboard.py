"""`TensorBoard`: figures as scalars in TensorBoard. Needs the extra `tensorboard`."""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("tensorboard")

import os

from torch.utils.tensorboard import SummaryWriter

from dcp_mem.errors import ConfigError
from dcp_mem.manager.tracker import Event


class TensorBoard:
    """Write figures as scalars by step (`checkpoint/save_seconds`, …), and failures as text.

    Args:
        log_dir: Directory to write to.
        writer: A writer of yours instead, which stays open.
        prefix: First part of the scalars' names.

    Raises:
        ConfigError: Neither or both of log_dir and writer are given.
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
        if self._writer is None:  # Made on rank 0 alone, since each writer makes a file.
            self._writer = SummaryWriter(str(self._log_dir))
        step = event.step or 0
        for name, value in event.scalars().items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, step, event.time)
        if event.detail:
            text = f"{event.kind} of {event.summary}"
            self._writer.add_text(f"{self._prefix}/trouble", text, step, event.time)
        self._writer.flush()

    def close(self) -> None:
        if self._is_ours and self._writer is not None:
            self._writer.close()
