"""Plans of all ranks become one, a state dict is recognised, and metadata is as torch's."""

import copy
import dataclasses
import enum
import itertools
import pickle
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_mem.format.metadata import LazyMetadata
from dcp_mem.format.names import segment_file
from dcp_mem.format.torch_names import dtype_named, layout_named
from dcp_mem.planning import dtensors
from dcp_mem.planning.contradictions import PlanInvalid
from dcp_mem.planning.joint_plan import PlanRows
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, NotDescribable
from dcp_mem.planning.state_structure import DescribedState, Structure
from tests.support.checkpoints.plans import (
    Box,
    are,
    assert_noticed,
    assert_same_content,
    is_valid,
    merge,
    metadata_of_plan,
    written,
)
from tests.support.checkpoints.worlds import (
    BYTE,
    Item,
    World,
    byte_item,
    chunks_of_a_mesh,
    path_of,
    plan_of,
    plans_of,
    random_world,
    shard_item,
    tensor_item,
)
from tests.support.variants import examples

State = dict[str, Any]

SEEDS = st.integers(0, 1 << 32)

# -- plans as torch has them -----------------------------------------------------------------------


def _torch_plan(items: Sequence[Item], more_names: Sequence[str] = ()) -> SavePlan:
    names = dict.fromkeys([*(item.name for item in items), *more_names])
    return SavePlan(
        list(map(_write_item, items)), planner_data={name: path_of(name) for name in names}
    )


def _write_item(item: Item) -> WriteItem:
    if item.properties is None:
        return WriteItem(MetadataIndex(item.name), WriteItemType.BYTE_IO)
    offset, extent = map(torch.Size, item.box)
    properties = TensorProperties(
        dtype=dtype_named(item.properties.dtype),
        layout=layout_named(item.properties.layout),
        requires_grad=item.properties.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=item.properties.pin_memory,
    )
    kind = WriteItemType.SHARD if item.kind == ItemKind.SHARD else WriteItemType.TENSOR
    data = TensorWriteData(ChunkStorageMetadata(offset, extent), properties, torch.Size(item.size))
    return WriteItem(MetadataIndex(item.name, offset), kind, tensor_data=data)


Place = tuple[str, tuple[int, ...]]


def _place_of(plan: LocalPlan | PlanRows, row: int) -> Place:
    return plan.names[plan.name[row]], tuple(plan.offset[row, : plan.dimensions[row]].tolist())


# -- who writes what -------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(SEEDS, st.integers(1, 12))
def test_every_chunk_is_written_once_by_a_rank_that_holds_it(seed: int, ranks: int) -> None:
    plans = plans_of(random_world(Random(seed), ranks))
    held = [{_place_of(plan, row): row for row in range(len(plan))} for plan in plans]
    merged = merge(plans)
    written = [_place_of(merged, row) for row in range(len(merged))]
    assert len(set(written)) == len(written)
    assert set(written) == set().union(*held)
    for place, rank, row in zip(written, merged.rank.tolist(), merged.row.tolist(), strict=True):
        assert held[rank][place] == row


@settings(max_examples=examples(150))
@given(SEEDS, st.integers(1, 12))
def test_the_metadata_is_what_torch_makes_of_the_same_plans(seed: int, ranks: int) -> None:
    random = Random(seed)
    world = random_world(random, ranks)
    # Names without an item on this rank.
    elsewhere = [[f"mesh.of.others{rank}"] * random.randint(0, 1) for rank in range(ranks)]
    everyones, theirs = zip(
        *(
            (plan_of(items, more), _torch_plan(items, more))
            for items, more in zip(world, elsewhere, strict=True)
        ),
        strict=True,
    )
    merged, ours = merge(everyones), metadata_of_plan(everyones)
    deduplicated, expected = create_default_global_save_plan(dedup_save_plans(list(theirs)))
    expected.planner_data = dict(ChainMap(*(plan.planner_data for plan in deduplicated)))
    assert is_valid(deduplicated, expected)
    assert_same_content(ours, expected)
    assert ours.storage_data.keys() == {item.index for plan in deduplicated for item in plan.items}
    for rank, plan in enumerate(everyones):
        for position, row in enumerate(written(merged, rank).tolist()):
            name, offset = _place_of(plan, row)
            is_object = plan.kind[row] == ItemKind.OBJECT
            info = ours.storage_data[MetadataIndex(name, None if is_object else torch.Size(offset))]
            assert (info.relative_path, info.offset) == (
                segment_file(rank, "0123abcd"),
                64 * position,
            )


