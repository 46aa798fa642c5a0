"""Adapters of peft on a frozen base: what is shared and sent, and training that goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from dcp_mem import CheckpointManager, CheckpointStatus, TrainState
from dcp_mem.integrations.accelerate import AcceleratorCheckpoints
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(200)]

_VOCABULARY, _STEPS = 2048, 6


def _model() -> tuple[Any, TrainState, Callable[[int], float]]:
    """The model, its state, and what trains it for a step and returns the loss."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=_VOCABULARY,
    )
    base = LlamaForCausalLM(config).bfloat16()
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    training = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(training, 1e-2)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, _VOCABULARY, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, TrainState(model, optimizer), step


def _train(
    job: Job, steps: range, *, restores: bool
) -> tuple[list[float], list[CheckpointStatus], int]:
    """Train and save at each step; return losses, status, and the bytes that train."""
    model, state, step = _model()
    losses = []
    places: dict[str, Any] = {"memory_root": job.memory, "job": "job", "agent": "thread"}
    with CheckpointManager(job.url, frozen=state.is_frozen, **places) as manager:
        if restores:
            assert manager.restore({"app": state}, skip=state.is_frozen) == steps[0] - 1
        for number in steps:
            losses.append(step(number))
            manager.save(number, {"app": state})
            manager.wait()
        status = list(manager.status())
    training = [one for one in model.parameters() if one.requires_grad]
    assert {one.dtype for one in training} == {torch.float32}
    return losses, status, 3 * sum(one.nbytes for one in training)


def _run(job: Job, first: int, last: int, restores: bool) -> Any:
    return _train(job, range(first, last + 1), restores=restores)


def test_a_run_with_adapters_goes_on_as_if_nothing_had_been(
    memory_root: Path, tmp_path: Path
) -> None:
    jobs = []
    for name in ("whole", "in-two"):
        (memory_root / name).mkdir(mode=0o700)
        jobs.append(Job(str(tmp_path / name), str(memory_root / name)))
    expected, status, trained = forked(_run, jobs[0], 1, _STEPS, False, timeout=120)
    first, *_ = forked(_run, jobs[1], 1, 3, False, timeout=120)
    second, *_ = forked(_run, jobs[1], 4, _STEPS, True, timeout=120)
    assert [*first, *second] == expected
    sent = {one.name: one.transfer.sent_nbytes for one in status}
    assert all(
        nbytes <= 1.1 * trained + (1 << 20) for name, nbytes in sent.items() if name[-1] > "1"
    )
    inodes = [path.stat().st_ino for path in jobs[0].directory.glob("step-*/__0_1-*.distcp")]
    assert len(inodes) > len(set(inodes)) == 1


def test_each_stored_checkpoint_has_the_base(memory_root: Path, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "run"), str(memory_root))
    forked(_run, job, 1, 3, False, timeout=120)
    _, state, _ = _model()
    found = {"app": {"model": {name: torch.zeros_like(one) for name, one in _weights(state)}}}
    dcp.load(found, checkpoint_id=str(tmp_path / "run" / "step-3"))
    base = {name: one for name, one in _weights(state) if "lora" not in name}
    assert base
    assert all(torch.equal(found["app"]["model"][name], one) for name, one in base.items())


def _weights(state: TrainState) -> list[tuple[str, torch.Tensor]]:
    return list(state.state_dict()["model"].items())


def _accelerate(job: Job) -> None:
    model, _, step = _model()
    accelerator = Accelerator(cpu=True)
    training = [one for one in model.parameters() if one.requires_grad]
    accelerator.prepare(model, torch.optim.AdamW(training, 1e-2))
    places: dict[str, Any] = {"memory_root": job.memory, "job": "job", "agent": "thread"}
    with AcceleratorCheckpoints(accelerator, job.url, frozen=True, **places) as checkpoints:
        for number in range(1, 4):
            step(number)
            checkpoints.save(number)
            checkpoints.manager.wait(progress=False)
        status = {one.name: one.transfer.sent_nbytes for one in checkpoints.manager.status()}
    trained = 3 * sum(one.nbytes for one in training)
    assert all(
        nbytes <= 1.1 * trained + (1 << 20) for name, nbytes in status.items() if name != "step-1"
    )


def test_an_accelerator_that_is_told_so_saves_the_base_once(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "run"), str(memory_root))
    forked(_accelerate, job, timeout=120)
    inodes = [path.stat().st_ino for path in job.directory.glob("step-*/__0_1-*.distcp")]
    assert len(inodes) > len(set(inodes)) == 1
