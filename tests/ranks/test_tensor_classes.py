"""Tensors of other classes than torch's own: what is saved of them loads again, or is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    MemoryStorageWriter,
    RankFailed,
    UntrustedObject,
)
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.plans import begin_save
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

_ERRORS = (UntrustedObject.__name__, RankFailed.__name__)


class Marked(torch.Tensor):
    """A class that torch doesn't know, and so doesn't unpickle unless it is told to."""


class Closed(torch.Tensor):
    """Whole numbers times a scale, of which the class tells nobody.

    Like many such classes it makes plain values of itself for any operation that it doesn't know:
    copies and `detach` included.
    """

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=torch.float32, device=numbers.device
        )

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def values(self) -> torch.Tensor:
        return self.numbers.float() * self.scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [one.values() if isinstance(one, Closed) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Scaled(Closed):
    """As Closed, but tells what it is made of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Any:
        return cls(parts["numbers"], parts["scale"])


class Turning(Scaled):
    """A class that makes something else of its parts."""

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Any:
        return parts["numbers"].float() * parts["scale"]


class _Planner(DefaultLoadPlanner):
    """A planner of the caller's own."""


# -- weights_only ----------------------------------------------------------------------------------


def _marked(number: int) -> dict[str, Any]:
    return {"w": torch.arange(6.0), "marked": (torch.arange(8) + number).as_subclass(Marked)}


def _blank(kind: type[torch.Tensor]) -> dict[str, Any]:
    return {"w": torch.zeros(6), "marked": torch.zeros(8, dtype=torch.int64).as_subclass(kind)}


def _loads_of_marked(job: Job, kind: type[torch.Tensor], place: str) -> list[str]:
    """Load a class that torch doesn't know by every way, as it is allowed; return the errors."""
    with job.writer() as writer:
        dcp_mem.save(_marked(0), checkpoint_id="step-0", storage_writer=writer)
        writer.wait("step-0")
    source = job if place == "memory" else Job(job.url, f"{job.memory}/elsewhere")

    def load(**options: Any) -> None:
        state = _blank(kind)
        dcp_mem.load(state, checkpoint_id="step-0", storage_reader=source.reader(), **options)
        found = state["marked"]
        assert type(found) is kind
        assert torch.equal(found.as_subclass(torch.Tensor), torch.arange(8))
        assert torch.equal(state["w"], torch.arange(6.0))

    def load_by_dcp() -> None:
        dcp.load(_blank(kind), checkpoint_id="step-0", storage_reader=source.reader())

    refused = [load, lambda: load(planner=_Planner()), load_by_dcp]
    errors = [f"{type(error).__name__}: {error}" for error in map(raised_by, refused)]
    load(weights_only=False)
    load(weights_only=False, planner=DefaultLoadPlanner())
    load(weights_only=False, planner=_Planner())
    errors += [f"{type(error).__name__}: {error}" for error in map(raised_by, refused)]
    dist.barrier()
    torch.serialization.add_safe_globals([Marked])
    load()
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("place", ["memory", "storage"])
@pytest.mark.parametrize("kind", [Marked, torch.Tensor])
def test_a_tensor_of_an_unknown_class_is_refused_by_name_unless_asked_for(
    memory_root: Any, tmp_path: Any, kind: type[torch.Tensor], place: str, ranks: int
) -> None:
    job = Job(str(tmp_path / "root"), str(memory_root))
    every = forked_ranks(_loads_of_marked, ranks, job, kind, place, env={"DCP_MEM_TIMEOUT": "30"})
    for errors in every:
        assert len(errors) == 6
        for error in errors:
            assert error.startswith(_ERRORS), error
            assert "marked isn't loaded" in error
            assert "weights_only=False" in error
            assert "Marked" in error