@settings(max_examples=examples(100))
@given(SEEDS, st.integers(1, 12))
def test_replicated_bytes_are_balanced(seed: int, ranks: int) -> None:
    random = Random(seed)
    sizes = [random.randint(0, 100) for _ in range(random.randint(3, 15) * ranks)]
    merged = merge(
        plans_of(
            [[tensor_item(f"t{i}", size, properties=BYTE) for i, size in enumerate(sizes)]] * ranks
        )
    )
    loads = np.bincount(merged.rank, weights=merged.extent.prod(axis=1), minlength=ranks)
    mean, largest = sum(sizes) / ranks, max(sizes)
    assert loads.sum() == sum(sizes)
    assert loads.max() <= mean + largest
    assert loads.min() >= mean - largest


@settings(max_examples=examples(50))
@given(SEEDS, st.integers(2, 12))
def test_what_is_replicated_fills_up_the_ranks_that_hold_less_alone(seed: int, ranks: int) -> None:
    random = Random(seed)
    own = [random.randint(0, 50) for _ in range(ranks)]
    sizes = [random.randint(1, 9) for _ in range(20 * ranks)]
    shared = [tensor_item(f"t{i}", size, properties=BYTE) for i, size in enumerate(sizes)]
    merged = merge(
        plans_of([[*shared, tensor_item(f"own{r}", own[r], properties=BYTE)] for r in range(ranks)])
    )
    loads = np.bincount(merged.rank, weights=merged.extent.prod(axis=1), minlength=ranks)
    assert loads.max() <= max((sum(sizes) + sum(own)) / ranks, *own) + max(sizes)


def test_each_rank_writes_a_run_of_neighbours_of_what_its_replica_group_holds() -> None:
    replicas, shards = 3, 4
    names = [f"layer{number}" for number in range(50)]
    world = [
        [shard_item(name, (shards * 8,), (rank % shards * 8,), (8,)) for name in names]
        for rank in range(replicas * shards)
    ]
    merged = merge(plans_of(world))
    writer_of = {_place_of(merged, row): int(merged.rank[row]) for row in range(len(merged))}
    for shard in range(shards):
        writers = [writer_of[name, (shard * 8,)] for name in names]
        assert {rank % shards for rank in writers} == {shard}
        assert len(list(itertools.groupby(writers))) == len(set(writers)) == replicas


@settings(max_examples=examples(100))
@given(SEEDS, st.integers(1, 12))
def test_places_that_the_same_ranks_hold_are_dealt_out_in_runs(seed: int, ranks: int) -> None:
    plans = plans_of(random_world(Random(seed), ranks))
    merged = merge(plans)
    writer_of = {_place_of(merged, row): int(merged.rank[row]) for row in range(len(merged))}
    held_by: dict[Place, list[int]] = {}
    for rank, plan in enumerate(plans):
        for row in range(len(plan)):
            held_by.setdefault(_place_of(plan, row), []).append(rank)
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, holders in held_by.items():  # in the order of the plan of the lowest of the holders
        groups.setdefault(tuple(holders), []).append(writer_of[place])
    for of_ranks, writers in groups.items():
        assert len(list(itertools.groupby(writers))) <= len(of_ranks)


def test_the_same_plans_merge_to_the_same_and_are_left_as_they_were() -> None:
    plans = plans_of(random_world(Random(5), 6))
    before = pickle.dumps(plans)
    first, second = merge(plans), merge(pickle.loads(before))
    assert pickle.dumps(plans) == before
    for column in (
        "rank",
        "row",
        "name",
        "kind",
        "properties",
        "dimensions",
        "size",
        "offset",
        "extent",
    ):
        assert np.array_equal(getattr(first, column), getattr(second, column)), column


