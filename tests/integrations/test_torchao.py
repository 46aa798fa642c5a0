"""torchao: quantised weights and optimizer state come back to the bit, or are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcp_mem
from dcp_mem import CheckpointManager, TrainState
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.plans import save_by
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # of torchao's own, and of what it imports
]

ROADS = ("save", "dcp.save", "async", "async by dcp")
WEIGHTS = (
    "Int8WeightOnlyConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
)
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def _quantised(config: str, number: int) -> dict[str, Any]:
    from torchao import quantization

    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    quantization.quantize_(model, getattr(quantization, config)())
    return model.state_dict()


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor's values lie in, by their names."""
    if isinstance(tensor, DTensor):
        return parts(tensor._local_tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor.detach()}
    names, _ = tensor.__tensor_flatten__()
    return {
        f"{name}.{inner}": plain
        for name in names
        for inner, plain in parts(getattr(tensor, name)).items()
    }


def assert_same(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    """Of the same class, and made of the same bits."""
    assert type(one) is type(other), name
    first, second = parts(one), parts(other)
    assert first.keys() == second.keys(), name
    for part, plain in first.items():
        assert plain.dtype == second[part].dtype, (name, part)
        raw, again = (
            tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (plain, second[part])
        )
        assert torch.equal(raw, again), (name, part)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("config", WEIGHTS)
@on_ranks(1, timeout=150)
def test_quantised_weights_come_back_to_the_bit(job: Job, config: str, road: str) -> None:
    with job.writer() as writer:
        for step in range(3):
            save_by(road, writer, {"model": _quantised(config, step)}, f"step-{step}")
        writer.wait("step-2")
    for reader in (job.reader(), Job(job.url, f"{job.memory}/elsewhere").reader()):
        for load in (dcp_mem.load, dcp.load):
            loaded = {"model": _quantised(config, 9)}
            load(loaded, checkpoint_id="step-2", storage_reader=reader)
            for name, tensor in _quantised(config, 2).items():
                assert_same(tensor, loaded["model"][name], name)


def _loads_into_others(job: Job) -> list[str]:
    int8, float8 = WEIGHTS[:2]
    with job.writer() as writer:
        state = {"weight": _quantised(int8, 1)["0.weight"], "plain": torch.ones(96, 64)}
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
    others: list[dict[str, torch.Tensor]] = [
        {"weight": _quantised(float8, 2)["0.weight"]},
        {"weight": torch.zeros(96, 64)},
        {"plain": _quantised(int8, 2)["0.weight"]},
    ]
    reader = job.reader()
    return [str(raised_by(partial(dcp_mem.load, state, storage_reader=reader))) for state in others]


def test_weights_of_another_kind_are_refused_by_name(memory_job: Job) -> None:
    (errors,) = forked_ranks(_loads_into_others, 1, memory_job)
    for error, name, kind in zip(
        errors,
        ["weight", "weight", "plain"],
        ["Float8Tensor", "torch.Tensor", "Int8Tensor"],
        strict=True,
    ):
        assert error.startswith(f"{name}: "), error
        assert f"can't be loaded into a {kind}" in error.replace("torchao.quantization.", "")
        assert "made as the saved one was" in error


# -- optimizers ------------------------------------------------------------------------------------


def _model(*, sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _train(job: Job, kind: str, *, sharded: bool, steps: int, is_async: bool) -> list[float]:
    """Train from where the last run came to; the loss of each step, by its bits."""
    import torchao.optim

    model = _model(sharded=sharded)
    optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=0.01)
    losses = []
    with CheckpointManager(
        job.url, memory_root=job.memory, job=job.name, async_save=is_async
    ) as manager:
        state = {"app": TrainState(model, optimizer)}
        done = manager.restore(state, weights_only=False) or 0
        for step in range(done + 1, done + steps + 1):
            torch.manual_seed(step)
            loss = (model(torch.randn(8, 64)) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.save(step, state)
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_with_a_quantised_optimizer_goes_on_where_it_was(
    memory_job: Job, kind: str, is_async: bool
) -> None:
    options: dict[str, Any] = {"sharded": False, "is_async": is_async}
    _goes_on(memory_job, 1, kind, options)


def _goes_on(job: Job, ranks: int, kind: str, options: dict[str, Any]) -> None:
    straight = Job(None, job.memory, name="straight")

    def run(of: Job, steps: int) -> list[list[float]]:
        return forked_ranks(_run, ranks, of, kind, options, steps, timeout=150)

    expected, first, second = run(straight, 6), run(job, 3), run(job, 3)
    assert [one + other for one, other in zip(first, second, strict=True)] == expected


def _run(job: Job, kind: str, options: dict[str, Any], steps: int) -> list[float]:
    torch.compiler.set_stance("force_eager")  # compiling the steps takes half a minute a process
    return _train(job, kind, steps=steps, **options)


@needs_fsdp_on_cpu
@pytest.mark.parametrize("kind", ["AdamW8bit", pytest.param("AdamWFp8", marks=pytest.mark.variant)])
def test_a_sharded_quantised_optimizer_goes_on_where_it_was(memory_job: Job, kind: str) -> None:
    _goes_on(memory_job, 2, kind, {"sharded": True, "is_async": False})


# -- a quantised base with adapters ----------------------------------------------------------------


class _Adapted(nn.Module):
    """A linear layer that doesn't train, and a small one beside it that does."""

    def __init__(self, config: str) -> None:
        from torchao import quantization

        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64))
        quantization.quantize_(self.base, getattr(quantization, config)())
        self.base.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(data) + self.adapter(data)
        return found


def _adapt(job: Job, config: str, steps: int) -> list[float]:
    model, losses = _Adapted(config), []
    if steps == 3:  # what comes after must come from the checkpoint
        for part in parts(model.state_dict()["base.0.weight"]).values():
            part.zero_()
    optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=0.01)
    state = TrainState(model, optimizer)
    with CheckpointManager(
        job.url, memory_root=job.memory, job=job.name, frozen=state.is_frozen
    ) as manager:
        done = manager.restore({"app": state}) or 0
        assert (done > 0) == (steps == 3)
        for step in range(done + 1, done + steps + 1):
            torch.manual_seed(step)
            loss = (model(torch.randn(8, 64)) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            manager.save(step, {"app": state})
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "config", [WEIGHTS[0], pytest.param(WEIGHTS[1], marks=pytest.mark.variant)]
)
def test_adapters_on_a_quantised_base_go_on_where_they_were(memory_job: Job, config: str) -> None:
    straight = Job(None, memory_job.memory, name="straight")
    (expected,) = forked_ranks(_adapt, 1, straight, config, 7, timeout=150)
    (first,) = forked_ranks(_adapt, 1, memory_job, config, 4, timeout=150)
    (second,) = forked_ranks(_adapt, 1, memory_job, config, 3, timeout=150)
    assert first + second == expected