def _restores_of_marked(job: Job) -> str:
    with CheckpointManager(job.url, memory_root=job.memory, job=job.name) as manager:
        manager.save(1, _marked(3))
        error = raised_by(lambda: manager.restore(_blank(Marked)))
        state = _blank(torch.Tensor)
        assert manager.restore(state, weights_only=False) == 1
        assert torch.equal(state["marked"], torch.arange(8) + 3)
    return f"{type(error).__name__}: {error}"


def test_the_manager_restores_an_unknown_class_where_it_is_told_to(memory_job: Job) -> None:
    (error,) = forked_ranks(_restores_of_marked, 1, memory_job)
    assert error.startswith(UntrustedObject.__name__)
    assert "marked isn't loaded" in error


def _follows_marked(job: Job) -> list[str]:
    def follow(state: Any = None, **options: Any) -> Any:
        places: dict[str, Any] = {"memory_root": job.memory, "job": job.name, "timeout": 30.0}
        return iter(dcp_mem.follow(job.url, state, **places, **options))

    with CheckpointManager(job.url, memory_root=job.memory, job=job.name) as manager:
        manager.save(1, _marked(3))
        held = follow()
        checkpoint = next(held)
        refused = [lambda: next(follow(_blank(Marked))), lambda: checkpoint.load(_blank(Marked))]
        errors = [type(raised_by(load)).__name__ for load in refused]
        by_follow, by_load = _blank(torch.Tensor), _blank(torch.Tensor)
        next(follow(by_follow, weights_only=False))
        held = follow()
        next(held).load(by_load, weights_only=False)
        for state in (by_follow, by_load):
            assert torch.equal(state["marked"], torch.arange(8) + 3)
    return errors


def test_a_follower_loads_an_unknown_class_where_it_is_told_to(memory_job: Job) -> None:
    (errors,) = forked_ranks(_follows_marked, 1, memory_job)
    assert errors == [UntrustedObject.__name__] * 2


# -- wrappers: classes whose values lie in other tensors -------------------------------------------


def scaled(number: int, kind: type[Closed] = Scaled, rows: int = 4) -> Any:
    numbers = torch.arange(rows * 6, dtype=torch.int8).view(rows, 6)
    return kind(numbers, torch.tensor(0.1) + number)


def _is_same(one: Any, other: Any) -> bool:
    return (
        type(one) is type(other)
        and torch.equal(one.numbers, other.numbers)
        and torch.equal(one.scale, other.scale)
    )


def _save(writer: MemoryStorageWriter, road: str, state: dict[str, Any], name: str) -> None:
    """Save on one of the roads; what is copied ahead is overwritten before the save is complete."""
    begun = begin_save(road, writer, state, name)
    if road.startswith("async"):
        state["w"].zero_()
        if isinstance(state["scaled"], Scaled):
            state["scaled"].numbers.zero_()
            state["scaled"].scale.zero_()
        begun.result()


@pytest.mark.parametrize("road", ["save", "dcp.save", "async", "async by dcp"])
@on_ranks(1)
def test_a_wrapper_comes_back_part_by_part(memory_root: Any, tmp_path: Any, road: str) -> None:
    job = Job(str(tmp_path / "root"), str(memory_root))
    torch.serialization.add_safe_globals([Scaled])
    with job.writer() as writer:
        for step in range(3):
            state = {"w": torch.full((5,), step), "scaled": scaled(step), "part": scaled(9)}
            state["part"].numbers = torch.arange(600, dtype=torch.int8)[100:124].view(4, 6)
            _save(writer, road, state, f"step-{step}")
        writer.wait("step-2")
    part = scaled(9)
    part.numbers = torch.arange(600, dtype=torch.int8)[100:124].view(4, 6)
    for reader in (job.reader(), Job(job.url, f"{job.memory}/elsewhere").reader()):
        for load in (dcp_mem.load, dcp.load):
            blank: dict[str, Any] = {"w": torch.zeros(5, dtype=torch.int64)}
            blank |= {"scaled": scaled(7), "part": scaled(7)}
            blank["scaled"].numbers.fill_(-1)
            known = blank["scaled"].numbers
            load(blank, checkpoint_id="step-2", storage_reader=reader)
            assert torch.equal(blank["w"], torch.full((5,), 2))
            assert _is_same(blank["scaled"], scaled(2))
            assert blank["scaled"].numbers is known  # in place, as all tensors are loaded
            assert _is_same(blank["part"], part)