def test_ranks_without_items_are_fine() -> None:
    assert len(merge(plans_of([[], []]))) == 0
    nothing = metadata_of_plan(plans_of([[]]))
    assert (nothing.state_dict_metadata, nothing.planner_data, nothing.storage_data) == ({}, {}, {})
    assert merge(plans_of([[], [tensor_item("a", 3)], []])).rank.tolist() == [1]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (
            [[shard_item("a", (4,), (0,), (2,))], [shard_item("a", (4,), (3,), (1,))]],
            "cover 3 of 4",
        ),
        ([[shard_item("a", (4,), (0,), (2,))], []], "cover 2 of 4"),
        ([[shard_item("a", (4,), (0,), (3,))], [shard_item("a", (4,), (2,), (2,))]], "overlapping"),
        ([[shard_item("a", (4,), (0,), (1,))], [shard_item("a", (4,), (0,), (4,))]], "overlapping"),
        (
            [[shard_item("a", (4, 2), (0, 0), (2, 2))], [shard_item("a", (4, 2), (1, 0), (2, 2))]],
            "overlapping",
        ),
        (
            [[shard_item("a", (4,), (0,), (2,))], [shard_item("a", (4,), (2,), (3,))]],
            "out of bounds",
        ),
        (
            [[shard_item("a", (4,), (0,), (4,))], [shard_item("a", (4,), (-1,), (1,))]],
            "out of bounds",
        ),
        (
            [[shard_item("a", (4,), (0,), (5,))], [shard_item("a", (4,), (4,), (-1,))]],
            "out of bounds",
        ),
        ([[shard_item("a", (4,), (0,), (4,))] * 2], "twice"),
        ([[tensor_item("a", 4)] * 2], "twice"),
        ([[byte_item("a")] * 2], "twice"),
        (
            [[tensor_item("a", 4)], [shard_item("a", (4,), (0,), (4,))]],
            "sharded on one rank and not on another",
        ),
        (
            [[byte_item("a")], [shard_item("a", (4,), (0,), (4,))]],
            "sharded on one rank and not on another",
        ),
        (
            [[tensor_item("a", 4)], [shard_item("a", (4,), (2,), (2,))]],
            "sharded on one rank and not on another",
        ),
        (
            [[shard_item("a", (4,), (0,), (2,))], [shard_item("a", (5,), (2,), (2,))]],
            "different sizes of the whole",
        ),
    ],
)
def test_plans_that_do_not_fit_together_are_refused(world: World, message: str) -> None:
    good = [tensor_item("fine", 3), byte_item("too")]
    for order in (1, -1):
        with pytest.raises(PlanInvalid, match=f"^a: .*{message}"):
            merge(plans_of([[*good, *items] for items in world[::order]]))
    with pytest.raises(ValueError, match=message):
        merge(plans_of(world))


@pytest.mark.parametrize(
    "world",
    [
        [[byte_item("a")], [tensor_item("a", 4)]],
        [[byte_item("a")], [tensor_item("a")]],
        [[tensor_item("a", 4)], [tensor_item("a", 4, 1)]],
        [[tensor_item("a")], [tensor_item("a", 1)]],
        [[shard_item("a", (4,), (0,), (2,))], [shard_item("a", (4, 1), (2, 0), (2, 1))]],
    ],
    ids=[
        "object and tensor",
        "object and scalar",
        "1-D and 2-D",
        "scalar and 1-D",
        "1-D and 2-D shards",
    ],
)
def test_a_name_that_is_something_else_on_another_rank_is_refused(world: World) -> None:
    for order in (1, -1):
        with pytest.raises(PlanInvalid, match=r"^a: "):
            merge(plans_of(world[::order]))


def test_a_rank_alone_may_save_a_part() -> None:
    world = [[shard_item("a", (4,), (0,), (1,)), shard_item("a", (4,), (3,), (1,))]]
    assert len(merge(plans_of(world))) == 2
    with pytest.raises(PlanInvalid, match="cover 2 of 4"):
        merge(plans_of([*world, []]))


def test_ten_problems_are_named_and_the_others_counted() -> None:
    world = [[shard_item(f"t{number}", (4,), (0,), (2,)) for number in range(13)], []]
    with pytest.raises(PlanInvalid, match=r"(.*cover 2 of 4.*; ){9}.*\(and 3 more\)$"):
        merge(plans_of(world))


@settings(max_examples=examples(300))
@given(SEEDS, st.integers(1, 3))
def test_overlaps_of_random_boxes_are_found(seed: int, dimensions: int) -> None:
    random = Random(seed)
    size = tuple(random.randint(1, 6) for _ in range(dimensions))
    boxes = [_random_box(random, size) for _ in range(random.randint(1, 6))]
    expected = (_counts(size, boxes) > 1).any() or len({offset for offset, _ in boxes}) < len(boxes)
    # For one rank by itself, gaps are allowed.
    assert _refusal([[shard_item("a", size, *box) for box in boxes]]) == expected


