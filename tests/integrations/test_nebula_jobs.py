"""Nebula's three sample jobs of azureml-examples, with their calls: killed, and started again.

The data is made here, and the networks are small. What a job of theirs lacks is the resume: each
has the line that docs/nebula.md names.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dcp_mem.integrations import nebula
from tests.support.processes.forks import forked_ranks, killed_ranks

_STEPS, _EACH, _KILLED_AFTER = 6, 2, 5


def _batch(step: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, *shape, generator=generator), torch.arange(4) % 2


class _Net(nn.Module):
    """A convolution and a layer, on pictures of 8 by 8 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.fc = nn.Conv2d(channels, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.fc(torch.flatten(F.relu(self.conv(x)), 1)), dim=1)


def _die(step: int, is_killed: bool) -> None:
    if is_killed and step == _KILLED_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)


def _weights(model: nn.Module) -> list[float]:
    return [float(one.detach().double().sum()) for one in model.parameters()]


def _mnist(place: str, is_killed: bool) -> tuple[int, list[float]]:
    """A CNN on MNIST with no trainer: `init`, and `Checkpoint().save` for `torch.save`."""
    nebula.install()
    import nebulaml as nm  # type: ignore[import-not-found]

    nm.init(persistent_storage_path=f"{place}/tier3/test3", persistent_time_interval=2)
    model = _Net(1)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    first, latest = 0, nm.get_latest_checkpoint()
    if latest.tag:
        first, weights, state = latest.load("mnist_cnn", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step in range(first, _STEPS):
        _die(step, is_killed)
        data, target = _batch(step, 1, 8, 8)
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()
        if (step + 1) % _EACH == 0:
            checkpoint = nm.Checkpoint()
            state = (step + 1, model.state_dict(), optimizer.state_dict())
            checkpoint.save("mnist_cnn", state)
    return first, _weights(model)


def _nebula_section(place: str) -> dict[str, Any]:
    return {
        "enabled": True,
        "persistent_storage_path": f"{place}/data_storage",
        "persistent_time_interval": 100,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": True,
    }


def _prepared_deepspeed() -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("RANK", "0")}
    nebula.install()
    import deepspeed

    # It would be compiled, for minutes; gloo alone does as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _cifar(place: str, is_killed: bool) -> tuple[int, list[float]]:
    """CIFAR-10 with DeepSpeed: `ds_config.json` names Nebula, the script `save_checkpoint`."""
    from argparse import Namespace

    deepspeed = _prepared_deepspeed()
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "nebula": _nebula_section(place),
    }
    Path(place, "ds_config.json").write_text(json.dumps(config))
    args = Namespace(deepspeed_config=f"{place}/ds_config.json", local_rank=0)
    deepspeed.init_distributed(dist_backend="gloo")
    net = _Net(3)
    rows = [tuple(part[0] for part in _batch(number, 3, 8, 8)) for number in range(16)]
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=rows
    )
    assert len(trainloader) == 2
    model_engine.load_checkpoint(f"{place}/cifar1")
    first = model_engine.global_steps
    for step in range(first, _STEPS):
        _die(step, is_killed)
        inputs, labels = _batch(step, 3, 8, 8)
        model_engine.backward(nn.CrossEntropyLoss()(model_engine(inputs), labels))
        model_engine.step()
        if (step + 1) % _EACH == 0:
            model_engine.save_checkpoint(f"{place}/cifar1")
    return first, _weights(net)


def _bert(place: str, is_killed: bool) -> tuple[int, list[float]]:
    """BERT with the Trainer and DeepSpeed: `--deepspeed ds_config.json --save_steps 20`."""
    _prepared_deepspeed()
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Dies(TrainerCallback):
        first = -1

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.first = state.global_step if self.first < 0 else self.first
            _die(state.global_step, is_killed)

    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "nebula": _nebula_section(place),
    }
    Path(place, "ds_config.json").write_text(json.dumps(config))
    arguments = TrainingArguments(
        f"{place}/outputs",
        max_steps=_STEPS,
        save_steps=_EACH,
        per_device_train_batch_size=2,
        deepspeed=f"{place}/ds_config.json",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(1)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    rows: Any = [
        {"input_ids": torch.arange(8) + number % 9, "labels": number % 2} for number in range(64)
    ]
    dies = Dies()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[dies])
    trainer.train(resume_from_checkpoint=any(Path(place, "outputs").glob("checkpoint-*")))
    return dies.first, _weights(model)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        (_mnist, 1),
        # DeepSpeed trains with this section in test_deepspeed.py, the Trainer in its own tests.
        pytest.param(_cifar, 2, marks=pytest.mark.variant),
        pytest.param(_bert, 1, marks=pytest.mark.variant),
    ],
)
def test_a_sample_job_goes_on_where_it_was_killed(
    memory_root: Path, tmp_path: Path, job: Callable[[str, bool], Any], ranks: int
) -> None:
    if job is not _mnist:
        pytest.importorskip("deepspeed.nebula")  # up to DeepSpeed 0.19.6
    env = {"DCP_MEM_ROOT": str(memory_root), "DCP_MEM_TIMEOUT": "60"}
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for place in (killed, undisturbed):
        place.mkdir()
    killed_ranks(job, ranks, str(killed), True, env=env, timeout=240)
    found = forked_ranks(job, ranks, str(killed), False, env=env, timeout=240)
    expected = forked_ranks(job, ranks, str(undisturbed), False, env=env, timeout=240)
    assert [first for first, _ in found] == [4] * ranks
    assert [weights for _, weights in found] == [weights for _, weights in expected]
