"""Plain tensors that say by attributes what torch's planner shall make of them."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner, utils
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageWriter
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked, on_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

_TYPES: Any = getattr(dcp.state_dict_saver, "AsyncCheckpointerType", None)
_IN_PROCESS: dict[str, Any] = {} if _TYPES is None else {"async_checkpointer_type": _TYPES.PROCESS}

needs_checkpointable = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"),
    reason=f"torch {torch.__version__} has no CheckpointableTensor (2.14 has)",
)


# -- CheckpointableTensor --------------------------------------------------------------------------


def _whole(step: int) -> torch.Tensor:
    return torch.arange(24.0).view(8, 3) + 100 * step


def _rows(rank: int, whole: torch.Tensor, kind: Callable[..., Any] = torch.Tensor) -> Any:
    """Half the rows of the whole, as a plain tensor that says so."""
    tensor: Any = whole[4 * rank : 4 * rank + 4].clone()
    if kind is torch.nn.Parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    tensor.global_shape, tensor.global_offsets = (8, 3), ((4 * rank, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((4, 3),)
    return tensor


def _padded(rank: int, whole: torch.Tensor) -> Any:
    """Two shards of two rows each, in one tensor with a row of padding behind each."""
    tensor: Any = torch.full((6, 3), -7.0)
    tensor.global_shape, tensor.global_offsets = (8, 3), ((2 * rank, 0), (4 + 2 * rank, 0))
    tensor.local_offsets, tensor.local_sizes = ((0, 0), (3, 0)), ((2, 3), (2, 3))
    tensor[0:2], tensor[3:5] = whole[2 * rank : 2 * rank + 2], whole[4 + 2 * rank : 6 + 2 * rank]
    return tensor


def _state(rank: int, step: int) -> dict[str, Any]:
    """A state that is another kind of state at each step, under the same names and shapes."""
    whole = _whole(step)
    other = 1 - rank if step == 3 else rank  # at step 3 the ranks change places
    rows: Any = _rows(other, whole) if step > 1 else whole[:4].clone()
    parameter: Any = _rows(rank, whole, torch.nn.Parameter)
    inner = {"rows": rows, "parameter": parameter, "padded": _padded(rank, whole)}
    return {"model": inner, "w": torch.full((5,), float(step)), "step": step}


def _blank(rank: int, step: int) -> dict[str, Any]:
    state = _state(rank, step)
    for tensor in (*state["model"].values(), state["w"]):
        tensor.detach().fill_(-7)
    return {**state, "step": 0}


def _loads(rank: int, step: int, load: Callable[..., Any], reader: Any) -> None:
    """Load as it was saved, with the other sharding, and whole."""
    options = {"checkpoint_id": f"step-{step}", "storage_reader": reader}
    state, expected = _blank(rank, step), _state(rank, step)
    load(state, **options)
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor), (name, step, load)
    assert torch.equal(state["w"], expected["w"])
    assert state["step"] == step
    exchanged: Any = {
        "parameter": _padded(rank, torch.full((8, 3), -7.0)),
        "padded": _rows(rank, torch.full((8, 3), -7.0)),
    }
    load({"model": exchanged}, **options)
    assert torch.equal(exchanged["parameter"], _padded(rank, _whole(step)))
    assert torch.equal(exchanged["padded"], _rows(rank, _whole(step)))
    whole = {"parameter": torch.zeros(8, 3), "padded": torch.zeros(8, 3)}
    load({"model": whole}, **options)
    for tensor in whole.values():
        assert torch.equal(tensor, _whole(step))


def _save(writer: MemoryStorageWriter, road: str, state: dict[str, Any], name: str) -> None:
    """Save on one of the roads; what is copied ahead is overwritten before the save is complete."""
    options: dict[str, Any] = {"checkpoint_id": name, "storage_writer": writer}
    if road in ("save", "dcp.save"):
        (dcp_mem.save if road == "save" else dcp.save)(state, **options)
        return
    if road == "overlap":
        options["overlap"] = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])]
    future: Any = (dcp.async_save if road == "dcp.async_save" else dcp_mem.async_save)(
        state, **options
    )
    for tensor in (*state["model"].values(), state["w"]):
        tensor.detach().zero_()
    future.result()


def _size_of(reader: Any, name: str, entry: str) -> tuple[int, ...]:
    reader.reset(name)
    return tuple(reader.read_metadata().state_dict_metadata[entry].size)


@needs_checkpointable
@pytest.mark.parametrize("road", ["save", "dcp.save", "async_save", "dcp.async_save", "overlap"])
@on_ranks(2)
def test_a_tensor_that_says_it_is_a_shard_is_one(
    memory_root: Any, tmp_path: Any, road: str
) -> None:
    job = Job(str(tmp_path / "root"), str(memory_root))
    rank = dist.get_rank()
    with job.writer(keep_memory=5) as writer:
        for step in (1, 2, 3, 4):
            _save(writer, road, _state(rank, step), f"step-{step}")
        writer.wait("step-4")
    dist.barrier()
    elsewhere = Job(job.url, f"{job.memory}/elsewhere")
    _loads(rank, 2, dcp.load, job.reader())
    _loads(rank, 3, dcp_mem.load, job.reader())
    for load in (dcp.load, dcp_mem.load):
        _loads(rank, 4, load, elsewhere.reader())
    with job.reader() as reader:
        sizes = [_size_of(reader, f"step-{step}", "model.rows") for step in (1, 2)]
    assert sizes == [(4, 3), (8, 3)]


@needs_checkpointable
@on_ranks(2)
def test_the_manager_restores_shards_and_takes_them_for_no_replicas(memory_job: Job) -> None:
    rank = dist.get_rank()
    places: dict[str, Any] = {"memory_root": memory_job.memory, "job": memory_job.name}
    with CheckpointManager(memory_job.url, compare_replicas=1, **places) as manager:
        for step in range(1, 10):  # an eighth of the tensors is compared at each
            assert not manager.save(step, _state(rank, step)).troubles
        state, expected = _blank(rank, step), _state(rank, step)
        assert manager.restore(state) == step
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor)


def _error(save: Callable[..., Any], state: dict[str, Any], options: dict[str, Any]) -> str:
    def act() -> None:
        future = save(state, **options)
        if hasattr(future, "result"):
            future.result()

    error = raised_by(act)
    return f"{type(error).__name__}: {error}"


@needs_checkpointable
@on_ranks(2, env={"DCP_MEM_TIMEOUT": "30"})
def test_what_one_rank_says_wrongly_of_a_shard_is_refused_on_all(memory_job: Job) -> None:
    rank = dist.get_rank()
    mixed = _rows(0, _whole(1)) if rank == 0 else torch.zeros(4, 3)
    wrong = _rows(rank, _whole(1))
    if rank == 0:
        wrong.local_offsets = ()
    with memory_job.writer(keep_memory=5) as writer:
        options: dict[str, Any] = {"checkpoint_id": "step-1", "storage_writer": writer}
        errors = [
            _error(save, {"x": tensor}, options)
            for tensor in (mixed, wrong)
            for save in (dcp.save, dcp_mem.save)
        ]
        dcp_mem.save({"x": torch.ones(2)}, checkpoint_id="step-9", storage_writer=writer)
    with memory_job.reader() as reader:
        assert reader.recoverable() == ["step-9"]
    assert "x: rank 1 has a tensor of [4, 3]" in errors[0]
    assert "x: rank 1 has a tensor of [4, 3]" in errors[1]
    assert all("None" not in error for error in errors)


@needs_checkpointable
@on_ranks(2, timeout=100)
def test_shards_that_would_be_none_in_another_process_are_refused_on_all_ranks(
    memory_job: Job,
) -> None:
    state = _state(dist.get_rank(), 1)
    with memory_job.writer() as writer:
        error = _error(
            dcp.async_save,
            state,
            {"checkpoint_id": "step-1", "storage_writer": writer, **_IN_PROCESS},
        )
    assert "is a CheckpointableTensor, which torch sends to another process" in error


# -- methods of one tensor -------------------------------------------------------------------------


class _Half:
    """Makes a tensor of two of the second half of one of four, by torch's methods."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def write_items(self, fqn: str, tensor: Any) -> list[Any]:
        offset, size = torch.Size([0]), torch.Size([2])
        data = TensorWriteData(
            ChunkStorageMetadata(offset, size),
            TensorProperties.create_from_tensor(self._tensor),
            torch.Size([2]),
        )
        return [WriteItem(MetadataIndex(fqn, offset), WriteItemType.SHARD, tensor_data=data)]

    def chunk_list(self) -> list[Any]:
        return [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]

    def shard(self, index: Any) -> torch.Tensor:
        return self._tensor[2:]


