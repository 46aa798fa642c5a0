"""Frozen tensors of every kind, on ranks that don't agree, with hooks and arguments that fail."""

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageWriter, TrainState
from tests.support.checkpoints.frozen import assert_holds, inodes_of, save
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

_LARGE = 1 << 19
"""Elements: so many frozen bytes are worth a segment."""
_QUICK = {"DCP_MEM_TIMEOUT": "30"}


# -- kinds of tensors ------------------------------------------------------------------------------


def _whole() -> torch.Tensor:
    return torch.arange(float(2 * _LARGE))


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(9.0)


_KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "a view with an offset": lambda: _whole()[_LARGE:],
    "a view of odd bytes": lambda: torch.arange(4 * _LARGE + 5).to(torch.uint8)[3:-1],
    "a column": lambda: _whole().view(1024, -1)[:, 3],
    "transposed": lambda: _whole().view(1024, -1).t(),
    "expanded": lambda: torch.arange(7.0).expand(3, 7),
    "empty": lambda: torch.empty(0),
    "empty of two dimensions": lambda: torch.empty(3, 0),
    "a number": lambda: torch.tensor(3.0),
    "a byte": lambda: torch.tensor([7], dtype=torch.uint8),
    "seven bytes": lambda: torch.arange(7, dtype=torch.uint8),
    "bool": lambda: torch.arange(9) % 2 == 0,
    "bfloat16": lambda: torch.arange(33.0).bfloat16(),
    "float8": lambda: torch.arange(5.0).to(torch.float8_e4m3fn),
    "complex": lambda: torch.arange(9.0).to(torch.complex64),
    "conjugated": lambda: torch.complex(torch.arange(9.0), torch.arange(9.0)).conj(),
    "an inference tensor": _inference_tensor,
    "a parameter": lambda: nn.Parameter(torch.arange(9.0)),
}


@contextmanager
def _writing(job: Job, **options: Any) -> Iterator[MemoryStorageWriter]:
    with job.writer(frozen="base.*", agent="thread", keep_memory=2, **options) as writer:
        yield writer


@pytest.mark.parametrize("kind", _KINDS)
def test_a_frozen_tensor_of_any_kind_loads_and_is_looked_at(memory_job: Job, kind: str) -> None:
    tensor = _KINDS[kind]()
    state = {"base.large": torch.arange(float(_LARGE)), "base.one": tensor, "x": torch.zeros(5)}
    with _writing(memory_job) as writer:
        for step in (1, 2, 3):
            save(writer, state, step)
            assert_holds(memory_job, state, step)
        assert inodes_of(memory_job, 2) == inodes_of(memory_job, 3)
        if not tensor.numel() or kind == "an inference tensor":
            return
        if kind == "expanded":
            tensor[0].data[3] = 99
        else:
            _flip_all(tensor)
        save(writer, state, 4)
        assert_holds(memory_job, state, 4)


def _flip_all(tensor: torch.Tensor) -> None:
    """Change all of a tensor past its counter of writes."""
    data = tensor.data.detach()
    data = data.resolve_conj()  # of a conjugated one: a copy
    if data.data_ptr() != tensor.data_ptr():
        tensor.data = data + 1
    elif tensor.dtype.is_complex or tensor.dtype is torch.bool or tensor.dtype.itemsize == 1:
        data.view(torch.uint8).bitwise_xor_(1)
    else:
        data.add_(1)


def test_tied_weights_are_frozen_under_both_names(memory_job: Job) -> None:
    tied = torch.arange(float(_LARGE))
    state = {"base.embedding": tied, "base.head": tied, "adapter": torch.zeros(5)}
    with _writing(memory_job) as writer:
        for step in (1, 2):
            save(writer, state, step)
        assert inodes_of(memory_job, 1) == inodes_of(memory_job, 2) != []
        tied.data.mul_(2)
        save(writer, state, 3)
        assert_holds(memory_job, state, 3)
        state["base.head"] = tied.clone()  # no longer tied
        save(writer, state, 4)
        state["base.head"].data.add_(1)
        save(writer, state, 5)
        assert_holds(memory_job, state, 5)


def test_a_storage_of_which_a_part_trains_is_never_stale(memory_job: Job) -> None:
    flat = torch.arange(float(4 * _LARGE))
    state = {"base.a": flat[: 2 * _LARGE], "trained": flat[2 * _LARGE :]}
    with _writing(memory_job) as writer:
        for step in range(1, 6):
            state["trained"].add_(1)  # which counts as a write to all of the storage's tensors
            if step == 4:
                state["base.a"].data.add_(1)
            save(writer, state, step)
            assert_holds(memory_job, state, step)


