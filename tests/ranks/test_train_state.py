"""`dcp_mem.TrainState`: a resumed training goes on unchanged, on as many ranks or on others."""

import copy
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dcp_mem
from dcp_mem import ConfigError, NoRecoverableCheckpoint, TrainState
from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.forks import forked, forked_ranks, on_ranks, raised_by

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class Loader:
    """Batches in random order, different on each rank; its state says where to go on."""

    def __init__(self, seed: int, steps: int = 100) -> None:
        self._generator = random.Random(seed)
        self._steps = steps
        self._read: dict[int, str] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while len(self._read) < self._steps:
            number = self._generator.randrange(10**6)
            self._read[len(self._read)] = f"batch {number}"
            yield torch.full((4, 8), number / 10**6)

    @property
    def steps_read(self) -> int:
        return len(self._read)

    def state_dict(self) -> dict[str, Any]:
        """Return a state that DCP can't load piecewise: number keys, and keys new loaders lack."""
        return {"generator": self._generator.getstate(), "read": dict(self._read)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.setstate(state_dict["generator"])
        self._read = state_dict["read"]


class Training:
    """A training with dropout, noise from all generators, schedules and two optimizers."""

    def __init__(self, shard: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        torch.manual_seed(7)
        self.model = shard(nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.3), nn.Linear(12, 8)))
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.loader = Loader(rank)
        self.app = TrainState(
            self.model, self.optimizer, self.scheduler, self.loader, extra={"step": 0}
        )

    def take(self, steps: int) -> list[str]:
        """The losses of so many steps, to the bit, and the learning rates."""
        return [self._step(batch) for _, batch in zip(range(steps), self.loader, strict=False)]

    def _step(self, batch: torch.Tensor) -> str:
        noise = random.random() + np.random.rand() + torch.rand(())
        loss = (self.model(batch + noise) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.app.extra["step"] += 1
        return f"{loss.item().hex()} {self.scheduler.get_last_lr()}"

    def save(self, job: Job) -> None:
        with job.writer(agent="thread") as writer:
            name = f"step-{self.app.extra['step']}"
            dcp_mem.save({"app": self.app}, checkpoint_id=name, storage_writer=writer)

    def load(self, job: Job) -> None:
        state = {"app": self.app}
        with job.reader() as reader:
            dcp_mem.load(state, storage_reader=reader)
        assert state == {"app": self.app}


# -- one process -----------------------------------------------------------------------------------


def _go_on(job: Job) -> tuple[list[str], int, int]:
    training = Training()
    training.load(job)
    return training.take(3), training.app.extra["step"], training.loader.steps_read


def test_a_resumed_training_goes_on_to_the_bit_in_a_fresh_process(memory_job: Job) -> None:
    training = Training()
    training.take(3)
    training.save(memory_job)
    rest = training.take(3)
    assert forked(_go_on, memory_job) == (rest, 6, 6)


def test_a_load_takes_a_training_back_that_went_on(memory_job: Job) -> None:
    training = Training()
    training.take(3)
    training.save(memory_job)
    rest = training.take(3)
    training.load(memory_job)
    assert training.take(3) == rest


def test_a_training_saved_before_its_first_step_starts_as_a_fresh_one(memory_job: Job) -> None:
    training = Training()
    training.save(memory_job)
    losses = training.take(3)
    assert Training().take(3) == losses
    resumed = Training()
    resumed.load(memory_job)
    assert not resumed.optimizer.state
    assert resumed.take(3) == losses


def test_the_roads_of_torch_restore_the_same(tmp_path: Path) -> None:
    training = Training()
    training.take(3)
    dcp.save({"app": training.app}, checkpoint_id=tmp_path / "step-3")
    rest = training.take(3)
    for load in (dcp.load, dcp_mem.load):
        resumed = Training()
        load({"app": resumed.app}, storage_reader=dcp.FileSystemReader(tmp_path / "step-3"))
        assert resumed.take(3) == rest


def test_a_generator_draws_on_where_it_was(memory_job: Job) -> None:
    training = Training()
    random.gauss(0, 1)
    np.random.randn()  # of both there is half a pair of numbers left
    training.save(memory_job)
    drawn = random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()
    training.load(memory_job)
    assert drawn == (random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist())


class _Devices:
    """As many CUDA devices, going by torch's functions for their generators."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(count)]
        patch.setattr(torch.cuda, "is_available", lambda: count > 0)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        patch.setattr(torch.cuda, "set_rng_state", self._set)

    def _set(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (2, 1), (1, 2), (2, 0), (0, 2)])
def test_the_generators_of_devices_that_were_and_are_there_are_restored(
    memory_job: Job, monkeypatch: pytest.MonkeyPatch, saved: int, loaded: int
) -> None:
    devices = _Devices(monkeypatch, saved)
    for state in devices.states:
        state.add_(100)
    app = TrainState(nn.Linear(2, 2))
    with memory_job.writer(agent="thread") as writer:
        dcp.save({"app": app}, checkpoint_id="step-1", storage_writer=writer)
    others = _Devices(monkeypatch, loaded)
    dcp_mem.load({"app": app}, storage_reader=memory_job.reader())
    common = min(saved, loaded)
    assert [int(state[0]) for state in others.states] == [
        *range(100, 100 + common),
        *range(common, loaded),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA")
def test_a_training_on_a_device_goes_on_to_the_bit(memory_job: Job) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(torch.rand(4, 8, device="cuda")) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = parts()
    train(model, optimizer)
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(model, optimizer)}, checkpoint_id="step-3", storage_writer=writer
        )
    rest = train(model, optimizer)
    model, optimizer = parts()
    dcp_mem.load({"app": TrainState(model, optimizer)}, storage_reader=memory_job.reader())
    assert train(model, optimizer) == rest


def test_without_rng_no_generator_is_touched(memory_job: Job) -> None:
    model = nn.Linear(3, 3)
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(model, rng=False)}, checkpoint_id="step-1", storage_writer=writer
        )
    drawn = torch.rand(3)
    dcp_mem.load({"app": TrainState(model, rng=False)}, storage_reader=memory_job.reader())
    assert not torch.equal(torch.rand(3), drawn)


# -- a load that finds nothing ---------------------------------------------------------------------


class _Touching(torch.optim.Optimizer):
    """Moves parameters whatever their gradients and the rate are, and counts in its groups."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["sum"] = parameter + 1
                parameter.mul_(0.5)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1),
    "Adam with eps=0": lambda parameters: torch.optim.Adam(parameters, eps=0.0, weight_decay=0.1),
    "Adam with a tensor as rate": lambda parameters: torch.optim.Adam(
        parameters, torch.tensor(0.01), foreach=False
    ),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, weight_decay=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, 0.1, momentum=0.9, dampening=0.5
    ),
    "touching": _Touching,
}


