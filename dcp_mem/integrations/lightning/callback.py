"""`MemoryCheckpoint`: Lightning's `ModelCheckpoint` for checkpoints in node memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_mem.errors import ConfigError
from dcp_mem.integrations.lightning.checkpoint_io import MemoryCheckpointIO, plugin_of
from dcp_mem.integrations.lightning.paths import NEWEST, directory_of
from dcp_mem.integrations.lightning.strategies import SavesTogether
from dcp_mem.manager.preemption import Preemption


class MemoryCheckpoint(ModelCheckpoint):
    """Save as `ModelCheckpoint` does, and resume from the newest checkpoint with ckpt_path="last".

    "last" is the job's newest whole checkpoint, in memory or on storage, whatever it is called;
    save_last isn't needed. If there is none yet, training begins. Metrics that are logged reach the
    checkpoints, for `keep_best` and `dcp-mem ls`.

    A checkpoint whose name is taken, in memory or on storage, gets "-v1", as with ModelCheckpoint.
    `enable_version_counter=False` replaces the older one.

    Args:
        dirpath: As ModelCheckpoint's. Without it, checkpoints have names and no directory:
            `best_model_path` is then an address that `trainer.test(ckpt_path=…)` knows.
        filename: As ModelCheckpoint's.
        preemption: Signals ("SIGTERM", "SIGUSR1") at which the newest checkpoint is flushed before
            Lightning hears of them.
        preemption_deadline: Seconds that this flush may take at most.
        log_figures: Log what each save took to the trainer's loggers: checkpoint/seconds,
            checkpoint/bytes, and checkpoint/flush_seconds of the newest durable checkpoint.
        save_last: As ModelCheckpoint's; "link" is refused.
        every_n_train_steps: As ModelCheckpoint's.
        train_time_interval: As ModelCheckpoint's.
        **options: Further arguments of ModelCheckpoint.

    Raises:
        ConfigError: An argument can't work, or the trainer has no MemoryCheckpointIO.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        preemption: str | Sequence[str] = (),
        preemption_deadline: float = 25.0,
        log_figures: bool = True,
        save_last: bool | Literal["link"] | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        **options: Any,
    ) -> None:
        if save_last == "link":
            raise ConfigError(
                'save_last="link": there is no file to link to; '
                'ckpt_path="last" finds the newest without'
            )
        super().__init__(
            dirpath,
            filename,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            **options,
        )
        self._signals, self._deadline, self._log_figures = (
            preemption,
            preemption_deadline,
            log_figures,
        )
        self._preemption: Preemption | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the callback the job's own address where it has no directory."""
        if self.dirpath is None:
            self.dirpath = directory_of(plugin_of(trainer.strategy, self).settings.job)
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the preemption signals, before Lightning's handlers do."""
        super().on_train_start(trainer, pl_module)
        if self._signals:
            self._preemption = Preemption(
                plugin_of(trainer.strategy, self).writer, self._signals, self._deadline
            )
            self._preemption.install()  # It takes the signals before Lightning's handlers do.

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand the signals back."""
        super().on_train_end(trainer, pl_module)
        self._leave_signals()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Hand the signals back."""
        self._leave_signals()
        super().on_exception(trainer, pl_module, exception)

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Tell whether a save would replace a checkpoint in memory or on storage."""
        strategy, memory = trainer.strategy, plugin_of(trainer.strategy, self)
        is_asked = trainer.is_global_zero or (
            isinstance(strategy, SavesTogether) and strategy.local_rank == 0
        )
        is_taken = is_asked and memory.would_replace(filepath)
        return strategy.reduce_boolean_decision(is_taken, all=False)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        plugin_of(trainer.strategy, self)
        return {NEWEST}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._preemption is not None:
            self._preemption.wait()
        memory = plugin_of(trainer.strategy, self)
        memory.annotate_next_save(trainer.callback_metrics)
        started = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        if self._log_figures and trainer.is_global_zero:
            self._log(trainer, memory, time.monotonic() - started)

    def _log(self, trainer: Trainer, memory: MemoryCheckpointIO, seconds: float) -> None:
        figures = {"checkpoint/seconds": seconds}
        if memory.writer._saver.last_save is not None:
            figures["checkpoint/bytes"] = float(memory.writer._saver.last_save[0].nbytes)
        durable = [one.flush_seconds for one in memory.writer.status() if one.durable]
        if durable:
            figures["checkpoint/flush_seconds"] = durable[0]
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def _leave_signals(self) -> None:
        if self._preemption is not None:
            self._preemption.uninstall()
        self._preemption = None
