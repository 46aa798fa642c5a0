"""Train with Hugging Face's Trainer: one line after the Trainer is made."""

import argparse

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from dcp_mem.integrations.huggingface import TrainerCheckpoints

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("root", nargs="?", default="checkpoints/huggingface", help="or a URL")
parser.add_argument("steps", nargs="?", type=int, default=30)
parser.add_argument("--output", help="a local directory, for what the Trainer itself writes")
given = parser.parse_args()
root, beside = given.root, "checkpoints/huggingface" if "://" in given.root else given.root


class Regression(nn.Module):
    """A linear model that learns the sum of its inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)

    def forward(self, inputs):
        return {"loss": (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()}


torch.manual_seed(0)
trainer = Trainer(
    Regression(),
    TrainingArguments(
        given.output or f"{beside}-output",
        max_steps=given.steps,
        save_steps=5,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        remove_unused_columns=False,
    ),
    train_dataset=[{"inputs": torch.rand(16)} for _ in range(80)],
)
checkpoints = TrainerCheckpoints(trainer, root)
newest = checkpoints.manager.latest()
print("starting" if newest is None else f"resuming after step {newest}", flush=True)
trainer.train(resume_from_checkpoint=True)