def _nested(number: int) -> Scaled:
    """A wrapper of a wrapper, whose `detach` is the values in another precision."""
    nested: Scaled = Scaled(scaled(number), torch.tensor(2.0))
    return nested


@on_ranks(1)
def test_a_wrapper_of_a_wrapper_comes_back_part_by_part(job: Job) -> None:
    torch.serialization.add_safe_globals([Scaled])
    with job.writer() as writer:
        dcp_mem.save({"nested": _nested(1)}, checkpoint_id="step-1", storage_writer=writer)
        writer.wait("step-1")
    for reader in (job.reader(), Job(job.url, f"{job.memory}/elsewhere").reader()):
        blank = _nested(7)
        blank.numbers.numbers.zero_()  # type: ignore[attr-defined]
        dcp_mem.load({"nested": blank}, storage_reader=reader)
        assert _is_same(blank.numbers, scaled(1))
        assert torch.equal(blank.scale, torch.tensor(2.0))


def _loads_into_others(job: Job) -> list[str]:
    torch.serialization.add_safe_globals([Scaled])
    with job.writer() as writer:
        state = {"scaled": scaled(1), "plain": scaled(1).values()}
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
    others = [
        {"plain": scaled(3)},  # its copy_ copies into values that nobody has
        {"plain": scaled(3, Closed)},
        {"scaled": scaled(3, Closed)},
    ]
    errors = [
        raised_by(lambda other=other: dcp_mem.load(other, storage_reader=job.reader()))  # type: ignore[misc]
        for other in others
    ]
    plain = {"scaled": torch.zeros(4, 6)}
    dcp_mem.load(plain, storage_reader=job.reader())
    assert torch.equal(plain["scaled"], scaled(1).values())  # as its class has it
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_a_class_that_would_lose_what_is_loaded_is_refused_by_name(memory_job: Job) -> None:
    (errors,) = forked_ranks(_loads_into_others, 1, memory_job)
    for error, name in zip(errors, ["plain", "plain", "scaled"], strict=True):
        assert error.startswith(f"DcpMemError: {name}: "), error
    assert "can't be loaded into a" in errors[0]
    assert "Scaled (a copy changes nothing)" in errors[0]
    assert "Closed becomes a torch.Tensor" in errors[1]


def _refused_saves(job: Job, kind: type[Closed], road: str) -> str:
    rank = dist.get_rank()

    def state(number: int, kind: type[Closed] = Scaled) -> dict[str, Any]:
        return {"w": torch.ones(5), "scaled": {f"of {rank}": scaled(number, kind)}}

    with job.writer(keep_memory=3) as writer:
        _save(writer, road, state(1), "step-1")
        refused = state(2, kind if rank == 0 else Scaled)
        error = raised_by(lambda: _save(writer, road, refused, "step-2"))
        _save(writer, road, state(3), "step-3")
    with job.reader() as reader:
        assert reader.recoverable() == ["step-3", "step-1"]
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("road", ["save", "dcp.save", "async", "async by dcp"])
@pytest.mark.parametrize("kind", [Closed, Turning])
def test_a_class_that_cant_be_saved_as_it_is_is_refused_on_all_ranks(
    memory_job: Job, kind: type[Closed], road: str
) -> None:
    first, second = forked_ranks(
        _refused_saves, 2, memory_job, kind, road, env={"DCP_MEM_TIMEOUT": "30"}
    )
    for error in (first, second):
        assert f"{kind.__name__} becomes a torch.Tensor" in error
    if not road.startswith("async"):
        assert first.startswith("DcpMemError: scaled.of 0: "), first
        assert second.startswith("RankFailed"), second


