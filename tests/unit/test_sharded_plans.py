"""Random worlds with DTensors and ShardedTensors: planned as by torch, recognised until changed.

One process plays all ranks of a world, one after the other, in torch's fake process group.
"""

import contextlib
import math
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_mem.planning.dtensors import local_chunk
from dcp_mem.planning.joint_plan import PlanRows
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, NotDescribable
from dcp_mem.planning.state_structure import Structure
from tests.support.checkpoints import sharding
from tests.support.checkpoints.plans import (
    assert_noticed,
    assert_same_content,
    is_valid,
    merge,
    metadata_of_plan,
)
from tests.support.checkpoints.roundtrip import State
from tests.support.checkpoints.sharding import Cell, Part
from tests.support.processes.forks import forked

WORLDS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class _Played:
    """What one rank has described, and what torch's planner says of the same state dict."""

    structure: Structure
    items: SavePlan


@contextlib.contextmanager
def _rank_of(world: int, rank: int) -> Iterator[None]:
    """Be one rank of a world, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _play(state: State, rank: int) -> _Played:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, rank == 0)
    return _Played(Structure(state), planner.create_local_plan())


def _indexes(plan: LocalPlan | PlanRows) -> list[MetadataIndex]:
    return [
        MetadataIndex(
            plan.names[name],
            None
            if kind == ItemKind.OBJECT
            else torch.Size(offset[: plan.dimensions[row]].tolist()),
        )
        for row, (name, kind, offset) in enumerate(
            zip(plan.name.tolist(), plan.kind, plan.offset, strict=True)
        )
    ]


def _plan_worlds(seeds: list[int]) -> Counter[str]:
    """Plan a random world for each seed; count what occurred, to show that worlds vary."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        random = Random(seed)
        world = random.choice(WORLDS)
        parts, played = sharding.draw(random, world), []
        for rank in range(world):
            with _rank_of(world, rank):
                played.append(_play(sharding.build(parts, rank, sharding.meshes()), rank))
        try:
            _assert_planned_as_torch_does(played)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {parts}") from error
        seen += Counter(_kinds_of(parts, world))
    return seen


def _assert_planned_as_torch_does(played: list[_Played]) -> None:
    deduplicated, expected = create_default_global_save_plan(
        dedup_save_plans([one.items for one in played])
    )
    expected.planner_data = dict(ChainMap(*(plan.planner_data for plan in deduplicated)))
    plans = [one.structure.plan for one in played]
    assert is_valid(deduplicated, expected)
    for one in played:
        assert _indexes(one.structure.plan) == [item.index for item in one.items.items]
    held = {item.index for one in played for item in one.items.items}
    written = _indexes(merge(plans))
    assert len(written) == len(set(written))
    assert set(written) == held
    assert_same_content(metadata_of_plan(plans), expected)


def _kinds_of(parts: list[Part], world: int) -> Iterator[str]:
    for part in parts:
        if part.kind == "mesh" and world > 1:
            yield f"mesh of {sum(side > 1 for side in part.mesh)} dimensions"
            if None in part.placements and len(set(part.placements)) > 1:
                yield "hybrid"
        if part.kind == "cells":
            count = Counter(cell.rank for cell in part.cells)
            yield from (
                name
                for name, is_so in [
                    ("several", max(count.values()) > 1),
                    ("none", len(count) < world),
                ]
                if is_so
            )


def test_any_world_is_planned_as_torch_does_and_every_chunk_written_once() -> None:
    seen = forked(_plan_worlds, list(range(30)))
    dull = {f"mesh of {count} dimensions" for count in (1, 2, 3)} | {"hybrid", "several", "none"}
    assert not [kind for kind in dull if seen[kind] < 3]


def _compare_chunks(seeds: list[int]) -> Counter[bool]:
    """Compare chunks with torch's in random worlds; count the empty ones."""
    seen: Counter[bool] = Counter()
    for seed in seeds:
        random = Random(seed)
        sides = [random.choice((1, 2, 3, 4)) for _ in range(random.choice((1, 2, 3)))]
        world = math.prod(sides)
        for rank in range(world):
            with _rank_of(world, rank):
                mesh = DeviceMesh("cpu", torch.arange(world).view(sides))
                for _ in range(4):
                    shape = torch.Size(random.choice((0, 1, 2, 5, 7, 12)) for _ in range(3))
                    placements = tuple(
                        random.choice((Shard(0), Shard(1), Shard(2), Replicate())) for _ in sides
                    )
                    expected = compute_local_shape_and_global_offset(shape, mesh, placements)
                    found = local_chunk(shape, mesh, placements)
                    assert found == tuple(map(tuple, expected)), (seed, rank, shape, placements)
                    seen[0 in found[0]] += 1
    return seen


def test_chunks_are_those_that_torch_computes() -> None:
    seen = forked(_compare_chunks, list(range(30)))
    assert min(seen[True], seen[False]) > 100


def _change_worlds(seeds: list[int]) -> Counter[bool]:
    """Change an entry of each world, and look on one rank; count how often it was recognised."""
    recognised: Counter[bool] = Counter()
    for seed in seeds:
        random = Random(seed)
        world = random.choice(WORLDS)
        rank = random.randrange(world)
        parts = sharding.draw(random, world)
        with _rank_of(world, rank):
            mesh_of = sharding.meshes()
            structure = Structure(sharding.build(parts, rank, mesh_of))
            for number in range(5):
                again = sharding.build(
                    parts, rank, random.choice([mesh_of, sharding.meshes()]), seed=number
                )
                assert structure.recognise(again) is not None, seed
                changed = sharding.changed(random, parts, world)
                state = sharding.build(changed, rank, mesh_of, seed=number)
                try:
                    assert_noticed(structure, state)
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}: {parts} -> {changed}") from error
                recognised[structure.recognise(state) is not None] += 1
    return recognised


