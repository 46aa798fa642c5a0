"""What was saved is what comes back: of any shape, or a line or an error that names it."""

import datetime as dt
import enum
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import TrainState
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked_ranks

Optimizers = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def _save(job: Job, **state: Any) -> None:
    with job.writer(agent="thread") as writer:
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)


def _load(job: Job, **state: Any) -> dict[str, Any]:
    dcp_mem.load(state, storage_reader=job.reader())
    return state


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(2, 3)) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


class Holder:
    """A stateful object with whatever state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


# -- values of any shape ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"history": {3: "x"}, 5: [1]}, {}),
        ({}, {"a": {"b": 1}}),
        ({"mean": torch.arange(3.0), "n": [torch.ones(2), 7]}, {}),
        ({"n": []}, {"mean": torch.zeros(3), "n": [torch.ones(2), 7]}),
        ({"mean": torch.arange(4.0)}, {"mean": torch.zeros(3)}),
        ({"mean": torch.arange(3, dtype=torch.float64)}, {"mean": torch.zeros(3)}),
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}}, {}),
        ({0: torch.ones(2)}, {0: torch.zeros(2)}),
        ({"deque": deque([1, 2], maxlen=2)}, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("as_object", [True, False], ids=["object", "value"])
def test_a_value_comes_back_whatever_its_shape(
    memory_job: Job, saved: Any, fresh: Any, as_object: bool
) -> None:
    make: Any = Holder if as_object else (lambda value: value)
    _save(memory_job, app=TrainState(nn.Linear(2, 2), extra={"x": make(saved)}))
    app = TrainState(nn.Linear(2, 2), extra={"x": make(fresh)})
    _load(memory_job, app=app)
    found = app.extra["x"].state if as_object else app.extra["x"]
    assert repr(found) == repr(saved)


@pytest.mark.parametrize(("saved", "fresh"), [(torch.ones(2), None), (None, torch.ones(2))])
def test_a_value_may_become_a_tensor_and_the_reverse(
    memory_job: Job, saved: Any, fresh: Any
) -> None:
    _save(memory_job, app=TrainState(nn.Linear(2, 2), extra={"x": saved}))
    app = TrainState(nn.Linear(2, 2), extra={"x": fresh})
    _load(memory_job, app=app)
    assert repr(app.extra["x"]) == repr(saved)


def test_torchs_own_load_refuses_what_only_dcp_mem_can_restore(memory_job: Job) -> None:
    _save(memory_job, app=TrainState(nn.Linear(2, 2), extra={"x": Holder({"a": torch.ones(2)})}))
    app = TrainState(nn.Linear(2, 2), extra={"x": Holder({})})
    with pytest.raises(dcp_mem.DcpMemError, match=r"extra\['x'\]: its tensor a .* dcp_mem\.load"):
        dcp.load({"app": app}, storage_reader=memory_job.reader())


def _save_a_sharded_average(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.full((2,), dist.get_rank()), mesh, [Shard(0)])
    _save(job, app=TrainState(nn.Linear(2, 2), extra={"x": Holder({"average": sharded})}))


def _load_a_sharded_average(job: Job, is_there: bool) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    fresh = DTensor.from_local(torch.full((2,), -1), mesh, [Shard(0)])
    app = TrainState(nn.Linear(2, 2), extra={"x": Holder({"average": fresh} if is_there else {})})
    try:
        _load(job, app=app)
    except dcp_mem.DcpMemError as error:
        return str(error)
    return app.extra["x"].state["average"].to_local().tolist()


def test_a_sharded_tensor_is_restored_in_its_shards_or_refused(memory_job: Job) -> None:
    forked_ranks(_save_a_sharded_average, 2, memory_job)
    assert forked_ranks(_load_a_sharded_average, 2, memory_job, True) == [[0, 0], [1, 1]]
    for told in forked_ranks(_load_a_sharded_average, 2, memory_job, False):
        assert "average was sharded" in told
        assert "make it before the load" in told


def test_numbers_as_keys_of_nested_dicts_are_restored_under_themselves(memory_job: Job) -> None:
    _save(memory_job, state={0: {"step": 5, "x": torch.ones(2)}})
    found = _load(memory_job, state={0: {"step": 0, "x": torch.zeros(2)}})
    assert repr(found) == repr({"state": {0: {"step": 5, "x": torch.ones(2)}}})


# -- what nothing asks for -------------------------------------------------------------------------


def test_a_fresh_optimizer_of_its_own_is_told_to_have_no_state(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    _step(model, optimizer)
    _save(memory_job, model=model, optim_left=optimizer)
    fresh = nn.Linear(3, 2)
    reader = memory_job.reader()
    state = {"model": fresh, "optim_left": torch.optim.Adam(fresh.parameters())}
    dcp_mem.load(state, storage_reader=reader)
    assert len(reader.report().left_out) == 6
    [line] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "more of optim_left than is restored: optim_left.state.0." in line
    assert "TrainState(model, optimizer)" in line


def test_a_checkpoint_of_torchs_is_compared_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"torchs": Holder({"a": torch.ones(2), "b": torch.ones(2)})}, checkpoint_id=tmp_path)
    state = {"torchs": Holder({"a": torch.zeros(2)})}
    dcp_mem.load(state, storage_reader=dcp.FileSystemReader(tmp_path))
    [line] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "more of torchs than is restored: torchs.b" in line


def _load_a_stage(job: Job) -> tuple[str, ...]:
    reader = job.reader()
    stage = {f"layer-{dist.get_rank()}": torch.zeros(2)}
    dcp_mem.load({"model": stage}, storage_reader=reader)
    return reader.report().left_out


def test_what_another_rank_loads_isnt_left_out(memory_job: Job) -> None:
    _save(memory_job, model={f"layer-{number}": torch.ones(2) for number in range(3)}, other=1)
    assert forked_ranks(_load_a_stage, 2, memory_job) == [("model.layer-2",)] * 2


# -- optimizers ------------------------------------------------------------------------------------


def _trained(
    make: Optimizers, steps: int = 3, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    _step(model, optimizer, steps)
    return model, optimizer


def _resumes_to_the_bit(
    job: Job, make: Optimizers, fresh: Optimizers | None = None
) -> torch.optim.Optimizer:
    """Assert that a training goes on as if nothing had been; return the restored optimizer."""
    model, optimizer = _trained(make)
    _save(job, app=TrainState(model, optimizer, rng=False))
    other, resumed = _trained(fresh or make, 0, seed=1)
    _load(job, app=TrainState(other, resumed, rng=False))
    _step(model, optimizer, 2)
    _step(other, resumed, 2)
    assert repr(dict(other.named_parameters())) == repr(dict(model.named_parameters()))
    return resumed


class SparseStep(torch.optim.SparseAdam):
    """SparseAdam on dense parameters: its gradients are made sparse before each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if closure is not None or not parameter.grad.abs().sum():
                    continue
                parameter.grad = parameter.grad.to_sparse()
        return super().step(closure)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "make",
    [torch.optim.LBFGS, lambda parameters: SparseStep(list(parameters))],
    ids=["LBFGS", "SparseAdam"],
)
def test_an_optimizer_for_which_no_state_can_be_made_is_restored(
    memory_job: Job, make: Optimizers
) -> None:
    _resumes_to_the_bit(memory_job, make)