@pytest.mark.parametrize("by", ["set_data", "set_", "resize", "swap"])
def test_another_memory_in_a_frozen_tensor_is_in_the_next_checkpoint(
    memory_job: Job, by: str
) -> None:
    state = {"base.a": torch.arange(float(_LARGE)), "adapter": torch.zeros(5)}
    with _writing(memory_job) as writer:
        for step in range(1, 7):
            if step % 2 == 0:
                _exchange(state["base.a"], by)
            save(writer, state, step)
            assert_holds(memory_job, state, step)


def _exchange(tensor: torch.Tensor, by: str) -> None:
    other = tensor.detach() + 1
    if by == "set_data":
        tensor.data = other
    elif by == "set_":
        tensor.set_(other)  # type: ignore[call-overload]
    elif by == "swap":
        torch.utils.swap_tensors(tensor, other)
    else:  # as FSDP frees and fills its flat parameters
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
        tensor.data.copy_(other)


def test_a_thread_that_writes_while_saves_go_on_is_in_the_last_checkpoint(
    memory_job: Job,
) -> None:
    state = {f"base.{one}": torch.zeros(_LARGE) for one in "abc"}
    state["adapter"] = torch.zeros(5)
    is_over = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if is_over.wait(0.01):
                return
            state[f"base.{'abc'[number % 3]}"].data.add_(1)

    thread = threading.Thread(target=write)
    with _writing(memory_job) as writer:
        save(writer, state, 1)
        thread.start()
        try:
            for step in range(2, 12):
                save(writer, state, step)
        finally:
            is_over.set()
            thread.join()
        save(writer, state, 12)
        assert_holds(memory_job, state, 12)


def test_tensors_may_come_and_go_among_the_frozen_ones(memory_job: Job) -> None:
    state = {"base.a": torch.ones(_LARGE), "adapter.a": torch.zeros(5)}
    with _writing(memory_job) as writer:
        for step in range(1, 9):
            if step == 3:
                state["adapter.b"] = torch.ones(300)
            if step == 5:
                state["base.b"] = torch.ones(_LARGE) * 2
            if step == 7:
                del state["base.a"]
            save(writer, state, step)
            assert_holds(memory_job, state, step)
            if step in (2, 4, 6, 8):
                before, now = (inodes_of(memory_job, one) for one in (step - 1, step))
                assert before == now != []


def test_two_states_in_turn_are_never_mixed(memory_job: Job) -> None:
    states = [
        {"base.a": torch.full((_LARGE,), value), "adapter": torch.zeros(5)} for value in (1.0, 2.0)
    ]
    with _writing(memory_job) as writer:
        for step in range(1, 9):
            if step == 6:
                states[1]["base.a"].data.add_(1)
            save(writer, states[step % 2], step)
            assert_holds(memory_job, states[step % 2], step)


def test_all_tensors_may_be_frozen(memory_job: Job) -> None:
    state = {"a": torch.ones(_LARGE), "b": torch.ones(7)}
    with memory_job.writer(frozen="*", agent="thread", keep_memory=2) as writer:
        for step in range(1, 5):
            if step == 3:
                state["b"].data.add_(1)
            save(writer, {**state, "step": step}, step)
            assert_holds(memory_job, state, step)
        assert inodes_of(memory_job, 3) == inodes_of(memory_job, 4) != []


# -- ranks -----------------------------------------------------------------------------------------


def _dtensor(size: int, mesh: Any = None) -> torch.Tensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh or init_device_mesh("cpu", (world,))
    local = torch.arange(float(size)).chunk(world)[rank].clone()
    return DTensor.from_local(local, mesh, [Shard(0)])


def _freeze_on_one_rank(job: Job) -> list[list[int]]:
    state = {"base.a": _dtensor(4 * _LARGE), "adapter": torch.zeros(5)}
    freezing = 1

    def is_frozen(name: str, _: torch.Tensor) -> bool:
        return dist.get_rank() == freezing and name.startswith("base")

    inodes = []
    with job.writer(frozen=is_frozen, agent="thread", keep_memory=2) as writer:
        for step in range(1, 7):
            freezing = 1 if step < 4 else 0  # then the ranks change places
            if dist.get_rank() != freezing:
                state["base.a"].to_local().add_(1)  # type: ignore[attr-defined]
            save(writer, state, step)
            assert_holds(job, state, step, is_whole=False)
            inodes.append(inodes_of(job, step, dist.get_rank()))
            dist.barrier()
    return inodes


