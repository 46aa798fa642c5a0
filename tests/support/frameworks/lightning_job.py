"""A training with Lightning, as a user writes it, for tests that run and kill it.

It runs on ranks of torchrun's, or in one process.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from dcp_mem.integrations.lightning import (
    MemoryCheckpoint,
    MemoryCheckpointIO,
    MemoryDDPStrategy,
    MemoryFSDPStrategy,
    MemoryModelParallelStrategy,
)

EPOCHS = 4
BATCHES = 3


class Model(pl.LightningModule):
    """A small model that can kill or signal its process after so many batches."""

    def __init__(
        self,
        killed_at: int | None = None,
        sharded: bool = False,
        lr: float = 0.01,
        signal_number: signal.Signals = signal.SIGKILL,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
        self.killed_at, self.sharded, self.signal_number, self.first = (
            killed_at,
            sharded,
            signal_number,
            -1,
        )

    def configure_model(self) -> None:
        if self.sharded and not any(
            "FSDP" in type(module).__name__ for module in self.net.modules()
        ):
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        step = self.trainer.global_step
        self.first = step if self.first < 0 else self.first
        if step == self.killed_at:
            os.kill(os.getpid(), self.signal_number)
        loss: torch.Tensor = (self.net(batch) - batch[:, :4]).square().mean()
        self.log("loss", loss.detach(), on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        world = self.trainer.world_size
        batches: Any = torch.rand(
            BATCHES * 2 * world, 8, generator=torch.Generator().manual_seed(2)
        )
        return DataLoader(batches, batch_size=2)


class _FSDPOnCpu(MemoryFSDPStrategy):
    """FSDP takes the CPU for a device only where it is told to, which Lightning doesn't do."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": _FSDPOnCpu,
    "memory_ddp": MemoryDDPStrategy,
    "model_parallel": lambda: MemoryModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1
    ),
}


def trainer(plugin: CheckpointIO, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet one on the CPU."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    chosen = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, **quiet, **options}
    return pl.Trainer(plugins=[plugin], callbacks=list(callbacks), **chosen)


def train(strategy: Any, plugin: MemoryCheckpointIO, killed_at: int | None) -> Model:
    """Train all epochs, from where the job's last run left off."""
    model = Model(killed_at, sharded=isinstance(strategy, MemoryModelParallelStrategy))
    devices = int(os.environ["WORLD_SIZE"])
    trainer(plugin, MemoryCheckpoint(), strategy=strategy, devices=devices).fit(
        model, ckpt_path="last"
    )
    return model


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Hold two checkpoints together: all but where they lie."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one.keys() - {"callbacks"}:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one.to_dense(), other.to_dense()), where
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (inner, its_other) in enumerate(zip(one, other, strict=True)):
            assert_same(inner, its_other, f"{where}.{number}")
    else:
        assert one == other, where


def _main(directory: str, memory: str, killed_at: int | None, *kinds: str) -> None:
    """Train with these strategies in turn, each beside an undisturbed job; note each resume."""
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    said = {}
    for kind in kinds:
        plugin = MemoryCheckpointIO(
            Path(directory, kind), memory_root=memory, persist=killed_at is None
        )
        model = train(STRATEGIES[kind](), plugin, killed_at)
        report = plugin.report()
        alone = train(
            STRATEGIES[kind](),
            MemoryCheckpointIO(None, memory_root=memory, job=f"alone-{kind}"),
            None,
        )
        said[kind] = [report.checkpoint_id, report.source, model.first, alone.first]
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
