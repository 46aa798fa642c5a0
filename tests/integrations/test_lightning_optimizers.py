"""Lightning's Trainer over dcp_mem: what optimizers of other kinds than the usual resume with."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_mem import ConfigError
from dcp_mem.integrations.lightning import NEWEST, MemoryCheckpoint, MemoryCheckpointIO
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.frameworks.lightning_job import (
    BATCHES,
    STRATEGIES,
    Model,
    assert_same,
    trainer,
)
from tests.support.processes.forks import forked_ranks, forking, on_ranks, raised_by


class _ByHand(Model):
    """Steps two optimizers and their schedulers itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.net[0].parameters(), 0.01)
        groups: Any = [{"params": self.net[number].parameters(), "lr": 0.1} for number in (2, 3)]
        sgd = torch.optim.SGD(groups, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        return [adam, sgd], [
            schedulers.StepLR(adam, 2, 0.5),
            {"scheduler": schedulers.CosineAnnealingLR(sgd, 20), "interval": "step"},
        ]


class _Lbfgs(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3, history_size=2)


_KINDS: dict[str, type[Model]] = {"by hand": _ByHand, "lbfgs": _Lbfgs}
_STEPS = {"by hand": 2 * BATCHES, "lbfgs": BATCHES}  # of an epoch, as Lightning counts them


def _train(memory: str, kind: str, strategy: str, job: str, killed_at: int | None) -> int:
    """The step that a training on two ranks begins with."""
    rank = os.environ["FORK_RANK"]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    model = _KINDS[kind](killed_at, strategy == "model_parallel")
    plugin = MemoryCheckpointIO(None, memory_root=memory, job=job)
    chosen = {"strategy": STRATEGIES[strategy](), "devices": 2, "max_epochs": 3}
    trainer(plugin, MemoryCheckpoint(), **chosen).fit(model, ckpt_path="last")
    return model.first


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("by hand", "ddp", marks=pytest.mark.variant),
        ("by hand", "memory_ddp"),
        pytest.param("by hand", "model_parallel", marks=needs_fsdp_on_cpu),
        pytest.param("lbfgs", "ddp", marks=pytest.mark.variant),
        ("lbfgs", "memory_ddp"),
    ],
)
def test_a_killed_job_goes_on_with_its_optimizers_as_if_nothing_had_been(
    memory_root: Path, kind: str, strategy: str
) -> None:
    run, steps = (str(memory_root), kind, strategy), _STEPS[kind]
    with (
        forking(_train, 2, *run, "killed", 2 * steps + steps // BATCHES) as job,
        pytest.raises(AssertionError, match="SIGKILL"),
    ):
        job.join()
    assert forked_ranks(_train, 2, *run, "killed", None) == [2 * steps] * 2
    assert forked_ranks(_train, 2, *run, "alone", None) == [0] * 2
    resumed, alone = (
        MemoryCheckpointIO(None, memory_root=memory_root, job=name).load_checkpoint(NEWEST)
        for name in ("killed", "alone")
    )
    assert resumed["global_step"] == 3 * steps
    assert_same(resumed, alone)


@needs_fsdp_on_cpu
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
@on_ranks(2)
def test_an_optimizer_that_shards_cannot_resume_is_refused_at_the_first_save(
    memory_root: Path, strategy: str
) -> None:
    memory = str(memory_root)
    error = raised_by(partial(_train, memory, "lbfgs", strategy, "job", None))
    assert isinstance(error, ConfigError)
    said = str(error)
    assert said.startswith("LBFGS: its state of sharded parameters can't be restored")