def _random_box(random: Random, size: Sequence[int]) -> Box:
    offset = tuple(random.randrange(length) for length in size)
    extent = tuple(
        random.randint(0 if random.random() < 0.1 else 1, length - start)
        for length, start in zip(size, offset, strict=True)
    )
    return offset, extent


def _counts(size: Sequence[int], boxes: Sequence[Box]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many of the boxes have each element."""
    counts = np.zeros(size, np.int64)
    for offset, extent in boxes:
        counts[
            tuple(
                slice(start, start + length) for start, length in zip(offset, extent, strict=True)
            )
        ] += 1
    return counts


def _refusal(world: World) -> bool:
    try:
        merge(plans_of(world))
    except PlanInvalid:
        return True
    return False


@settings(max_examples=examples(300))
@given(SEEDS, st.integers(1, 3))
def test_irregular_tilings_pass_and_gaps_and_overlaps_in_them_are_found(
    seed: int, dimensions: int
) -> None:
    random = Random(seed)
    size = tuple(random.randint(2, 8) for _ in range(dimensions))
    boxes = list(_tiles(random, (0,) * dimensions, size, 4))
    if random.random() < 0.7:
        boxes = list(_disturbed(random, boxes, size))
    counts = _counts(size, boxes)
    expected = bool((counts != 1).any())
    world: World = [[] for _ in range(random.randint(2, 5))]
    for box in boxes:  # some on several ranks
        for rank in random.sample(range(len(world)), random.randint(1, 2)):
            world[rank].append(shard_item("a", size, *box))
    assert _refusal(world) == expected


def _tiles(
    random: Random, offset: Sequence[int], extent: Sequence[int], depth: int
) -> Iterator[Box]:
    """Cut in two, and so on: boxes that fill the whole, but form no grid."""
    along = random.randrange(len(extent))
    if not depth or extent[along] < 2 or random.random() < 0.2:
        yield tuple(offset), tuple(extent)
        return
    cut = random.randint(1, extent[along] - 1)
    yield from _tiles(random, offset, _with(extent, along, cut), depth - 1)
    yield from _tiles(
        random,
        _with(offset, along, offset[along] + cut),
        _with(extent, along, extent[along] - cut),
        depth - 1,
    )


def _with(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _disturbed(random: Random, boxes: Sequence[Box], size: Sequence[int]) -> Iterator[Box]:
    """Remove, move or resize one box; all stay within bounds, at places of their own."""
    chosen, along = random.randrange(len(boxes)), random.randrange(len(size))
    places = {offset for offset, _ in boxes}
    for number, (offset, extent) in enumerate(boxes):
        if number == chosen:
            place = _with(offset, along, random.randint(0, size[along] - 1))
            offset = offset if place in places else place
            extent = _with(extent, along, random.randint(1, size[along] - offset[along]))
            if random.random() < 0.2 and len(boxes) > 1:
                continue
        yield offset, extent


@settings(max_examples=examples(100))
@given(SEEDS, st.integers(2, 8))
def test_a_valid_world_that_loses_or_moves_a_chunk_is_refused(seed: int, ranks: int) -> None:
    random = Random(seed)
    size = (ranks * 2 + random.randint(0, 3), 3)
    boxes = [box for box in chunks_of_a_mesh(random, size, ranks) if all(box[1])]
    assume(len(boxes) > 1)
    chosen = random.choice(boxes)
    world: World = [[shard_item("a", size, *box)] for box in boxes]
    assert not _refusal([*world, []])
    without = [[shard_item("a", size, *box)] for box in boxes if box != chosen]
    assert _refusal([*without, []])
    offset, extent = chosen
    along = random.randrange(2)
    moved = shard_item(
        "a", size, _with(offset, along, offset[along] + random.choice([-1, 1])), extent
    )
    assert _refusal([*without, [moved]])


# -- structures of state dicts ---------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def _random_state(random: Random, depth: int = 3) -> State:
    return {
        f"{random.choice('abcxyz')}{number}": _random_value(random, depth)
        for number in range(random.randint(1, 4))
    }


def _random_value(random: Random, depth: int) -> Any:
    kinds = ["tensor", "parameter", "object", "tuple"]
    if depth:
        kinds += ["dict", "ordered", "list", "mixed list", "nested list", "int keys"]
    kind = random.choice(kinds)
    if kind == "tensor":
        return _random_tensor(random)
    if kind == "parameter":
        return torch.nn.Parameter(torch.zeros(random.randint(0, 3), 2))
    if kind == "object":
        return random.choice([1, 2.5, "text", None, True, [1, 2], [], [[3], "x"], slice(3), {1, 2}])
    if kind == "tuple":
        return (1, _random_tensor(random), [2])
    if kind == "list":
        return [_random_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    if kind == "mixed list":
        return [3, _random_tensor(random), "x", _random_value(random, depth - 1)]
    if kind == "nested list":
        return [[[_random_tensor(random)], 1], [2, 3]]
    if kind == "int keys":
        return {number: _random_value(random, depth - 1) for number in range(random.randint(0, 3))}
    inner = _random_state(random, depth - 1)
    return OrderedDict(inner) if kind == "ordered" else inner


def _random_tensor(random: Random) -> torch.Tensor:
    shape = [random.randint(0, 3) for _ in range(random.randint(0, 3))]
    return torch.zeros(shape, dtype=random.choice(DTYPES))


def _renewed(value: Any) -> Any:
    """Copy the structure with new objects: other addresses, other values, other byte items."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach() + 1)
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return type(value)((key, _renewed(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_renewed, value))
    if isinstance(value, (bool, int, float)):
        return value + 1 if type(value) is not bool else not value
    if isinstance(value, str):
        return value * 100
    return copy.deepcopy(value)


@settings(max_examples=examples(200))
@given(SEEDS)
def test_names_paths_and_leaves_are_those_of_torch(seed: int) -> None:
    state = _random_state(Random(seed))
    flat, mapping = flatten_state_dict(state)
    structure = Structure(state)
    assert list(structure.plan.names) == list(flat)
    assert dict(zip(structure.plan.names, structure.plan.paths, strict=True)) == mapping
    assert [list(map(type, path)) for path in structure.plan.paths] == [
        list(map(type, path)) for path in mapping.values()
    ]
    assert are(DescribedState(state).leaves, list(flat.values()))
    _, expected = create_default_global_save_plan(
        [create_default_local_save_plan(flat, is_coordinator=True)]
    )
    expected.planner_data = mapping
    assert_same_content(metadata_of_plan([structure.plan]), expected)


@settings(max_examples=examples(200))
@given(SEEDS)
def test_the_same_structure_of_other_objects_is_recognised(seed: int) -> None:
    state = _random_state(Random(seed))
    structure = Structure(state)
    assert are(structure.recognise(state), DescribedState(state).leaves)
    renewed = _renewed(state)
    assert are(structure.recognise(renewed), list(flatten_state_dict(renewed)[0].values()))
    assert Structure(renewed).plan.is_same(structure.plan)


@settings(max_examples=examples(500))
@given(SEEDS)
def test_every_change_of_structure_is_noticed(seed: int) -> None:
    random = Random(seed)
    state = _random_state(random)
    structure = Structure(state)
    changed = _renewed(state) if random.random() < 0.5 else _rebuilt(state)
    assert_noticed(structure, _mutate(random, changed))


def _rebuilt(value: Any) -> Any:
    """The same leaves in containers of their own."""
    if isinstance(value, dict):
        return type(value)((key, _rebuilt(inner)) for key, inner in value.items())
    return list(map(_rebuilt, value)) if isinstance(value, list) else value


def _mutate(random: Random, state: State) -> State:
    """Change one entry of one container, or their order."""
    containers = list(_containers(state))
    container = random.choice(containers)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    key = random.choice(keys) if keys else None
    action = random.choice(["remove", "add", "rename", "reorder", "replace", "replace", "replace"])
    if key is None or action == "add":
        if isinstance(container, list):
            container.insert(
                random.randint(0, len(container)),
                random.choice([5, torch.zeros(2), {}, [torch.zeros(1)]]),
            )
        else:
            container["new"] = random.choice([5, torch.zeros(2), {}, [torch.zeros(1)]])
    elif action == "remove":
        del container[key]
    elif action == "replace":
        container[key] = random.choice(_others(container[key]))()
    elif isinstance(container, dict):
        entries = [
            (f"{each}'" if each == key and action == "rename" else each, value)
            for each, value in container.items()
        ]
        if action == "reorder":
            random.shuffle(entries)
        container.clear()
        container.update(entries)
    else:
        random.shuffle(container)
    return state


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _others(value: Any) -> list[Callable[[], Any]]:
    """Ways to make something of another structure of a value (for some values, of the same one)."""
    result: list[Callable[[], Any]] = [
        lambda: {"x": value},
        lambda: [value],
        lambda: [value, torch.zeros(1)],
        lambda: (value,),
        lambda: torch.zeros(7),
        lambda: 5,
        lambda: [5],
        dict,
    ]
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        result += [
            lambda: torch.zeros(plain.shape, dtype=torch.float64),
            lambda: plain.unsqueeze(0),
            lambda: plain.reshape(-1),
            lambda: torch.zeros(*plain.shape, 2, dtype=plain.dtype),
            lambda: torch.zeros(plain.shape).requires_grad_(not value.requires_grad),
            lambda: plain.to_sparse() if plain.dim() else plain,
        ]
    if isinstance(value, dict):
        result += [
            lambda: list(value.values()),
            lambda: OrderedDict(value),
            lambda: tuple(value.values()),
        ]
    if isinstance(value, list):
        result += [
            lambda: dict(enumerate(value)),
            lambda: [*value, torch.zeros(2)],
            lambda: [*value[:-1], torch.zeros(2)],
            lambda: [*value[:-1], {}],
            lambda: tuple(value),
        ]
    return result


W = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": W}, {}),
        ({"a": W}, {"a": W, "b": W}),
        ({"a": W}, {"b": W}),
        ({"a": W, "b": W}, {"b": W, "a": W}),
        ({"a": W}, {"a": W.double()}),
        ({"a": W}, {"a": W.t()}),
        ({"a": W}, {"a": W.clone().requires_grad_()}),
        ({"a": W}, {"a": [W]}),
        ({"a": [W]}, {"a": W}),
        ({"a": [W]}, {"a": {"0": W}}),
        ({"a": [1, 2]}, {"a": [1, W]}),
        ({"a": [1, 2]}, {"a": [1, {}]}),
        ({"a": [1, [2]]}, {"a": [1, [W]]}),
        ({"a": [1, W]}, {"a": [1, 2]}),
        ({"a": W}, {"a": 1}),
        ({"a": 1}, {"a": W}),
        ({"a": 1}, {"a": {}}),
        ({"a": {}}, {"a": 1}),
        ({"a": {"b": W}}, {"a.b": W}),
        ({"a": [[W], 5]}, {"a": [[W], [W]]}),
    ],
)
def test_this_change_is_noticed(before: State, after: State) -> None:
    structure = Structure(before)
    assert structure.recognise(after) is None
    assert not Structure(after).plan.is_same(structure.plan)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": (1, 2)}, {"a": (W, {"b": 1})}),
        ({"a": 1}, {"a": "text"}),
        ({"a": W}, {"a": torch.nn.Parameter(W, requires_grad=False)}),
        ({"a": {"b": W}}, {"a": OrderedDict(b=W)}),
        ({"a": {1: W}}, {"a": {"1": W}}),
    ],
)
def test_what_makes_no_difference_to_the_plan_gets_the_same_plan(
    before: State, after: State
) -> None:
    assert Structure(after).plan.is_same(Structure(before).plan)
    assert_noticed(Structure(before), after)