def _sharded(job: Job, step: str) -> list[str]:
    torch.serialization.add_safe_globals([Scaled])
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def state(number: int) -> dict[str, Any]:
        rows = 8 // world
        local = scaled(number, rows=rows)
        local.numbers += rank * rows * 6
        plain = DTensor.from_local(local.values(), mesh, [Shard(0)], run_check=False)
        sharded = DTensor(local, plain._spec, requires_grad=False)
        return {"scaled": sharded, "w": torch.ones(3)}

    errors = []
    with job.writer() as writer:
        if step == "save":
            dcp_mem.save(state(0), checkpoint_id="step-1", storage_writer=writer)
        blank = state(4)
        blank["scaled"]._local_tensor.numbers.zero_()
        error = raised_by(lambda: dcp_mem.load(blank, storage_reader=job.reader()))
        errors.append("" if error is None else f"{type(error).__name__}: {error}")
        if error is None:
            assert _is_same(blank["scaled"]._local_tensor, state(0)["scaled"]._local_tensor)
    return errors


def test_a_wrapper_that_is_sharded_comes_back_with_the_same_sharding_or_is_refused(
    memory_job: Job,
) -> None:
    assert forked_ranks(_sharded, 2, memory_job, "save") == [[""], [""]]
    for (error,) in forked_ranks(_sharded, 4, memory_job, "load", env={"DCP_MEM_TIMEOUT": "30"}):
        assert "scaled: a torch.Tensor was saved" in error or error.startswith("RankFailed")


# -- tensors without memory ------------------------------------------------------------------------


def _without_memory(kind: str) -> torch.Tensor:
    tensor = torch.arange(4.0)
    if kind == "functional":
        functional: torch.Tensor = torch._to_functional_tensor(tensor)
        return functional
    tensor.untyped_storage().resize_(0)
    return tensor


def _refused_for_memory(job: Job, kind: str) -> list[str]:
    rank, errors = dist.get_rank(), []

    def attempted(act: Any) -> None:
        error = raised_by(act)
        errors.append(f"{type(error).__name__}: {error}")

    with job.writer(keep_memory=3) as writer:
        for step in range(2):  # the second is recognised
            state = {"deep": {f"of {rank}": torch.arange(4.0)}, "w": torch.ones(5)}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
        odd = _without_memory(kind) if rank == 0 else torch.arange(4.0)
        refused = {"deep": {f"of {rank}": odd}, "w": torch.ones(5)}
        fresh = {"deep": {f"of {rank}": odd}, "v": torch.ones(5)}
        for state in (refused, fresh):
            for save in (dcp.save, dcp_mem.save):
                options: Any = {"checkpoint_id": "step-5", "storage_writer": writer}
                attempted(lambda state=state, save=save, options=options: save(state, **options))
            attempted(
                lambda state=state, options=options: dcp_mem.async_save(state, **options).result()
            )
        for load in (dcp.load, dcp_mem.load):
            options = {"checkpoint_id": "step-1", "storage_reader": job.reader()}
            attempted(lambda load=load, options=options: load(refused, **options))
    with job.reader() as reader:
        assert reader.recoverable() == ["step-1", "step-0"]
    return errors


@pytest.mark.parametrize("kind", ["freed", "functional"])
def test_a_tensor_without_memory_is_refused_by_name_on_all_ranks(
    memory_job: Job, kind: str
) -> None:
    first, second = forked_ranks(
        _refused_for_memory, 2, memory_job, kind, env={"DCP_MEM_TIMEOUT": "30"}
    )
    for error in first:
        assert "deep.of 0: the tensor has no memory" in error
    for error in second:
        assert error.startswith("RankFailed") or "deep.of 0: the tensor has no memory" in error