def test_a_used_lbfgs_is_taken_back_to_its_shorter_history(memory_job: Job) -> None:
    model, optimizer = _trained(torch.optim.LBFGS, 1)
    app = TrainState(model, optimizer, rng=False)
    _save(memory_job, app=app)
    [before] = optimizer.state_dict()["state"].values()
    known = {key: repr(value) for key, value in before.items()}
    _step(model, optimizer, 2)
    _load(memory_job, app=app)
    [after] = optimizer.state_dict()["state"].values()
    assert {key: repr(value) for key, value in after.items()} == known


def test_torchs_own_load_refuses_state_that_has_no_room(memory_job: Job) -> None:
    model, optimizer = _trained(torch.optim.LBFGS)
    _save(memory_job, app=TrainState(model, optimizer))
    other, fresh = _trained(torch.optim.LBFGS, 0)
    with pytest.raises(dcp_mem.DcpMemError, match=r"state of weight .* load with dcp_mem\.load"):
        dcp.load({"app": TrainState(other, fresh)}, storage_reader=memory_job.reader())


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(initial_lr=0.5),
        lambda group: group.update(note="mine", path=Path("/a"), rate=np.float64(0.25)),
        lambda group: group.update(lr=torch.tensor(0.25), foreach=False),
        lambda group: group.update(amsgrad=True),
    ],
    ids=["initial_lr", "others", "tensor rate", "amsgrad"],
)
def test_options_of_a_group_that_a_fresh_one_lacks_are_restored(
    memory_job: Job, change: Callable[[dict[str, Any]], None]
) -> None:
    def made(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=0.25)
        change(optimizer.param_groups[0])
        return optimizer

    resumed = _resumes_to_the_bit(
        memory_job, made, lambda parameters: torch.optim.Adam(parameters, lr=0.125)
    )
    _, optimizer = _trained(made)
    expected = {**optimizer.param_groups[0], "lr": 0.25, "params": 0}
    assert {**resumed.param_groups[0], "params": 0} == expected
    assert type(resumed.param_groups[0]["lr"]) is float