class _Name(str, enum.Enum):
    ONE = "one"


@pytest.mark.parametrize(
    ("before", "after"),
    [({1: W}, {True: W}), ({1: W}, {1.0: W}), ({"one": W}, {_Name.ONE: W})],
    ids=["int and bool", "int and float", "str and enum"],
)
def test_keys_that_are_equal_but_named_otherwise_are_noticed(before: Any, after: Any) -> None:
    assert list(before) == list(after)
    structure = Structure({"outer": before})
    assert not Structure({"outer": after}).plan.is_same(structure.plan)
    assert structure.recognise({"outer": after}) is None


def test_a_tensor_of_another_layout_is_noticed() -> None:
    structure = Structure({"a": torch.eye(3)})
    sparse = {"a": torch.eye(3).to_sparse()}
    assert not Structure(sparse).plan.is_same(structure.plan)
    assert structure.recognise(sparse) is None


def test_two_leaves_of_one_name_are_refused() -> None:
    for state in ({"a": {"b": 1}, "a.b": 2}, {"a": {1: W, "1": W}}):
        with pytest.raises(ValueError, match="same flattened name"):
            Structure(state)
        with pytest.raises(ValueError, match="duplicated"):
            flatten_state_dict(state)


class _Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_is_left_to_torch() -> None:
    with pytest.raises(NotDescribable, match="_Subclass"):
        Structure({"a": {"b": torch.zeros(3).as_subclass(_Subclass)}})
    assert (
        Structure({"a": torch.zeros(3)}).recognise({"a": torch.zeros(3).as_subclass(_Subclass)})
        is None
    )