def _odd_model() -> nn.Module:
    """With zeros of both signs, infinities and a NaN, which arithmetic doesn't leave alone."""
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([0.0, -0.0, torch.inf, torch.nan]).expand(3, 4))
    return model


def _bits(model: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("with_gradients", [False, True], ids=["no gradients", "gradients"])
def test_a_load_that_finds_nothing_leaves_all_as_it_was(
    memory_job: Job, name: str, with_gradients: bool
) -> None:
    model = _odd_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    gradients = [
        torch.ones_like(parameter) if with_gradients else None for parameter in model.parameters()
    ]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = (
        _bits(model),
        copy.deepcopy(optimizer.state_dict()),
        dict(vars(scheduler)),
        set(vars(optimizer)),
    )
    with pytest.raises(dcp.CheckpointException) as failure:
        dcp_mem.load(
            {"app": TrainState(model, optimizer, scheduler)}, storage_reader=memory_job.reader()
        )
    assert isinstance(failure.value.failures[0][0], NoRecoverableCheckpoint)
    assert (
        _bits(model),
        optimizer.state_dict(),
        dict(vars(scheduler)),
        set(vars(optimizer)),
    ) == before
    assert not optimizer.state
    assert all(
        parameter.grad is gradient
        for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )
    with pytest.warns(UserWarning, match="before"):  # as if no step had ever been taken
        scheduler.step()


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"Adam with eps=0", "touching"}))
@pytest.mark.parametrize("with_gradients", [False, True], ids=["no gradients", "gradients"])
def test_any_optimizer_resumes_to_the_bit_also_between_backward_and_step(
    memory_job: Job, name: str, with_gradients: bool
) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[bytes]:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) ** 2).sum().backward()
            optimizer.step()
        return _bits(model)

    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(model, optimizer)}, checkpoint_id="step-2", storage_writer=writer
        )
    expected = train(model, optimizer, 2)
    resumed = nn.Linear(4, 3)
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    if with_gradients:
        resumed(torch.ones(2, 4)).sum().backward()
    dcp_mem.load(
        {"app": TrainState(resumed, resumed_optimizer)}, storage_reader=memory_job.reader()
    )
    assert all((parameter.grad is not None) == with_gradients for parameter in resumed.parameters())
    assert train(resumed, resumed_optimizer, 2) == expected