def test_a_number_is_restored_into_a_rate_that_is_a_tensor(memory_job: Job) -> None:
    def with_tensor(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=torch.tensor(0.5), foreach=False)

    resumed = _resumes_to_the_bit(
        memory_job, lambda parameters: torch.optim.Adam(parameters, lr=0.25), with_tensor
    )
    assert repr(resumed.param_groups[0]["lr"]) == "tensor(0.2500)"


def test_an_option_that_the_checkpoint_lacks_keeps_its_value_with_one_line(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    def newer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(parameters, lr=0.125)
        optimizer.param_groups[0]["of_a_newer_torch"] = 7
        return optimizer

    resumed = _resumes_to_the_bit(
        memory_job, lambda parameters: torch.optim.Adam(parameters, lr=0.25), newer
    )
    assert resumed.param_groups[0]["of_a_newer_torch"] == 7
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "that the checkpoint lacks keep their values: of_a_newer_torch=7" in line


class Experts(nn.Module):
    """Two layers of which one may be idle."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.busy, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        busy: torch.Tensor = self.busy(batch)
        return busy


def test_a_parameter_that_never_had_a_gradient_has_no_state_after_the_load(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    model = Experts(0)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, 2)
    _save(memory_job, app=TrainState(model, optimizer))
    other = Experts(1)
    resumed = torch.optim.AdamW(other.parameters())
    _load(memory_job, app=TrainState(other, resumed))
    assert repr(resumed.state_dict()) == repr(optimizer.state_dict())
    assert list(resumed.state) == list(other.busy.parameters())
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("then", [False, True], ids=["freezes", "thaws"])
def test_a_parameters_state_follows_its_name_not_its_flag(memory_job: Job, then: bool) -> None:
    model, optimizer = _trained(torch.optim.AdamW)
    model.bias.requires_grad_(not then)
    _save(memory_job, app=TrainState(model, optimizer))
    other, resumed = _trained(torch.optim.AdamW, 0, seed=1)
    other.bias.requires_grad_(then)
    _load(memory_job, app=TrainState(other, resumed))
    assert repr(resumed.state_dict()) == repr(optimizer.state_dict())


def test_a_parameter_that_is_new_to_the_optimizer_is_named(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    model = Experts(0)
    optimizer = torch.optim.AdamW(model.busy.parameters())
    _step(model, optimizer)
    _save(memory_job, app=TrainState(model, optimizer))
    other = Experts(1)
    resumed = torch.optim.AdamW(other.parameters())
    _load(memory_job, app=TrainState(other, resumed))
    assert list(resumed.state) == list(other.busy.parameters())
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "begin without state: idle.weight, idle.bias" in line


def test_a_load_without_the_optimizer_names_its_state(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    _save(memory_job, without=TrainState(*_trained(torch.optim.AdamW)))
    _load(memory_job, without=TrainState(nn.Linear(3, 2)))
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "more of without than is restored: without.optimizer.state.weight." in line


def test_groups_that_are_split_otherwise_take_each_parameters_options(memory_job: Job) -> None:
    model, optimizer = _trained(lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9))
    _save(memory_job, app=TrainState(model, optimizer))
    other = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [other.bias]}, {"params": [other.weight]}]
    resumed = torch.optim.SGD(groups, 0.1)
    _load(memory_job, app=TrainState(other, resumed))
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.5]
    assert torch.equal(
        resumed.state[other.weight]["momentum_buffer"],
        optimizer.state[model.weight]["momentum_buffer"],  # type: ignore[index]
    )


def test_state_that_no_optimizer_takes_is_named(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    model = Experts(0)
    optimizer = torch.optim.AdamW([*model.busy.parameters(), *model.idle.parameters()])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    _save(memory_job, both=TrainState(model, optimizer))
    other = Experts(1)
    resumed = torch.optim.AdamW(other.busy.parameters())
    _load(memory_job, both=TrainState(other, resumed))
    assert len(resumed.state) == 2
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "more of both than is restored: both.optimizer.state.idle." in line


def test_state_of_another_kind_of_optimizer_is_refused(memory_job: Job) -> None:
    trained = _trained(lambda parameters: torch.optim.SGD(parameters, 0.5, momentum=0.9))
    _save(memory_job, app=TrainState(*trained))
    app = TrainState(*_trained(torch.optim.AdamW, 0))
    with pytest.raises(dcp_mem.DcpMemError, match=r"another kind of optimizer: .*momentum_buffer"):
        _load(memory_job, app=app)


def test_a_rate_that_was_a_tensor_stays_what_it_was_in_a_whole_number(memory_job: Job) -> None:
    model, optimizer = _trained(lambda p: torch.optim.SGD(p, torch.tensor(0.5), foreach=False))
    _save(memory_job, app=TrainState(model, optimizer))
    other, resumed = _trained(lambda parameters: torch.optim.SGD(parameters, 1), 0)
    _load(memory_job, app=TrainState(other, resumed))
    assert resumed.param_groups[0]["lr"] == 0.5


def test_options_of_a_group_without_parameters_are_restored(memory_job: Job) -> None:
    def made(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        groups: list[dict[str, Any]] = [
            {"params": list(model.parameters())},
            {"params": [], "lr": rate},
        ]
        return model, torch.optim.SGD(groups, 0.1)

    _save(memory_job, app=TrainState(*made(0.33)))
    model, resumed = made(0.7)
    _load(memory_job, app=TrainState(model, resumed))
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.33]


class Nested(torch.optim.SGD):
    """SGD that keeps a history under numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                history = self.state[parameter].setdefault("history", {})
                if parameter.grad is not None and parameter.grad.abs().sum():
                    history[len(history)] = [parameter.grad.clone(), len(history)]
        return super().step(closure)


def test_state_in_dicts_and_lists_comes_back_in_its_shape(memory_job: Job) -> None:
    model, optimizer = _trained(Nested)
    _save(memory_job, app=TrainState(model, optimizer))
    other, resumed = _trained(Nested, 0)
    _load(memory_job, app=TrainState(other, resumed))
    assert repr(resumed.state_dict()["state"]) == repr(optimizer.state_dict()["state"])
    histories = [of["history"] for of in resumed.state.values()]
    assert [list(one) for one in histories] == [[0, 1, 2]] * 2


# -- ranks -----------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A rank's own part of a model: the names differ from rank to rank."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.add_module(f"layer-{number}", nn.Linear(3, 2))
        if number == 1:
            self.extra = nn.Linear(2, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            batch = layer(batch)
        return batch


def _stage(number: int) -> tuple[Stage, torch.optim.Optimizer]:
    model = Stage(number)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (number + 1))


def _save_stages(job: Job) -> str:
    model, optimizer = _stage(dist.get_rank())
    _step(model, optimizer)
    _save(job, app=TrainState(model, optimizer, dataloader=Holder({"read": dist.get_rank()})))
    return repr(optimizer.state_dict())


def _load_stages(job: Job, order: list[int]) -> tuple[str, Any, list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_mem").addHandler(handler)
    number = order[dist.get_rank()]
    model, optimizer = _stage(number)
    for group in optimizer.param_groups:
        group["lr"] = 7
    loader = Holder("own")
    _load(job, app=TrainState(model, optimizer, dataloader=loader))
    return repr(optimizer.state_dict()), loader.state, lines


def test_ranks_with_groups_of_their_own_get_their_own_back(memory_job: Job) -> None:
    saved = forked_ranks(_save_stages, 2, memory_job)
    found = forked_ranks(_load_stages, 2, memory_job, [0, 1])
    assert found == [(saved[0], {"read": 0}, []), (saved[1], {"read": 1}, [])]


def test_ranks_that_change_roles_keep_what_is_a_ranks_own_and_say_so(memory_job: Job) -> None:
    saved = forked_ranks(_save_stages, 2, memory_job)
    found = forked_ranks(_load_stages, 2, memory_job, [1, 0])
    assert [state for state, *_ in found] == saved[::-1]
    assert [loader for _, loader, _ in found] == ["own", "own"]
    for rank, (*_, lines) in enumerate(found):
        [line] = lines
        assert f"rank {rank} had another part of the model" in line
        assert "keeps its own dataloader and random numbers" in line


def _save_a_ranks_own(job: Job) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_mem").addHandler(handler)
    rank = dist.get_rank()
    _save(job, same={"step": 3, "names": ["a"]}, own={"groups": [{"lr": rank}], "rank": rank})
    return lines


def test_values_that_differ_from_rank_to_rank_are_named_at_the_first_save(memory_job: Job) -> None:
    told, others = forked_ranks(_save_a_ranks_own, 2, memory_job)
    [line] = told
    assert "own.groups.0.lr, own.rank differ from rank to rank" in line
    assert others == []


# -- models ----------------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """A layer that saves its scale beside the weight, and doesn't take it back."""

    def __init__(self, is_live: bool) -> None:
        super().__init__(3, 2)
        self.is_live, self.absmax = is_live, torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "absmax"] = self.absmax if self.is_live else self.absmax.clone()


@pytest.mark.parametrize("is_live", [True, False], ids=["its own", "a copy"])
def test_a_model_whose_state_has_keys_that_it_doesnt_take_is_resumed(
    memory_job: Job, caplog: pytest.LogCaptureFixture, is_live: bool
) -> None:
    layer, other = Quantised(is_live), Quantised(is_live)
    layer.absmax += 3
    _save(memory_job, app=TrainState(nn.Sequential(layer)))
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [
        ("0.absmax" in line, "after a load they are as the model was built" in line)
        for line in told
    ] == ([] if is_live else [(True, True)])
    caplog.clear()
    _load(memory_job, app=TrainState(nn.Sequential(other)))
    assert torch.equal(other.weight, layer.weight)
    assert other.absmax.tolist() == ([3, 3] if is_live else [0, 0])
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert bool(told) == (not is_live)


# -- kinds of values -------------------------------------------------------------------------------

HARMLESS = {
    "numpy number": np.float64(1.5),
    "numpy array": np.arange(3),
    "path": Path("/a/b"),
    "deque": [deque([1, {"inner": deque([2], maxlen=4)}])],
    "datetime": dt.datetime(2026, 11, 27, tzinfo=dt.timezone.utc),
    "range": range(2, 9, 3),
    "frozen set": frozenset({1}),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_kinds_come_back_under_the_readers_rules(memory_job: Job, kind: str) -> None:
    _save(
        memory_job,
        app=TrainState(nn.Linear(2, 2), extra={"x": HARMLESS[kind]}),
        other=(HARMLESS[kind],),
    )
    app = TrainState(nn.Linear(2, 2), extra={"x": None})
    found = _load(memory_job, app=app, other=None)
    assert repr(app.extra["x"]) == repr(HARMLESS[kind]) == repr(found["other"][0])


def test_counts_beside_a_deque_stay_as_they_are(memory_job: Job) -> None:
    value = {"counts": Counter(a=3), "deque": deque([1]), "twice": (shared := [deque([2])], shared)}
    _save(memory_job, value=(value,))
    (found,) = _load(memory_job, value=None)["value"]
    assert repr(found) == repr(value)
    assert found["twice"][0] is found["twice"][1]


class Hostile:
    """Unpickles as a call of something that the reader admits."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        Hostile(list, (range(10),)),
        Hostile(set, (range(1 << 40),)),
        Hostile(deque, (range(10),)),
        Hostile(bytes, (1 << 40,)),
        Hostile(frozenset, (range(10),)),
        np.array([1, "a"], dtype=object),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        int,
    ],
    ids=["list", "long range", "deque", "bytes", "frozenset", "objects", "fields", "class"],
)
def test_what_could_do_harm_is_refused(memory_job: Job, value: Any) -> None:
    _save(memory_job, value=(value,))
    with pytest.raises(dcp.CheckpointException, match="UntrustedObject"):
        _load(memory_job, value=None)


def test_values_that_hold_each_other_many_times_are_read_in_no_time(memory_job: Job) -> None:
    value: Any = (deque([1]), torch.ones(1))
    for _ in range(60):
        value = (value, value)
    _save(memory_job, app=TrainState(nn.Linear(2, 2), extra={"x": value}))
    app = TrainState(nn.Linear(2, 2), extra={"x": None})
    _load(memory_job, app=app)
    for _ in range(60):
        app.extra["x"] = app.extra["x"][1]
    assert repr(app.extra["x"]) == repr((deque([1]), torch.ones(1)))


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize("by", ["save", "async_save", "manager"])
def test_what_a_load_would_refuse_is_named_at_the_first_save(
    memory_job: Job, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    state = {"app": TrainState(nn.Linear(2, 2), extra={by: Colour.RED, "fine": Path("/a")})}
    with memory_job.writer(agent="thread") as writer:
        for step in (1, 2):
            name = f"step-{step}"
            if by == "save":
                dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            elif by == "async_save":
                dcp_mem.async_save(state, checkpoint_id=name, storage_writer=writer).result()
    if by == "manager":
        with dcp_mem.CheckpointManager(
            memory_job.url, memory_root=memory_job.memory, job=memory_job.name, agent="thread"
        ) as manager:
            manager.save(1, state)
            manager.save(2, state)
    for thread in threading.enumerate():
        if thread.name == "dcp_mem-first-save":
            thread.join()
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert f"app.values.{by} " in line
    assert "Colour" in line
    assert "weights_only=False" in line
    assert "fine" not in line
