"""States that change between saves, and parts of ranks that don't fit: planned as torch would."""

import copy
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_mem
from tests.support.checkpoints import sharding
from tests.support.checkpoints.plans import assert_same_content, save_by_torch
from tests.support.checkpoints.roundtrip import (
    Places,
    State,
    assert_same,
    bits,
    comes_back,
    random_tensor,
)
from tests.support.checkpoints.sharding import Cell, Part
from tests.support.processes.forks import forked, forked_ranks, on_ranks, raised_by

FROM_MEMORY = ("memory",)


def _save_as_torch_does(places: Places, writer: Any, state: State, **options: Any) -> None:
    """Save; what comes back is the state, and the metadata is what torch's planner makes."""
    ours = dcp_mem.save(state, checkpoint_id="ours", storage_writer=writer)
    comes_back(places, "ours", state, roads=FROM_MEMORY, **options)
    _barrier()
    theirs = save_by_torch(state, checkpoint_id="by-torch", storage_writer=writer)
    assert_same_content(ours, theirs)
    assert set(ours.storage_data) == set(theirs.storage_data)
    _barrier()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


# -- structures ------------------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def _random_state(random: Random, depth: int = 3) -> State:
    return {
        f"{random.choice('abcxyz')}{number}": _random_value(random, depth)
        for number in range(random.randint(1, 4))
    }


def _random_value(random: Random, depth: int) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: _random_tensor(random),
        lambda: torch.nn.Parameter(torch.zeros(random.randint(0, 3), 2)),
        lambda: random.choice([1, 2.5, "text", None, True, [1, 2], [], [[3], "x"]]),
        lambda: (1, _random_tensor(random), [2]),
    ]
    if depth:
        makers += [
            lambda: _random_state(random, depth - 1),
            lambda: OrderedDict(_random_state(random, depth - 1)),
            lambda: [_random_value(random, depth - 1) for _ in range(random.randint(0, 3))],
            lambda: [3, _random_tensor(random), "x", _random_value(random, depth - 1)],
            lambda: [[[_random_tensor(random)], 1], [2, 3]],
            lambda: {n: _random_value(random, depth - 1) for n in range(random.randint(0, 3))},
        ]
    return random.choice(makers)()


def _random_tensor(random: Random) -> torch.Tensor:
    shape = [random.randint(0, 3) for _ in range(random.randint(0, 3))]
    return torch.zeros(shape, dtype=random.choice(_DTYPES))