def _with_methods(tensor: Any) -> Any:
    half = _Half(tensor)
    tensor.__create_write_items__ = half.write_items
    tensor.__create_chunk_list__ = half.chunk_list
    tensor.__get_tensor_shard__ = half.shard
    return tensor


def _methods_are_followed(job: Job) -> list[str]:
    errors = []
    with job.writer(keep_memory=9) as writer:
        for save in (dcp.save, dcp_mem.save):
            options: dict[str, Any] = {"checkpoint_id": "step-1", "storage_writer": writer}
            save({"x": torch.zeros(4)}, **options)
            save({"x": _with_methods(torch.arange(4.0))}, **{**options, "checkpoint_id": "step-2"})
            for load in (dcp.load, dcp_mem.load):
                whole = {"x": torch.zeros(2)}
                load(whole, checkpoint_id="step-2", storage_reader=job.reader())
                assert torch.equal(whole["x"], torch.tensor([2.0, 3.0]))
        options = {"checkpoint_id": "step-3", "storage_writer": writer}
        for save in (dcp_mem.async_save, dcp.async_save):
            state: dict[str, Any] = {"deep": {"x": _with_methods(torch.arange(4.0))}}
            errors.append(_error(save, state, options))
    return errors


def test_methods_of_one_tensor_are_followed_and_refused_where_they_cant_be_copied(
    memory_job: Job,
) -> None:
    for error in forked(_methods_are_followed, memory_job):
        assert "deep.x has a __create_write_items__ of its own" in error
        assert "save in the call" in error