def test_one_of_two_optimizers_that_hasnt_started_is_fresh_after_the_load(memory_job: Job) -> None:
    def parts() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        return model, [torch.optim.AdamW(layer.parameters()) for layer in model]

    model, (started, waiting) = parts()
    model(torch.ones(2, 4)).sum().backward()
    started.step()
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(model, [started, waiting])},
            checkpoint_id="step-1",
            storage_writer=writer,
        )
    resumed, (first, second) = parts()
    dcp_mem.load({"app": TrainState(resumed, [first, second])}, storage_reader=memory_job.reader())
    assert _bits(resumed) == _bits(model)
    assert not second.state
    for one, other in zip(model[0].parameters(), resumed[0].parameters(), strict=True):  # type: ignore[index]
        for key, value in started.state[one].items():
            assert torch.equal(first.state[other][key], value)


# -- more of one's own -----------------------------------------------------------------------------


@pytest.mark.parametrize("torch_plans", ["0", "1"])
def test_extra_values_come_back_whole_and_stateful_ones_restore_themselves(
    memory_job: Job, torch_plans: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_TORCH_PLANS", torch_plans)
    average, held = nn.Linear(2, 2), torch.arange(3.0)
    plain = {"epoch": 3, "seen": {1: "one", 2: ["two"]}, "best": None, "list": [held + 1]}
    with memory_job.writer(agent="thread") as writer:
        app = TrainState(nn.Linear(2, 2), extra={**plain, "average": average, "held": held})
        dcp_mem.save({"app": app}, checkpoint_id="step-1", storage_writer=writer)
    other, place = nn.Linear(2, 2), torch.zeros(3)
    blank = {"epoch": 0, "seen": {}, "best": "?", "list": [torch.zeros(3)]}
    app = TrainState(nn.Linear(2, 2), extra={**blank, "average": other, "held": place})
    dcp_mem.load({"app": app}, storage_reader=memory_job.reader())
    assert torch.equal(app.extra["list"].pop(), held + 1)
    assert app.extra == {**plain, "list": [], "average": other, "held": place}
    assert _bits(other) == _bits(average)
    assert torch.equal(place, held)


def test_what_is_missing_and_isnt_a_ranks_own_is_an_error(memory_job: Job) -> None:
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(nn.Linear(2, 2))}, checkpoint_id="step-1", storage_writer=writer
        )
    with pytest.raises(
        dcp.CheckpointException,
        match=r"EntriesMissing: Missing key in checkpoint state_dict: app\.values\.epoch",
    ):
        dcp_mem.load(
            {"app": TrainState(nn.Linear(2, 2), extra={"epoch": 0})},
            storage_reader=memory_job.reader(),
        )


def test_a_rank_without_anything_of_its_own_in_the_checkpoint_keeps_what_it_has(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    with memory_job.writer(agent="thread") as writer:
        dcp_mem.save(
            {"app": TrainState(model, rng=False)}, checkpoint_id="step-1", storage_writer=writer
        )
    loader = Loader(0)
    next(iter(loader))
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "dcp_mem"):
        dcp_mem.load(
            {"app": TrainState(model, dataloader=loader)}, storage_reader=memory_job.reader()
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert loader.steps_read == 1
    assert [text for text in caplog.messages if "rank" in text] == [
        "the checkpoint has no dataloader and random numbers of rank 0, which keeps its own"
    ]


def test_an_optimizer_of_parameters_that_the_model_lacks_is_refused() -> None:
    model, head = nn.Linear(3, 3), nn.Linear(3, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    state = TrainState(model, optimizer)
    with pytest.raises(ConfigError, match=r"lacks, of shape \(2, 3\), \(2,\): make it after"):
        state.state_dict()


# -- ranks -----------------------------------------------------------------------------------------


def _fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
    )
    fully_shard(model, mesh=mesh)
    return model


def _tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


SHARDINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "ddp": DistributedDataParallel,
}


def _train_save_and_train(job: Job, sharding: str) -> list[str]:
    training = Training(SHARDINGS[sharding])
    training.take(3)
    training.save(job)
    return training.take(3)