def _renewed(value: Any) -> Any:
    """Copy the structure with new objects: other addresses, other values, other byte items."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach() + 1)
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value)
    if isinstance(value, dict):
        return type(value)((key, _renewed(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_renewed, value))
    if isinstance(value, str):
        return value * 100
    return copy.deepcopy(value) if value is None or value is True else value + 1


def _rebuilt(value: Any) -> Any:
    """The same leaves in containers of their own."""
    if isinstance(value, dict):
        return type(value)((key, _rebuilt(inner)) for key, inner in value.items())
    return list(map(_rebuilt, value)) if isinstance(value, list) else value


def _mutate(random: Random, state: State) -> None:
    """Change one entry of one container, or their order."""
    container = random.choice(list(_containers(state)))
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    new = random.choice([5, torch.zeros(2), [torch.zeros(1)]])
    action = random.choice(["remove", "add", "reorder", "replace", "replace", "replace"])
    if not keys or action == "add":
        if isinstance(container, list):
            container.insert(random.randint(0, len(container)), new)
        else:
            container["new"] = new
    elif action == "remove":
        del container[random.choice(keys)]
    elif action == "replace":
        key = random.choice(keys)
        container[key] = random.choice(_others(container[key]))
    elif isinstance(container, dict):
        entries = list(container.items())
        random.shuffle(entries)
        container.clear()
        container.update(entries)
    else:
        random.shuffle(container)


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _others(value: Any) -> list[Any]:
    """Values of another structure (for some values, of the same one)."""
    found = [{"x": value}, [value], [value, torch.zeros(1)], (value,), torch.zeros(7), 5, [5]]
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        shape = plain.shape
        found += [plain.unsqueeze(0), plain.reshape(-1), torch.zeros(*shape, 2, dtype=plain.dtype)]
        found += [torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, requires_grad=True)]
    if isinstance(value, dict) and value:
        found += [list(value.values()), OrderedDict(value), tuple(value.values())]
    if isinstance(value, list) and value:
        found += [dict(enumerate(value)), [*value[:-1], torch.zeros(2)], tuple(value)]
    return found


def test_any_change_of_a_random_state_is_in_the_next_checkpoint(places: Places) -> None:
    with places.writer(persist=False, keep_memory=2) as writer:
        for seed in range(30):
            random = Random(seed)
            state = _random_state(random)
            dcp_mem.save(state, checkpoint_id="before", storage_writer=writer)
            changed = _renewed(state) if random.random() < 0.5 else _rebuilt(state)
            _mutate(random, changed)
            _save_as_torch_does(places, writer, changed)


class _Name(str, enum.Enum):
    ONE = "one"


_W = torch.ones(2, 3)
_COMPLEX = torch.randn(2, 3, dtype=torch.cfloat)


def _made_in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


_TENSORS = [
    _W,
    torch.ones(3, 2),
    torch.ones(2, 3, 1),
    torch.ones(3, 2).t(),
    torch.ones(2, 3, dtype=torch.float64),
    torch.ones(2, 3, requires_grad=True),
    torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
    _COMPLEX,
    _COMPLEX.conj(),
    _COMPLEX.imag,
    _COMPLEX.conj().imag,
    _made_in_inference(),
]
"""Tensors that differ in one thing each from the first one."""
_PAIRS: list[tuple[State, State]] = [
    *(({"a": _W}, {"a": other}) for other in _TENSORS),
    *(({"a": one}, {"a": other}) for one, other in zip(_TENSORS[1:], _TENSORS, strict=False)),
    ({"a": _W}, {}),
    ({"a": _W}, {"a": _W, "b": _W}),
    ({"a": _W}, {"b": _W}),
    ({"a": _W, "b": _W * 2}, {"b": _W, "a": _W * 2}),
    ({"a": _W}, {"a": [_W]}),
    ({"a": [_W]}, {"a": {"0": _W}}),
    ({"a": [1, 2]}, {"a": [1, _W]}),
    ({"a": [1, _W]}, {"a": [1, 2]}),
    ({"a": [1, [2]]}, {"a": [1, [_W]]}),
    ({"a": [[_W], 5]}, {"a": [[_W], [_W]]}),
    ({"a": _W}, {"a": 1}),
    ({"a": 1}, {"a": _W}),
    ({"a": 1}, {"a": "text"}),
    ({"a": (1, 2)}, {"a": (_W, {"b": 1})}),
    ({"a": {"b": _W}}, {"a.b": _W}),
    ({"a": {"b": _W}}, {"a": OrderedDict(b=_W)}),
    ({"a": {1: _W}}, {"a": {"1": _W}}),
    ({"a": {1: _W}}, {"a": {True: _W}}),
    ({"a": {"one": _W}}, {"a": {_Name.ONE: _W}}),
    (
        {f"{number}": _W for number in range(3000)},
        {**{f"{number}": _W for number in range(2999)}, "2999": _W.double()},
    ),
]


def test_each_of_these_changes_is_in_the_next_checkpoint(places: Places) -> None:
    with places.writer(persist=False, keep_memory=2) as writer:
        for before, after in _PAIRS:
            dcp_mem.save(before, checkpoint_id="before", storage_writer=writer)
            _save_as_torch_does(places, writer, after)


@pytest.mark.parametrize("save", [dcp.save, dcp_mem.save])
@pytest.mark.parametrize("state", [{"a": {"b": 1}, "a.b": 2}, {"a": {1: 5, "1": 6}}], ids=str)
def test_two_leaves_of_one_name_are_refused(
    places: Places, save: Callable[..., object], state: State
) -> None:
    with places.writer() as writer:
        error = raised_by(lambda: save(state, checkpoint_id="step-1", storage_writer=writer))
    assert isinstance(error, ValueError)
    assert "same flattened name" in str(error)


# -- shardings -------------------------------------------------------------------------------------


def _dtensors() -> Iterator[torch.Tensor]:
    """DTensors of two ranks that differ in one thing each from the first one."""
    flat, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    named = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    local = torch.rand(4, 4) + dist.get_rank()
    for mesh, placements in (
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (named, [Shard(0)]),
        (flat, [Shard(-2)]),
        (grid, [Replicate(), Shard(0)]),
    ):
        yield DTensor.from_local(local.clone(), mesh, placements, run_check=False)
    yield DTensor.from_local(torch.ones(4, 4), flat, [Replicate()], run_check=False)
    yield DTensor.from_local(local.double(), flat, [Shard(0)], run_check=False)
    yield DTensor.from_local(local[:3].clone(), flat, [Shard(0)], run_check=False)
    yield DTensor.from_local(local.clone(), flat, [Shard(0)], run_check=False).requires_grad_()


@on_ranks(2)
def test_each_of_these_changes_of_a_dtensor_is_in_the_next_checkpoint(places: Places) -> None:
    with places.writer(persist=False, keep_memory=2) as writer:
        first, *others = _dtensors()
        for other in [*others, torch.ones(4, 4), torch.ones(8, 4), 1]:
            dcp_mem.save({"a": {"b": first}}, checkpoint_id="before", storage_writer=writer)
            _save_as_torch_does(places, writer, {"a": {"b": other}})


@on_ranks(4)
def test_a_strided_shard_lies_otherwise_than_a_plain_one(places: Places) -> None:
    """As FSDP2 makes them of a tensor that tensor parallelism has cut."""
    mesh, local = init_device_mesh("cpu", (2, 2)), torch.full((2, 3), float(dist.get_rank()))
    with places.writer(persist=False, keep_memory=2) as writer:
        for first in (Shard(0), _StridedShard(0, split_factor=2), Shard(0)):
            tensor = DTensor.from_local(local, mesh, [first, Shard(0)], run_check=False)
            _save_as_torch_does(places, writer, {"a": tensor})


def _save_changed_worlds(places: Places, seeds: Sequence[int]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with places.writer(persist=False, keep_memory=len(seeds) + 2) as writer:
        for seed in seeds:
            random = Random(seed)
            mesh_of, parts = sharding.meshes(), sharding.draw(random, world)
            for step in range(4):
                state = sharding.build(parts, rank, mesh_of, step)
                _save_as_torch_does(
                    places,
                    writer,
                    state,
                    blank=lambda parts=parts, of=mesh_of: sharding.build(parts, rank, of, 99),
                )
                parts = sharding.changed(random, parts, world)
            dcp_mem.save(_irregular(seed, rank), checkpoint_id=f"{seed}", storage_writer=writer)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "seeds"), [(2, range(4)), (4, range(4, 8))], ids=str)
def test_any_change_of_sharding_is_in_the_next_checkpoint_and_any_box_of_it_loads(
    places: Places, world: int, seeds: range
) -> None:
    forked_ranks(_save_changed_worlds, world, places, seeds, timeout=200)
    for seed in seeds:
        _assert_boxes_load(places, seed)


# -- chunks anywhere -------------------------------------------------------------------------------

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""


def _full(seed: int) -> torch.Tensor:
    random = Random(seed)
    size = [random.randint(2, 8) for _ in range(random.randint(1, 3))]
    return random_tensor(torch.float32, *size, seed=seed)


def _tiles(random: Random, offset: Sequence[int], extent: Sequence[int], depth: int = 4) -> Any:
    """Cut in two, and so on: boxes that fill the whole, but form no grid."""
    along = random.randrange(len(extent))
    if not depth or extent[along] < 2 or random.random() < 0.2:
        yield tuple(offset), tuple(extent)
        return
    cut = random.randint(1, extent[along] - 1)
    yield from _tiles(random, offset, _with(extent, along, cut), depth - 1)
    behind = _with(offset, along, offset[along] + cut)
    yield from _tiles(random, behind, _with(extent, along, extent[along] - cut), depth - 1)


def _with(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


def _holding(full: torch.Tensor, boxes: Sequence[Box]) -> Any:
    """A ShardedTensor of which this rank has these chunks, whatever others have."""
    whole = Part("whole", "cells", tuple(full.shape), full.dtype)
    cell = Cell((0,) * full.dim(), tuple(full.shape), dist.get_rank())
    tensor = sharding._sharded_tensor(replace(whole, cells=(cell,)), full, dist.get_rank())
    device = f"rank:{dist.get_rank()}/cpu"
    tensor.local_shards()[:] = [
        LocalShard(full[_slices(box)].clone(), ShardMetadata(list(box[0]), list(box[1]), device))
        for box in boxes
    ]
    return tensor


def _irregular(seed: int, rank: int) -> State:
    """A tensor in chunks that form no grid, dealt out to the ranks; some have several, or none."""
    random, full = Random(seed), _full(seed)
    boxes = list(_tiles(random, (0,) * full.dim(), full.shape))
    return {
        "a": _holding(full, [b for b in boxes if random.randrange(dist.get_world_size()) == rank])
    }


class _Boxes(dcp.DefaultLoadPlanner):
    """Asks for boxes of a tensor, as a planner does for the shards of another world size."""

    def __init__(self, boxes: Sequence[Box], targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._boxes, self._targets = boxes, targets

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        known = self.metadata.state_dict_metadata["a"]
        assert isinstance(known, TensorStorageMetadata)
        chunks = [ChunkStorageMetadata(*map(torch.Size, box)) for box in self._boxes]
        return LoadPlan(create_read_items_for_chunk_list("a", known, chunks))

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        target: torch.Tensor = self._targets[index.index]
        return target


def _assert_boxes_load(places: Places, seed: int) -> None:
    random, full = Random(seed), _full(seed)
    boxes = list(_tiles(random, (0,) * full.dim(), full.shape))
    boxes += [((0,) * full.dim(), tuple(full.shape)), ((0,) * full.dim(), (0,) * full.dim())]
    targets = [torch.zeros(extent) for _, extent in boxes]
    places.load("memory", f"{seed}", {}, planner=_Boxes(boxes, targets))
    for box, target in zip(boxes, targets, strict=True):
        assert bits(full[_slices(box)]) == bits(target), box


def _disturbed(random: Random, boxes: Sequence[Box], size: Sequence[int]) -> list[Box]:
    """Remove, move or resize one box; all stay within bounds, at places of their own."""
    number, along = random.randrange(len(boxes)), random.randrange(len(size))
    offset, extent = boxes[number]
    rest = [*boxes[:number], *boxes[number + 1 :]]
    if rest and random.random() < 0.2:
        return rest
    place = _with(offset, along, random.randint(0, size[along] - 1))
    offset = offset if place in {one for one, _ in rest} else place
    return [*rest, (offset, _with(extent, along, random.randint(1, size[along] - offset[along])))]


def _save_tilings(places: Places, seeds: Sequence[int]) -> list[tuple[int, bool, str]]:
    """Of each seed: whether its chunks fill the tensor once, and the error of the save."""
    rank, found = dist.get_rank(), []
    with places.writer(persist=False) as writer:
        for seed in seeds:
            random, full = Random(seed), _full(seed)
            boxes = list(_tiles(random, (0,) * full.dim(), full.shape))
            if random.random() < 0.7:
                boxes = _disturbed(random, boxes, full.shape)
            counts = np.zeros(full.shape, int)
            for box in boxes:
                counts[_slices(box)] += 1
            holders = [random.sample(range(2), random.randint(1, 2)) for _ in boxes]
            own = [box for box, ranks in zip(boxes, holders, strict=True) if rank in ranks]
            state = {"a": _holding(full, own)}
            error = raised_by(lambda: dcp_mem.save(state, checkpoint_id="a", storage_writer=writer))  # noqa: B023
            found.append((seed, bool((counts == 1).all()), "" if error is None else str(error)))
    return found


def test_gaps_and_overlaps_of_irregular_chunks_are_refused_and_nothing_else(
    places: Places,
) -> None:
    for found in forked_ranks(_save_tilings, 2, places, range(40)):
        assert {is_whole for _, is_whole, _ in found} == {True, False}
        for seed, is_whole, error in found:
            assert is_whole == (error == ""), (seed, error)


# -- what doesn't fit ------------------------------------------------------------------------------


def _parts(*boxes: Box, size: tuple[int, ...] = (4,)) -> Callable[[], Any]:
    return lambda: _holding(torch.zeros(size), boxes)


def _shard(box: Box, data: torch.Tensor) -> LocalShard:
    place = f"rank:{dist.get_rank()}/cpu"
    return LocalShard(data, ShardMetadata(list(box[0]), list(box[1]), place))


def _beyond(box: Box) -> Callable[[], Any]:
    def made() -> Any:
        tensor = _parts()()
        tensor.local_shards()[:] = [_shard(box, torch.zeros(box[1]))]
        return tensor

    return made


_CONTRADICTIONS: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    (_parts(((0,), (2,))), _parts(((3,), (1,))), "cover 3 of 4"),
    (_parts(((0,), (2,))), _parts(), "cover 2 of 4"),
    (_parts(((0,), (3,))), _parts(((2,), (2,))), "overlapping"),
    (_parts(((0,), (1,))), _parts(((0,), (4,))), "overlapping"),
    (
        _parts(((0, 0), (2, 2)), size=(4, 2)),
        _parts(((1, 0), (2, 2)), size=(4, 2)),
        "overlapping",
    ),
    (_parts(((0,), (2,))), _beyond(((2,), (3,))), "out of bounds"),
    (_parts(((0,), (4,)), ((0,), (4,))), _parts(), "twice"),
    (lambda: torch.zeros(4), _parts(((0,), (4,))), "sharded on one rank and not on another"),
    (lambda: "text", _parts(((0,), (4,))), "sharded on one rank and not on another"),
    (_parts(((0,), (2,))), _parts(((2,), (2,)), size=(5,)), "different sizes of the whole"),
    (_parts(((0,), (2,))), _parts(((2, 0), (2, 1)), size=(4, 1)), ""),
    (lambda: "text", lambda: torch.zeros(4), "something else on another rank"),
    (lambda: "text", lambda: torch.zeros(()), "something else on another rank"),
    (lambda: torch.zeros(4), lambda: torch.zeros(4, 1), ""),
    (lambda: torch.zeros(()), lambda: torch.zeros(1), ""),
]


def _save_contradictions(places: Places) -> list[str]:
    rank, errors = dist.get_rank(), []
    good = {"fine": torch.zeros(3), "too": "text"}
    with places.writer(persist=False) as writer:

        def error_of(state: State) -> str:
            return str(
                raised_by(lambda: dcp_mem.save(state, checkpoint_id="a", storage_writer=writer))
            )

        for one, other, _ in _CONTRADICTIONS:
            for first in (one, other):
                part = first() if rank == 0 else (other if first is one else one)()
                errors.append(error_of({**good, "a": part}))
        gaps = _parts(((0,), (2,))) if rank == 0 else _parts()
        errors.append(error_of({f"t{number:02}": gaps() for number in range(13)}))
        _save_as_torch_does(places, writer, good)
    return errors


def test_parts_that_do_not_fit_together_are_refused_by_name_on_all_ranks(places: Places) -> None:
    for errors in forked_ranks(_save_contradictions, 2, places):
        *each, many = errors
        for number, error in enumerate(each):
            message = _CONTRADICTIONS[number // 2][2]
            assert "a: " in error, (number, error)
            assert message in error, (number, error)
        assert many.count("cover 2 of 4") == 10
        assert "(and 3 more)" in many


def _save_a_part_alone(places: Places) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with places.writer(persist=False) as writer:
        state = {"a": _holding(torch.arange(4.0), [((0,), (1,)), ((3,), (1,))])}
        dcp_mem.save(state, checkpoint_id="part", storage_writer=writer)


def test_a_rank_alone_may_save_a_part(places: Places) -> None:
    forked(_save_a_part_alone, places)
    target = torch.zeros(1)
    places.load("memory", "part", {}, planner=_Boxes([((3,), (1,))], [target]))
    assert_same({"a": torch.tensor([3.0])}, {"a": target})


_VAST = 1 << 33
_FAR = ((_VAST - 3,), (3,))


def _save_in_turn(places: Places) -> None:
    """The same ShardedTensor, changed in place, and one of more elements than 32 bits count."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = _holding(torch.arange(4.0), [((0,), (1,)), ((3,), (1,))])
    shards = tensor.local_shards()
    with places.writer(persist=False, keep_memory=9) as writer:

        def save(name: str) -> None:
            dcp_mem.save({"a": tensor}, checkpoint_id=name, storage_writer=writer)

        save("first")
        shards[1].metadata.shard_offsets[0] = 2
        save("moved")
        shards[0].tensor = torch.full((1,), 7.0)
        save("replaced")
        shards.pop()
        save("shortened")
        tensor.metadata().size = torch.Size([_VAST])
        shards[:] = [_shard(_FAR, torch.tensor([5.0, 6.0, 7.0]))]
        save("vast")