# -- a kind that a newer torch knows ---------------------------------------------------------------


def _as_a_newer_torch() -> None:
    """Have torch take a tensor with an attribute for this rank's half of a whole."""
    write, find = default_planner._create_write_items, utils.find_tensor_shard

    def half(tensor: Any) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([tensor.half_of_rank * len(tensor)]), tensor.size())

    def write_items(fqn: str, value: Any) -> list[Any]:
        if not hasattr(value, "half_of_rank"):
            return write(fqn, value)
        known = TensorProperties.create_from_tensor(value)
        data = TensorWriteData(half(value), known, torch.Size([2 * len(value)]))
        index = MetadataIndex(fqn, data.chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def find_shard(tensor: Any, index: MetadataIndex) -> torch.Tensor:
        return tensor if hasattr(tensor, "half_of_rank") else find(tensor, index)

    default_planner._create_write_items = write_items  # type: ignore[assignment]
    utils.find_tensor_shard = find_shard


@pytest.mark.parametrize("save", [dcp.save, dcp_mem.save])
@on_ranks(2)
def test_a_kind_that_a_newer_torch_knows_is_saved_as_that_does_and_named_once(
    memory_job: Job, save: Callable[..., Any]
) -> None:
    _as_a_newer_torch()
    rank, said = dist.get_rank(), []
    handler = logging.Handler(logging.WARNING)
    logging.getLogger("dcp_mem").addHandler(handler)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    own: Any = torch.arange(3.0) + 3 * rank
    own.half_of_rank = rank
    state = {"of all": {"x": torch.ones(2)}, "halves": {"x": own}}
    with memory_job.writer() as writer:
        for step in range(2):
            save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    whole = {"halves": {"x": torch.zeros(6)}}
    dcp_mem.load(whole, checkpoint_id="step-1", storage_reader=memory_job.reader())
    assert torch.equal(whole["halves"]["x"], torch.arange(6.0))
    (warning,) = said
    assert "halves.x: 1 items ([3] at [" in warning
    assert "of [6]) to torch, 1 items ([3] at [0] of [3]) to dcp_mem" in warning