def test_a_structure_holds_none_of_the_tensors() -> None:
    tensor = torch.zeros(3)
    references = _references(tensor)
    structure = Structure({"a": tensor, "b": [tensor]})
    assert structure.recognise({"a": tensor, "b": [tensor]}) is not None
    assert _references(tensor) == references


def _references(tensor: torch.Tensor) -> int:
    import gc

    return len(gc.get_referrers(tensor))


# -- metadata that is rendered on demand -----------------------------------------------------------


def _rendered() -> tuple[LazyMetadata, list[int]]:
    """Of one tensor and one byte item; and how often it was made."""
    calls: list[int] = []

    def make() -> Metadata:
        calls.append(1)
        return metadata_of_plan([plan_of([tensor_item("a.b", 2, 3), byte_item("c")])])

    return LazyMetadata(make), calls


def test_lazy_metadata_is_made_once_when_it_is_looked_at() -> None:
    rendered, calls = _rendered()
    assert isinstance(rendered, Metadata)
    assert not calls
    assert rendered.state_dict_metadata.keys() == {"a.b", "c"}
    assert rendered.state_dict_metadata["c"] == BytesStorageMetadata()
    assert rendered.planner_data == {"a.b": ("a", "b"), "c": ("c",)}
    assert rendered.storage_data[MetadataIndex("a.b", (0, 0))].length == 9
    assert rendered.storage_meta is not None
    assert rendered.storage_meta.save_id == "0123abcd"
    assert calls == [1]