def test_a_sharded_tensor_that_is_changed_in_place_is_saved_as_it_is_then(places: Places) -> None:
    forked(_save_in_turn, places)
    for name, box, expected in (
        ("first", ((3,), (1,)), [3.0]),
        ("moved", ((2,), (1,)), [3.0]),
        ("replaced", ((0,), (1,)), [7.0]),
        ("shortened", ((2,), (1,)), [0.0]),
        ("vast", _FAR, [5.0, 6.0, 7.0]),
    ):
        target = torch.zeros(box[1])
        places.load("memory", name, {}, planner=_Boxes([box], [target]))
        assert target.tolist() == expected, name


# -- how much it is --------------------------------------------------------------------------------


def _save_regularly(places: Places, name: str) -> None:
    mesh, local = init_device_mesh("cpu", (dist.get_world_size(),)), torch.zeros(2, 4)
    with places.writer(persist=False, keep_memory=9) as writer:
        state = {
            f"model.layers.{number}.weight": DTensor.from_local(local, mesh, [Shard(0)])
            for number in range(100)
        }
        dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)


def test_the_catalog_of_a_regular_job_grows_by_bytes_a_rank(places: Places) -> None:
    def nbytes(ranks: int) -> int:
        forked_ranks(_save_regularly, ranks, places, f"of-{ranks}")
        (file,) = Path(places.directory("memory", f"of-{ranks}"), ".dcp_mem").glob("catalog*")
        return file.stat().st_size

    assert nbytes(6) < nbytes(2) + 4 * 64