def test_every_change_of_sharding_is_noticed() -> None:
    recognised = forked(_change_worlds, list(range(40)))
    assert recognised[False] > 80
    assert recognised[True] > 5  # changes of what another rank has, say


# -- ShardedTensors --------------------------------------------------------------------------------

ROWS = (Cell((0, 0), (2, 3), 0), Cell((2, 0), (2, 3), 1), Cell((4, 0), (1, 3), 0))
TABLE = Part("table", "cells", (5, 3), torch.float32, cells=ROWS)
CHANGES = {
    "size": replace(TABLE, size=(6, 3), cells=(*ROWS, Cell((5, 0), (1, 3), 1))),
    "dtype": replace(TABLE, dtype=torch.float64),
    "fewer local shards": replace(TABLE, cells=(*ROWS[:2], replace(ROWS[2], rank=1))),
    "more local shards": replace(TABLE, cells=(ROWS[0], replace(ROWS[1], rank=0), ROWS[2])),
    "offset": replace(TABLE, cells=(ROWS[0], Cell((2, 0), (1, 3), 0), Cell((3, 0), (2, 3), 1))),
    "extent": replace(TABLE, cells=(Cell((0, 0), (1, 3), 0), Cell((1, 0), (3, 3), 1), ROWS[2])),
    "order": replace(TABLE, cells=ROWS[::-1]),
    "requires_grad": replace(TABLE, requires_grad=True),
    "a plain tensor": replace(TABLE, kind="whole"),
    "a DTensor": replace(TABLE, kind="mesh", mesh=(2,), placements=(0,)),
}


def _change_sharded_tensors() -> list[str]:
    """Names of the changes that weren't noticed."""
    missed = []
    with _rank_of(2, 0):
        mesh_of = sharding.meshes()
        structure = Structure(sharding.build([TABLE], 0, mesh_of))
        assert structure.plan.offset.tolist()[-2:] == [[0, 0], [4, 0]]
        assert structure.recognise(sharding.build([TABLE], 0, mesh_of, seed=1)) is not None
        for name, part in CHANGES.items():
            state = sharding.build([part], 0, mesh_of)
            if structure.recognise(state) is not None or Structure(state).plan.is_same(
                structure.plan
            ):
                missed.append(name)
    return missed


def test_every_change_of_a_sharded_tensor_is_noticed() -> None:
    assert forked(_change_sharded_tensors) == []


def _change_in_place() -> list[str]:
    """Names of the changes to the very same ShardedTensor that weren't noticed."""

    def shorten(table: ShardedTensor) -> None:
        table.local_shards().pop()

    def move(table: ShardedTensor) -> None:
        table.local_shards()[1].metadata.shard_offsets[0] = 3

    def replace_tensor(table: ShardedTensor) -> None:
        table.local_shards()[0].tensor = torch.zeros(2, 3, dtype=torch.float16)

    def resize(table: ShardedTensor) -> None:
        table.local_shards()[0].tensor.resize_(1, 3)

    changes: list[Callable[[ShardedTensor], None]] = [shorten, move, replace_tensor, resize]
    missed = []
    with _rank_of(2, 0):
        for change in changes:
            state = sharding.build([TABLE], 0, sharding.meshes())
            structure = Structure(state)
            assert structure.recognise(state) is not None
            change(state["group0"]["table"])
            if structure.recognise(state) is not None:
                missed.append(change.__name__)
    return missed


def test_a_sharded_tensor_that_is_changed_in_place_is_noticed() -> None:
    assert forked(_change_in_place) == []


def _describe_odd_ones() -> dict[str, str]:
    """Why each can't be described, by its name."""
    why = {}
    with _rank_of(2, 0):

        def table() -> Any:
            return sharding.build([TABLE], 0, sharding.meshes())["group0"]["table"]

        nested, strided, other_dtype, subclass = table(), table(), table(), table()
        nested.local_shards()[0] = LocalShard(table(), ShardMetadata([0, 0], [5, 3], "rank:0/cpu"))
        strided.metadata().tensor_properties.memory_format = torch.channels_last
        other_dtype.local_shards()[0].tensor = torch.zeros(2, 3, dtype=torch.float16)
        subclass.local_shards()[0].tensor = torch.zeros(2, 3).as_subclass(_Subclass)
        odd = {
            "nested": nested,
            "strided": strided,
            "other dtype": other_dtype,
            "subclass": subclass,
        }
        for name, one in odd.items():
            with pytest.raises(NotDescribable) as raised:
                Structure({"table": one})
            why[name] = str(raised.value)
    return why


class _Subclass(torch.Tensor):
    pass


def test_what_only_torch_can_plan_of_sharded_tensors_is_left_to_it() -> None:
    assert forked(_describe_odd_ones) == {
        "nested": "a ShardedTensor of ShardedTensor",
        "strided": "a ShardedTensor in torch.channels_last",
        "other dtype": "a ShardedTensor whose local shard isn't what its metadata says",
        "subclass": "a ShardedTensor of _Subclass",
    }
