"""Random worlds: what each rank of a job has in its state dict."""

import dataclasses
import itertools
from collections.abc import Sequence
from random import Random

import torch

from dcp_mem.format.catalog import Path, Properties
from dcp_mem.format.torch_names import properties
from dcp_mem.planning.plan_columns import ItemKind, ItemRow, LocalPlan, local_plan
from tests.support.checkpoints.plans import Box

FLOAT = properties(torch.float32, torch.strided, requires_grad=False, pin_memory=False)
HALF = properties(torch.bfloat16, torch.strided, requires_grad=True, pin_memory=False)
BYTE = properties(torch.uint8, torch.strided, requires_grad=False, pin_memory=True)


@dataclasses.dataclass(frozen=True)
class Item:
    """What a rank has under a name. size: of the whole; () and an empty box for byte items."""

    name: str
    kind: ItemKind
    properties: Properties | None = None
    size: tuple[int, ...] = ()
    box: Box = ((), ())


World = list[list[Item]]
"""Items of each rank, in its order."""


def byte_item(name: str) -> Item:
    return Item(name, ItemKind.OBJECT)


def tensor_item(name: str, *size: int, properties: Properties = FLOAT) -> Item:
    return Item(name, ItemKind.TENSOR, properties, size, ((0,) * len(size), size))


def shard_item(
    name: str, size: Sequence[int], offset: Sequence[int], extent: Sequence[int]
) -> Item:
    return Item(name, ItemKind.SHARD, FLOAT, tuple(size), (tuple(offset), tuple(extent)))


def path_of(name: str) -> Path:
    return tuple(name.split("."))


def plan_of(items: Sequence[Item], more_names: Sequence[str] = ()) -> LocalPlan:
    names = list(dict.fromkeys([*(item.name for item in items), *more_names]))
    rows = [
        ItemRow(names.index(item.name), item.kind, item.properties, (item.size, *item.box))
        for item in items
    ]
    return local_plan(names, [path_of(name) for name in names], rows)


def plans_of(world: World) -> list[LocalPlan]:
    return [plan_of(items) for items in world]


def random_world(random: Random, ranks: int) -> World:
    """Draw valid plans: replicated tensors and byte items, and shards of 1 to 3 dimensions."""
    world: World = [[] for _ in range(ranks)]
    for number in range(random.randint(1, 12)):
        name = f"part{number % 3}.layer{number}"
        kind = random.choice(["object", "whole", "grid", "hybrid", "uneven"])
        properties = random.choice([FLOAT, HALF, BYTE])
        size = tuple(random.randint(0, 9) for _ in range(random.randint(1, 3)))
        if kind in ("object", "whole"):
            scalar = random.random() < 0.2
            item = (
                byte_item(name)
                if kind == "object"
                else tensor_item(name, *(() if scalar else size), properties=properties)
            )
            for rank in random.sample(
                range(ranks), random.choice([ranks, random.randint(1, ranks)])
            ):
                world[rank].append(item)
            continue
        boxes = _grid(random, size) if kind == "grid" else chunks_of_a_mesh(random, size, ranks)
        shards = [Item(name, ItemKind.SHARD, properties, size, box) for box in boxes]
        if kind == "grid":
            for shard in shards:
                for rank in random.sample(range(ranks), random.randint(1, ranks)):
                    world[rank].append(shard)
        else:
            for rank in range(ranks):
                shard = shards[rank % len(shards)]
                if shard not in world[rank]:
                    world[rank].append(shard)
    if random.random() < 0.3:
        for items in world:
            random.shuffle(items)
    return world


def _grid(random: Random, size: Sequence[int]) -> list[Box]:
    """Cells between random cuts, all of them non-empty, unless the tensor is empty."""
    sides = []
    for length in size:
        cuts = (
            sorted(random.sample(range(1, length), random.randint(0, min(2, length - 1))))
            if length > 1
            else []
        )
        sides.append(list(itertools.pairwise([0, *cuts, length])))
    return [_box(cell) for cell in itertools.product(*sides)]


def chunks_of_a_mesh(random: Random, size: Sequence[int], ranks: int) -> list[Box]:
    """Chunk as DTensor does: sizes are rounded up; the last may be smaller, or empty."""
    parts = [1] * len(size)
    for dimension in random.sample(range(len(size)), len(size)):
        parts[dimension] = random.choice(
            [each for each in (1, 2, 3, 4, 6, 12) if ranks % each == 0]
        )
        ranks //= parts[dimension]
    sides = []
    for length, count in zip(size, parts, strict=True):
        step = max(-(-length // count), 1)
        sides.append(
            [(min(each * step, length), min((each + 1) * step, length)) for each in range(count)]
        )
    return [_box(cell) for cell in itertools.product(*sides)]


def _box(cell: Sequence[tuple[int, int]]) -> Box:
    return tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)


def regular_world(random: Random, ranks: int) -> World:
    """Draw valid plans as large jobs have them: many layers alike, on stages of several replicas.

    Between the layers lie replicated tensors, byte items, and what a rank has alone.
    """
    stages = random.choice([each for each in (1, 2, 3) if ranks % each == 0])
    of_stage = ranks // stages
    replicas = random.choice([each for each in (1, 2, 3, 4) if of_stage % each == 0])
    shapes = [
        tuple(random.randint(0, 9) for _ in range(random.randint(1, 2)))
        for _ in range(random.randint(1, 3))
    ]
    boxes = [chunks_of_a_mesh(random, shape, of_stage // replicas) for shape in shapes]
    kinds = [random.choice([FLOAT, HALF, BYTE]) for _ in shapes]
    scattered = random.random() < 0.5
    world: World = [[] for _ in range(ranks)]
    for number in range(random.randint(1, 6)):
        for stage in range(stages):
            for rank in range(stage * of_stage, (stage + 1) * of_stage):
                layer = f"layer{number if stages == 1 else number * stages + stage}"
                for part, (shape, cells) in enumerate(zip(shapes, boxes, strict=True)):
                    # Neighbours are replicas of each other, or they hold neighbouring chunks.
                    place = rank - stage * of_stage
                    index = place // replicas if scattered else place % max(of_stage // replicas, 1)
                    item = Item(
                        f"{layer}.p{part}",
                        ItemKind.SHARD,
                        kinds[part],
                        shape,
                        cells[index % len(cells)],
                    )
                    world[rank].append(item)
                world[rank].append(tensor_item(f"{layer}.step"))
                if random.random() < 0.1:
                    world[rank].append(byte_item(f"alone.{number}.of{rank}"))
    for items in world:
        items.append(byte_item("epoch"))
        items.append(tensor_item("buffer", 5))
    return world


def wrong_world(random: Random, world: World) -> World:
    """Return a world with a few items changed, which mostly contradict the others then."""
    changed = [list(items) for items in world]
    for _ in range(random.randint(1, 3)):
        items = random.choice([items for items in changed if items])
        index = random.randrange(len(items))
        item = items[index]
        offset, extent = item.box
        if not offset or random.random() < 0.3:
            items[index : index + 1] = random.choice([[], [item, item], [byte_item(item.name)]])
            continue
        side = random.randrange(len(offset))
        step = random.choice([-1, 1, 2])
        moved, grown, size = list(offset), list(extent), list(item.size)
        random.choice([moved, grown, size])[side] += step
        kind = random.choice([ItemKind.SHARD, item.kind])
        items[index] = Item(
            item.name, kind, item.properties, tuple(size), (tuple(moved), tuple(grown))
        )
    return changed