def test_a_rank_may_freeze_what_another_one_trains(memory_job: Job) -> None:
    first, second = forked_ranks(_freeze_on_one_rank, 2, memory_job)
    assert first[:3] == [[], [], []]
    assert first[3] == first[4] == first[5] != []
    assert second[0] == second[1] == second[2] != []
    assert second[3:] == [[], [], []]
    expected = torch.arange(4.0 * _LARGE) + 3  # each half has trained for three steps
    for load in (
        lambda out: dcp.load(out, checkpoint_id=str(memory_job.directory / "step-6")),
        lambda out: dcp_mem.load(out, storage_reader=memory_job.reader()),
    ):
        out = {"base.a": torch.zeros(4 * _LARGE)}
        load(out)
        assert torch.equal(out["base.a"], expected)


@on_ranks(2, env=_QUICK)
def test_saves_with_frozen_tensors_may_be_prepared_for(memory_job: Job) -> None:
    state = {"base.a": _dtensor(4 * _LARGE), "adapter": torch.zeros(5)}
    with memory_job.writer(frozen="base.*", agent="thread") as writer:
        writer.prepare(state)
        for step in (1, 2):
            save(writer, state, step)
            assert_holds(memory_job, state, step, is_whole=False)
        dist.barrier()


@pytest.mark.parametrize("road", ["dcp_mem", "dcp"])
@on_ranks(2, env=_QUICK)
def test_a_rule_that_raises_on_one_rank_fails_that_save_on_all(memory_job: Job, road: str) -> None:
    state = {"base.a": _dtensor(4 * _LARGE), "adapter": torch.zeros(5)}
    failing = False

    def is_frozen(name: str, _: torch.Tensor) -> bool:
        if failing and dist.get_rank() == 1:
            raise RuntimeError("the rule of rank 1")
        return name.startswith("base")

    call = dcp.save if road == "dcp" else dcp_mem.save
    errors = []
    with memory_job.writer(frozen=is_frozen, agent="thread") as writer:
        for step in range(1, 6):
            failing = step in (1, 3)
            error = raised_by(
                lambda: call(state, checkpoint_id=f"step-{step}", storage_writer=writer)  # noqa: B023
            )
            errors.append("" if error is None else str(error))
            if error is None:
                assert_holds(memory_job, state, step, is_whole=False)
            dist.barrier()
    assert [bool(one) for one in errors] == [True, False, True, False, False]
    assert all("the rule of rank 1" in one for one in errors if one)


@needs_fsdp_on_cpu
@on_ranks(2, timeout=100)
def test_layers_of_fsdp2_that_thaw_one_by_one_are_saved_as_they_are(memory_job: Job) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[:2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    app = TrainState(model, optimizer, rng=False)
    sizes = []
    with memory_job.writer(frozen=app.is_frozen, agent="thread", keep_memory=2) as writer:
        for step in range(1, 10):
            if step in (4, 7):
                model[step // 3 - 1 if step == 7 else 1].requires_grad_(True)
            model(torch.randn(4, 1024)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = app.state_dict()
            save(writer, {"app": state}, step)
            weights = {f"app.model.{name}": one for name, one in state["model"].items()}
            assert_holds(memory_job, weights, step, is_whole=False)
            directory = memory_job.directory / f"step-{step}"
            found = list(directory.glob(f"__{dist.get_rank()}_1-*.distcp"))
            sizes.append(round(found[0].stat().st_blocks * 512 / (1 << 20)) if found else 0)
            dist.barrier()
    assert sizes[0] == sizes[1] == sizes[2] >= 4
    assert sizes[3] == sizes[4] == sizes[5] < sizes[0]


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3, True, 2.5, [3], ["base.*", None], b"base", object()])
def test_a_skip_of_another_kind_is_refused(memory_job: Job, wrong: Any) -> None:
    state = {"base.a": torch.zeros(5)}
    with memory_job.writer(agent="thread") as writer:
        save(writer, state, 1)
    error = raised_by(lambda: dcp_mem.load(state, storage_reader=memory_job.reader(), skip=wrong))
    assert isinstance(error, ConfigError)
    assert "skip=" in str(error)
    assert "give names, patterns, or a function" in str(error)


def test_names_may_come_from_a_generator(memory_job: Job) -> None:
    state = {"base.a": torch.ones(_LARGE), "base.b": torch.ones(_LARGE), "x": torch.ones(5)}
    names = (name for name in state if name != "x")
    with memory_job.writer(frozen=names, agent="thread") as writer:
        for step in (1, 2):
            save(writer, state, step)
    assert inodes_of(memory_job, 1) == inodes_of(memory_job, 2) != []
    out = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    names = (name for name in state if name != "x")
    dcp_mem.load(out, storage_reader=memory_job.reader(), skip=names)
    assert [float(tensor.sum()) for tensor in out.values()] == [0, 0, 5]


def test_a_writer_with_a_rule_goes_to_another_process() -> None:
    writer = MemoryStorageWriter(None, job="job", frozen=lambda name, _: name == "a")
    assert pickle.loads(pickle.dumps(writer)).settings == writer.settings
