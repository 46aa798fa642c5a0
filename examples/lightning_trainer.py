"""Train with Lightning: a plugin and a callback take checkpoints through memory."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dcp_mem.integrations.lightning import MemoryCheckpoint, MemoryCheckpointIO

root = sys.argv[1] if len(sys.argv) > 1 else "checkpoints/lightning"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30


class Regression(pl.LightningModule):
    """A linear model that learns the sum of its inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)

    def training_step(self, batch, number):
        (inputs,) = batch
        loss = (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self):
        step = self.trainer.global_step
        print(f"resuming after step {step - 1}" if step else "starting", flush=True)


pl.seed_everything(0, verbose=False)
trainer = pl.Trainer(
    max_steps=steps,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[MemoryCheckpointIO(root)],
    callbacks=[MemoryCheckpoint(every_n_train_steps=5)],
)
batches = DataLoader(TensorDataset(torch.rand(80, 16)), batch_size=8)
trainer.fit(Regression(), batches, ckpt_path="last")
