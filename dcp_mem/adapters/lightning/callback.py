"""`MemoryCheckpoint`: Lightning's `ModelCheckpoint` for a job whose checkpoints lie in node memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_mem.adapters.lightning.checkpoint_io import MemoryCheckpointIO
from dcp_mem.adapters.lightning.places import NEWEST, directory_of
from dcp_mem.errors import ConfigError
from dcp_mem.preemption import Preemption


class MemoryCheckpoint(ModelCheckpoint):
    """Saves as `ModelCheckpoint` does, and has `trainer.fit(ckpt_path="last")` go on from the newest checkpoint there is.

    "last" is the newest one of the job that is whole, in memory or on storage, whatever it is called; save_last isn't needed.
    Where there is none yet, training begins. preemption: signals ("SIGTERM", "SIGUSR1") at which the newest checkpoint goes to
    storage, for up to `deadline` seconds, before Lightning hears of them. log_figures: log what each save took
    (checkpoint/seconds, checkpoint/bytes, and checkpoint/flush_seconds of the newest that is durable) to the trainer's loggers.
    Metrics that are logged reach the checkpoints, for `keep_best` and `dcp-mem ls`.

    Further arguments are ModelCheckpoint's. Without a dirpath, checkpoints have names and no directory: `best_model_path` is then
    an address that `trainer.test(ckpt_path=…)` knows. A name that is saved again replaces the older checkpoint; none gets "-v1".

    Raises ConfigError where the trainer has no MemoryCheckpointIO.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        preemption: str | Sequence[str] = (),
        deadline: float = 25.0,
        log_figures: bool = True,
        save_last: bool | Literal["link"] | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        **options: Any,
    ) -> None:
        if save_last == "link":
            raise ConfigError(
                'save_last="link": there is no file to link to; ckpt_path="last" finds the newest without'
            )
        super().__init__(
            dirpath,
            filename,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            **options,
        )
        self._signals, self._deadline, self._log_figures = preemption, deadline, log_figures
        self._preemption: Preemption | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = directory_of(_plugin(trainer).settings.job)
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._signals:
            self._preemption = Preemption(_plugin(trainer).writer, self._signals, self._deadline)
            self._preemption.install()  # over Lightning's handlers, which come next

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._leave_signals()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave_signals()
        super().on_exception(trainer, pl_module, exception)

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Nothing is in the way of a save: what has the same name is replaced, once the new one is whole."""
        return False

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        _plugin(trainer)
        return {NEWEST}

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        memory = _plugin(trainer)
        memory.tell(trainer.callback_metrics)
        started = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        if self._log_figures and trainer.is_global_zero:
            self._log(trainer, memory, time.monotonic() - started)

    def _log(self, trainer: Trainer, memory: MemoryCheckpointIO, seconds: float) -> None:
        figures = {"checkpoint/seconds": seconds}
        if memory.writer.last_save is not None:
            figures["checkpoint/bytes"] = float(memory.writer.last_save[0].nbytes)
        durable = [one.flush_seconds for one in memory.writer.status() if one.durable]
        if durable:
            figures["checkpoint/flush_seconds"] = durable[0]
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def _leave_signals(self) -> None:
        if self._preemption is not None:
            self._preemption.uninstall()
        self._preemption = None


def _plugin(trainer: Trainer) -> MemoryCheckpointIO:
    io = trainer.strategy.checkpoint_io
    if not isinstance(io, MemoryCheckpointIO):
        raise ConfigError(
            "MemoryCheckpoint saves through MemoryCheckpointIO: give Trainer(plugins=[MemoryCheckpointIO(root)])"
        )
    return io
