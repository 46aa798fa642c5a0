"""`dcp_mem.load`: on all ranks the result of dcp.load, or its error; byte items run no code."""

import collections
import contextlib
import inspect
import io
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_mem
from dcp_mem import RankFailed, UntrustedObject
from tests.support.checkpoints.jobs import Job, make_state, number_of
from tests.support.checkpoints.large_jobs import as_large_jobs
from tests.support.checkpoints.plans import save_by_torch
from tests.support.processes.forks import forked, forked_ranks, in_process, on_ranks, raised_by

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (8, 6),
    "uneven": (7, 5),
    "few": (1, 3),
    "wide": (3, 16),
    "scalar": (),
    "empty": (0, 4),
}


def _full(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    count = int(torch.Size(shape).numel())
    return torch.arange(count, dtype=torch.float32).reshape(shape) + len(name)


def _state(sharding: str, filled: bool) -> dict[str, Any]:
    """Make a state of sharded tensors, a nested dict, a list and byte items."""

    def placed(name: str) -> torch.Tensor:
        full = _full(name) if filled else torch.full(SHAPES[name], -1.0)
        if not dist.is_initialized() or sharding == "plain" or not SHAPES[name]:
            return full
        size = dist.get_world_size()
        if sharding == "replicas" and size % 2 == 0:
            mesh = init_device_mesh("cpu", (2, size // 2))
            return distribute_tensor(full, mesh, [Replicate(), Shard(0)])
        return distribute_tensor(
            full, init_device_mesh("cpu", (size,)), [Shard(1 if sharding == "columns" else 0)]
        )

    tensors = {name: placed(name) for name in SHAPES}
    inner = {"list": [placed("even"), {"deep": placed("wide")}], "rate": 0.5 if filled else 0.0}
    return {
        **tensors,
        "inner": inner,
        "text": "saved" if filled else "",
        "step": 7 if filled else 0,
    }


def _check(state: dict[str, Any]) -> None:
    tensors = {
        **{name: state[name] for name in SHAPES},
        "even ": state["inner"]["list"][0],
        "wide ": state["inner"]["list"][1]["deep"],
    }
    for name, found in tensors.items():
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, _full(name.strip())), name
    assert (state["inner"]["rate"], state["text"], state["step"]) == (0.5, "saved", 7)


def _save(job: Job, sharding: str) -> None:
    with job.writer() as writer:
        dcp_mem.save(_state(sharding, filled=True), checkpoint_id="step-1", storage_writer=writer)


@contextlib.contextmanager
def _by_columns() -> Iterator[None]:
    """Forbid DCP's metadata, so that loads read the catalog's columns."""

    def refuse(*_: object) -> None:
        raise AssertionError("DCP's metadata has been made")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_mem.loading.sources.base.metadata_of", refuse)
        yield


def _load(job: Job, sharding: str) -> None:
    state = _state(sharding, filled=False)
    with job.reader() as reader, _by_columns():
        dcp_mem.load(state, storage_reader=reader)
        assert reader.report().source == "memory"
    _check(state)


@pytest.mark.parametrize(
    "saved", [(1, "plain"), (2, "rows"), (3, "columns"), (4, "replicas")], ids=str
)
@pytest.mark.parametrize(
    "loaded", [(1, "plain"), (2, "columns"), (3, "rows"), (4, "replicas")], ids=str
)
def test_any_sharding_loads_into_any_other(
    memory_job: Job, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    forked_ranks(_save, saved[0], memory_job, saved[1])
    forked_ranks(_load, loaded[0], memory_job, loaded[1])


# -- by columns ------------------------------------------------------------------------------------


def _unusual_destinations() -> dict[str, Any]:
    """Make tensors, full of -1, whose layout differs from a segment's or seems to differ."""
    parameter = torch.nn.Parameter(torch.full((4, 3), -1.0))
    made = torch.full((4, 3), -1.0, requires_grad=True)
    return {
        "transposed": torch.full((3, 4), -1.0).t(),
        "every other": torch.full((8, 3), -1.0)[::2],
        "expanded to a column": torch.full((4, 6), -1.0)[:, 1:4],
        "conjugate": torch.full((4, 3), -1.0, dtype=torch.complex64).conj(),
        "imaginary": torch.full((4, 3), -1.0, dtype=torch.complex64)
        .conj()
        .imag,  # neither its memory: it is negated
        "parameter": parameter,
        "requires grad": made,
        "view of a larger one": torch.full((100,), -1.0)[13:25].view(4, 3),
        "double": torch.full((4, 3), -1.0, dtype=torch.float64),
        "half": torch.full((4, 3), -1.0, dtype=torch.bfloat16),
        "whole numbers": torch.full((4, 3), -1, dtype=torch.int32),
        "scalar": torch.tensor(-1.0),
        "scalar of another type": torch.tensor(-1, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
    }


def _saved_values() -> dict[str, Any]:
    """Return the values to save: floats, but complex where the destination is complex."""
    values: dict[str, Any] = {}
    for number, (name, into) in enumerate(_unusual_destinations().items()):
        dtype = torch.complex64 if into.is_complex() else torch.float32
        values[name] = torch.arange(into.numel()).reshape(into.shape).to(dtype) + number
    return values


def _save_values(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        dcp_mem.save(_saved_values(), checkpoint_id="step-1", storage_writer=writer)
        if job.url is not None:
            writer.wait("step-1")


def _load_into_unusual_destinations(job: Job, source: str) -> None:
    state = _unusual_destinations()
    strides = {name: tensor.stride() for name, tensor in state.items()}
    with job.reader() as reader, _by_columns():
        dcp_mem.load(dict(state), storage_reader=reader)
        assert reader.report().source == source
    for name, value in _saved_values().items():
        found = state[name]
        assert torch.equal(found.detach(), value.to(found.dtype)), name
        assert found.stride() == strides[name], name
        assert found.requires_grad == (name in ("parameter", "requires grad")), name
        assert found.grad_fn is None or not found.requires_grad, name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("source", ["memory", "storage"])
def test_any_tensor_of_the_right_shape_can_be_loaded_into(
    memory_root: Path, tmp_path: Path, source: str, ranks: int
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked_ranks(_save_values, ranks, job)
    if source == "storage":
        shutil.rmtree(job.directory)
    forked_ranks(_load_into_unusual_destinations, ranks, job, source)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_load_may_have_no_bytes_to_read_straight_into_tensors(
    memory_job: Job, ranks: int
) -> None:
    states: list[dict[str, Any]] = [
        {"text": "saved", "step": 7},
        {"a": torch.arange(5.0), "b": torch.arange(3.0)},
        {"e": torch.zeros(0, 4)},
        {},
    ]
    with memory_job.writer(keep_memory=9) as writer:
        for number, state in enumerate(states):
            dcp_mem.save(state, checkpoint_id=f"{number}", storage_writer=writer)
            into = {
                key: torch.full(value.shape, -1.0, dtype=torch.float64)
                if isinstance(value, torch.Tensor)
                else None
                for key, value in state.items()
            }
            with memory_job.reader() as reader, _by_columns():
                dcp_mem.load(into, checkpoint_id=f"{number}", storage_reader=reader)
            assert into.keys() == state.keys()
            for key, value in state.items():
                found: Any = into[key]
                assert (
                    torch.equal(found, value.double())
                    if isinstance(value, torch.Tensor)
                    else found == value
                )


def _save_durably(job: Job, sharding: str) -> None:
    with job.writer(agent="thread") as writer:
        dcp_mem.save(_state(sharding, filled=True), checkpoint_id="step-1", storage_writer=writer)
        writer.wait("step-1")


def _load_while_memory_is_lost(job: Job, sharding: str) -> str:
    """Segments in memory are cut once they are open, and found to be whole."""

    def cut(_name: str, _tensor: torch.Tensor) -> bool:
        """Is asked which tensors to skip once the checkpoint is open."""
        for segment in (job.directory / "step-1").glob("*.distcp"):
            os.truncate(segment, 700)
        return False

    state = _state(sharding, filled=False)
    with job.reader() as reader, _by_columns():
        dcp_mem.load(state, storage_reader=reader, skip=cut)
        _check(state)
        return reader.report().source


@pytest.mark.parametrize("loaded", [(1, "plain"), (2, "rows"), (3, "columns")], ids=str)
def test_a_segment_that_memory_loses_while_it_is_read_is_taken_from_storage(
    memory_root: Path, tmp_path: Path, loaded: tuple[int, str]
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked_ranks(_save_durably, 2, job, "rows")
    assert all(
        "storage" in source
        for source in forked_ranks(_load_while_memory_is_lost, loaded[0], job, loaded[1])
    )


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_what_dcp_saved_loads_too(memory_job: Job, tmp_path: Path, ranks: int) -> None:
    directory = str(tmp_path / "stock")
    with memory_job.writer() as writer:
        save_by_torch(make_state(3), checkpoint_id="step-3", storage_writer=writer)
    dcp.save(make_state(4), checkpoint_id=directory)
    numbers = []
    for reader in (
        memory_job.reader(),
        dcp.FileSystemReader(directory),
        Job(str(Path(directory).parent), memory_job.memory, name="other").reader(),
    ):
        state = make_state(0)
        dcp_mem.load(state, storage_reader=reader)
        numbers.append(number_of(state))
    assert numbers == [3, 4, 4]


# -- errors are dcp.load's -------------------------------------------------------------------------


class _Undemanding:
    """Can do without some entries, which lie between others."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict

    def is_optional(self, key: str) -> bool:
        return key.startswith("deep.maybe")


def _load_what_there_is(job: Job, by_torchs_reader: Path | None) -> None:
    def placed(fill: float) -> torch.Tensor:
        full = torch.full((5, 3), fill)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        return distribute_tensor(full, mesh, [Shard(0)]) if mesh is not None else full

    def state(fill: float, *names: str) -> dict[str, Any]:
        made = {name: placed(fill) if "tensor" in name else fill for name in names}
        return {"deep": {name: made[name] for name in sorted(names)}, "last": placed(fill)}

    known = ("a tensor", "maybe tensor 2", "maybe text 2", "z")
    with job.writer() as writer:
        options: dict[str, Any] = {"storage_writer": writer} if by_torchs_reader is None else {}
        name = "step-1" if by_torchs_reader is None else str(by_torchs_reader / "step-1")
        dcp_mem.save({"one": _Undemanding(state(1.0, *known))}, checkpoint_id=name, **options)
    reader = job.reader() if by_torchs_reader is None else dcp.FileSystemReader(name)
    more = ("maybe tensor 1", "maybe tensor 3", "maybe text 1", "maybe text 3")
    one = _Undemanding(state(0.0, *known, *more))
    with _by_columns() if by_torchs_reader is None else contextlib.nullcontext():
        dcp_mem.load({"one": one}, storage_reader=reader)
    assert list(one.values["deep"]) == list(known)
    for value in (*one.values["deep"].values(), one.values["last"]):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.all(torch.as_tensor(whole) == 1)
    demanding = _Undemanding(state(0.0, *known, *more, "other"))
    error = raised_by(lambda: dcp_mem.load({"one": demanding}, storage_reader=reader))
    assert "Missing key in checkpoint state_dict: one.deep.other" in str(error)
    assert len(demanding.values["deep"]) == len(known) + len(more) + 1


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("by_torchs_reader", [False, True])
def test_what_a_stateful_object_can_do_without_may_be_missing(
    memory_job: Job, ranks: int | None, by_torchs_reader: bool, tmp_path: Path
) -> None:
    elsewhere = tmp_path if by_torchs_reader else None
    if ranks is None:
        forked(_load_what_there_is, memory_job, elsewhere)
    else:
        forked_ranks(_load_what_there_is, ranks, memory_job, elsewhere)


# -- byte items ------------------------------------------------------------------------------------


class Evil:
    """Unpickling it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_byte_item_that_would_run_code_is_refused_unless_asked_for(
    memory_job: Job, tmp_path: Path, ranks: int
) -> None:
    for rank, (error, ran, ran_when_asked_for) in enumerate(
        forked_ranks(_load_evil_apart, ranks, memory_job, str(tmp_path))
    ):
        assert error.startswith(
            (f"{UntrustedObject.__name__}: evil isn't loaded", f"{RankFailed.__name__}:")
        ), rank
        assert "weights_only=False" in error
        assert not ran
        assert ran_when_asked_for


def _load_evil_apart(job: Job, directory: str) -> tuple[str, bool, bool]:
    rank = dist.get_rank()
    own = Job(None, str(Path(job.memory) / f"rank{rank}"))
    Path(own.memory).mkdir(mode=0o700)
    with own.writer(process_group=None) as writer:
        path = f"{directory}/made-by-{rank}"
        state = {"w": torch.ones(2), "evil": Evil(path)}
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    state = {"w": torch.zeros(2), "evil": None}
    error = raised_by(lambda: dcp_mem.load(state, storage_reader=own.reader(), no_dist=True))
    ran = os.path.isdir(path)
    dcp_mem.load(state, storage_reader=own.reader(), weights_only=False, no_dist=True)
    return f"{type(error).__name__}: {error}", ran, os.path.isdir(path)


def _save_and_load_usual_objects(job: Job) -> dict[str, Any]:
    objects = {
        "number": 3,
        "rate": 0.1,
        "text": "x",
        "none": None,
        "flags": [True, False],
        "pair": (1, "b"),
        "ordered": collections.OrderedDict(a=1),
        "dtype": torch.bfloat16,
        "nested": {"betas": (0.9, 0.99), "sizes": torch.Size([2, 3])},
    }
    with job.writer() as writer:
        dcp_mem.save({"w": torch.ones(2), **objects}, checkpoint_id="step-1", storage_writer=writer)
    state: dict[str, Any] = {"w": torch.zeros(2), **dict.fromkeys(objects)}
    state["nested"] = {"betas": None, "sizes": None}
    state["ordered"] = {"a": None}
    dcp_mem.load(state, storage_reader=job.reader())
    assert {key: state[key] for key in objects} == objects
    return state


def test_the_objects_that_training_states_are_made_of_load_by_default(memory_job: Job) -> None:
    forked(_save_and_load_usual_objects, memory_job)


@in_process
def test_streams_of_bytes_load_as_by_dcp(memory_job: Job) -> None:
    position = io.BytesIO(b"a stream of bytes")
    position.seek(3)
    streams = {"position": position, "empty": io.BytesIO(), "list": [io.BytesIO(b"\0\xff")]}
    plain = {"bytes": b"", "mutable": bytearray(b"abc")}
    with memory_job.writer() as writer:
        dcp_mem.save(
            {"w": torch.ones(2), **streams, **plain}, checkpoint_id="1", storage_writer=writer
        )
    for load in (dcp.load, dcp_mem.load):
        state: dict[str, Any] = {"w": torch.zeros(2), "position": io.BytesIO()}
        state.update(empty=io.BytesIO(b"full"), list=[io.BytesIO()], bytes=b"", mutable=None)
        load(state, storage_reader=memory_job.reader())
        assert (state["position"].getvalue(), state["position"].tell()) == (b"a stream of bytes", 3)
        assert (state["empty"].getvalue(), state["list"][0].getvalue()) == (b"", b"\0\xff")
        assert {name: state[name] for name in plain} == plain


# -- what else dcp.load does -----------------------------------------------------------------------


class Counter:
    """A stateful object, as a data loader is one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "buffer": torch.full((3,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["buffer"], torch.full((3,), float(state["count"])))
        self.count = state["count"]


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_stateful_objects_are_saved_and_loaded(memory_job: Job, ranks: int) -> None:
    with memory_job.writer() as writer:
        dcp_mem.save(
            {"loader": Counter(5), "w": torch.ones(2)},
            checkpoint_id="step-1",
            storage_writer=writer,
        )
    state: dict[str, Any] = {"loader": Counter(0), "w": torch.zeros(2)}
    dcp_mem.load(state, storage_reader=memory_job.reader())
    assert torch.equal(state["w"], torch.ones(2))
    loader = state["loader"]
    assert isinstance(loader, Counter)
    assert loader.count == 5


class Upside(DefaultLoadPlanner):
    """A planner of somebody's own."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.asked = getattr(self, "asked", 0) + 1
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]


def _load_by_own_planner(job: Job) -> int:
    with job.writer() as writer:
        dcp_mem.save(make_state(1), checkpoint_id="step-1", storage_writer=writer)
    state, planner = make_state(0), Upside()
    dcp_mem.load(state, storage_reader=job.reader(), planner=planner)
    assert number_of(state) == 1
    return planner.asked


@as_large_jobs()
def _save_as_large_jobs(job: Job) -> None:
    _save(job, "rows")


@as_large_jobs()
def _load_by_entries(job: Job, sharding: str) -> None:
    state = _state(sharding, filled=False)
    with job.reader() as reader:
        dcp.load(state, storage_reader=reader, planner=Upside())
        assert not isinstance(reader.read_metadata().storage_data, dict)
    _check(state)


@pytest.mark.parametrize("loaded", [(1, "plain"), (2, "columns"), (4, "replicas")], ids=str)
def test_a_planner_of_ones_own_reads_the_metadata_of_very_many_parts(
    memory_job: Job, loaded: tuple[int, str]
) -> None:
    forked_ranks(_save_as_large_jobs, 3, memory_job)
    forked_ranks(_load_by_entries, loaded[0], memory_job, loaded[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_planner_of_ones_own_is_honoured(memory_job: Job, ranks: int) -> None:
    assert all(asked > 0 for asked in forked_ranks(_load_by_own_planner, ranks, memory_job))


# -- what the checkpoint has a part of only --------------------------------------------------------


def _loads_what_one_rank_saved(own: Job, by_torch: bool) -> None:
    """Rank 0 alone saves its part of a tensor; both ranks try to load parts and the whole."""
    saved = {"w": _sharded(torch.arange(8.0))}
    if dist.get_rank() == 0 and by_torch:
        dcp.save(saved, checkpoint_id=f"{own.url}/step-1", no_dist=True)
    elif dist.get_rank() == 0:
        with own.writer(agent="thread") as writer:
            dcp_mem.save(saved, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    dist.barrier()
    for road in (dcp.load, dcp_mem.load):
        part = {"w": _sharded(torch.full((8,), -1.0))}
        lack = raised_by(partial(road, part, storage_reader=own.reader(), no_dist=True))
        if dist.get_rank() == 0:
            assert (lack, part["w"].to_local().tolist()) == (None, [0.0, 1.0, 2.0, 3.0])
        else:
            assert "it has 0 of the 4 elements of w that are wanted" in str(lack)
        whole = {"w": torch.full((8,), -1.0)}
        lack = raised_by(partial(road, whole, storage_reader=own.reader(), no_dist=True))
        assert "it has 4 of the 8 elements of w that are wanted" in str(lack)
    dist.barrier()


def _sharded(tensor: torch.Tensor) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.save).parameters, reason="no no_dist here"
)
@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch"])
def test_a_part_that_the_checkpoint_lacks_is_an_error_and_not_left_as_it_was(
    tmp_path: Path, memory_root: Path, by_torch: bool
) -> None:
    job = Job(str(tmp_path), str(memory_root))
    forked_ranks(_loads_what_one_rank_saved, 2, job, by_torch)