def test_lazy_metadata_equals_and_pickles_as_what_it_stands_for() -> None:
    rendered, other = _rendered()[0], _rendered()[0]
    plain = pickle.loads(pickle.dumps(rendered))
    assert type(plain) is Metadata
    assert rendered == plain
    assert plain == rendered
    assert rendered == other
    assert not rendered != plain  # noqa: SIM202 - both operators
    assert rendered != Metadata({})
    assert Metadata({}) != rendered
    assert rendered != 5
    assert repr(rendered) == repr(plain)
    assert copy.deepcopy(rendered) == plain
    with pytest.raises(TypeError):
        hash(rendered)


def test_lazy_metadata_can_be_written_to() -> None:
    rendered, _ = _rendered()
    rendered.planner_data = {"x": ("x",)}
    rendered.state_dict_metadata["d"] = BytesStorageMetadata()
    assert rendered.planner_data == {"x": ("x",)}
    plain = pickle.loads(pickle.dumps(rendered))
    assert plain.planner_data == {"x": ("x",)}
    assert plain.state_dict_metadata.keys() == {"a.b", "c", "d"}
    assert rendered != _rendered()[0]


def test_lazy_metadata_can_be_replaced_in_part() -> None:
    rendered, _ = _rendered()
    replaced = dataclasses.replace(rendered, planner_data=None)
    assert replaced.planner_data is None
    assert replaced.state_dict_metadata == rendered.state_dict_metadata
    assert replaced.storage_data == rendered.storage_data


def test_a_strided_shard_lies_otherwise_than_a_plain_one() -> None:
    assert dtensors.are_alike((Shard(0), Replicate()), (Shard(0), Replicate()))
    assert not dtensors.are_alike((Shard(0),), (Shard(1),))
    assert not dtensors.are_alike((Shard(0),), (_StridedShard(0, split_factor=2),))
    assert not dtensors.are_alike((_StridedShard(0, split_factor=2),), (Shard(0),))