def _resume(job: Job, sharding: str) -> list[str]:
    training = Training(SHARDINGS[sharding])
    training.load(job)
    return training.take(3)


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(name, marks=[needs_fsdp_on_cpu] if name in ("fsdp", "hsdp") else [])
        for name in SHARDINGS
    ],
)
def test_ranks_resume_to_the_bit(memory_job: Job, sharding: str) -> None:
    rest = forked_ranks(_train_save_and_train, 2, memory_job, sharding)
    assert forked_ranks(_resume, 2, memory_job, sharding) == rest
    assert sharding == "tp" or rest[0] != rest[1]


def _load_by_torch(job: Job) -> str:
    try:
        dcp.load({"app": Training(_fsdp).app}, storage_reader=job.reader())
    except dcp.CheckpointException as error:
        return str(error.failures[2][0])
    return ""


def _resume_elsewhere(job: Job, by: str) -> tuple[list[str], dict[str, Any], list[bool], int]:
    """Resume on other ranks.

    Returns the log lines, the whole model, which generators were restored, and how much the
    dataloader has read.
    """
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    training = Training(_fsdp) if dist.is_initialized() else Training()
    fresh = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    logging.getLogger("dcp_mem").addHandler(handler)
    logging.getLogger("dcp_mem").setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        if by == "torch's planner":
            patch.setattr(
                "dcp_mem.planning.load_planner.LocalLoadPlanner.plan", lambda *_, **__: None
            )
        else:  # nor can torch's
            patch.delattr("dcp_mem.planning.load_planner.LocalLoadPlanner.create_local_plan")
            patch.delattr("dcp_mem.planning.load_planner.DefaultLoadPlanner.create_local_plan")
        training.load(job)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    restored = [fresh[0] != now[0], fresh[1] != now[1], not torch.equal(fresh[2], now[2])]
    read = training.loader.steps_read
    whole = {
        name: getattr(value, "full_tensor", value.clone)().tolist()
        for name, value in training.model.state_dict().items()
    }
    training.take(1)
    return [line for line in lines if "rank" in line], whole, restored, read


@needs_fsdp_on_cpu
@pytest.mark.parametrize("by", ["catalog", "torch's planner"])
def test_other_numbers_of_ranks_resume_with_what_there_is_for_them(
    memory_job: Job, by: str
) -> None:
    forked_ranks(_train_save_and_train, 2, memory_job, "fsdp")
    alone = forked(_resume_elsewhere, memory_job, by)
    three = forked_ranks(_resume_elsewhere, 3, memory_job, by)
    assert alone[0] == ["dataloaders aren't restored: 2 ranks had saved theirs, and 1 load"]
    assert [lines for lines, *_ in three] == [
        ["dataloaders aren't restored: 2 ranks had saved theirs, and 3 load"],
        [],
        ["the checkpoint has no random numbers of rank 2, which keeps its own"],
    ]
    assert [restored for *_, restored, _ in (alone, *three)] == [
        [True] * 3,
        [True] * 3,
        [True] * 3,
        [False] * 3,
    ]
    assert [read for *_, read in (alone, *three)] == [0, 0, 0, 0]
    assert [model for _, model, *_ in three] == [alone[1]] * 3


@on_ranks(2)
def test_an_optimizer_whose_sharded_state_cannot_be_restored_is_refused_when_it_is_saved(
    memory_job: Job,
) -> None:
    model = nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = {"app": TrainState(model, torch.optim.LBFGS(model.parameters()))}
    with memory_job.writer() as writer:
        save = partial(dcp_mem.save, state, checkpoint_id="a", storage_writer=writer)
        said = str(raised_by(save))
    assert "LBFGS: its state of sharded parameters can't be restored" in said


def _run_example(root: str) -> tuple[int, bool]:
    """Runs the documentation's script; returns its step, and whether it has taken any itself."""
    text = REPOSITORY.joinpath("docs", "training-state.md").read_text()
    script = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(script.replace('"/tmp/training-state"', repr(root)), names)
    return names["app"].extra["step"], "loss" in names


@needs_fsdp_on_cpu
def test_the_documented_script_trains_and_then_has_nothing_left_to_do(
    memory_root: Path, tmp_path: Path
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**alone, "DCP_MEM_ROOT": str(memory_root)}
    assert forked(_run_example, str(tmp_path / "run"), env=environment) == (30, True)
    assert forked(_run_example, str(tmp_path / "run"), env=environment) == (30, False)


@needs_fsdp_on_cpu
def test_under_plain_dcp_load_a_rank_more_is_torchs_error(memory_job: Job) -> None:
    forked_ranks(_train_save_and_train, 2, memory_job, "fsdp")
    assert (
        "Missing key in checkpoint state_dict: app."
        in forked_ranks(_load_by_torch, 3, memory_job)[0]
    )
