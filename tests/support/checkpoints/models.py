"""Sharded state of every kind, and small models in each kind of parallelism."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.checkpoints.roundtrip import ROADS, Places, State, comes_back, random_tensor

SHAPES = {
    "even": (8, 6),
    "uneven": (7, 5),
    "fewer rows than ranks": (1, 9),
    "tall": (33,),
    "empty": (0, 4),
    "cube": (5, 4, 3),
    "many": (64, 64),
}
DTYPES = {"tall": torch.bfloat16, "cube": torch.complex64, "uneven": torch.float8_e4m3fn}


def full_tensor(name: str) -> torch.Tensor:
    """The values of a tensor, whatever world saves or loads it."""
    return random_tensor(DTYPES.get(name, torch.float32), *SHAPES[name], seed=len(name))


def _meshes() -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    """Ways to shard that this world allows."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    ways: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
        "replicated": (flat, [Replicate()]),
    }
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        ways |= {
            "grid": (grid, [Shard(0), Shard(1)]),
            "grid of rows": (grid, [Shard(0), Shard(0)]),
            "hybrid": (grid, [Replicate(), Shard(0)]),
            "hybrid columns": (grid, [Shard(1), Replicate()]),
        }
    return ways


def rows_of_five(rows: int, first: float = 0.0) -> DTensor:
    """Rows of five, sharded over all ranks, without communication."""
    world, rank = dist.get_world_size(), dist.get_rank()
    full = torch.arange(rows * 5.0).view(rows, 5) + first
    chunks = full.chunk(world)
    local = chunks[rank] if rank < len(chunks) else full[:0]
    mesh = init_device_mesh("cpu", (world,))
    return DTensor.from_local(
        local.clone(), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )


def unsharded_items() -> State:
    """What a state has beside its sharded tensors, alike on all ranks."""
    return {"step": 3, "replicated": torch.arange(100.0), "nested": {"lr": 0.5}}


def sharded_state_comes_back(places: Places, name: str, roads: Sequence[str] = ROADS) -> None:
    """Assert that what `sharded_state` was, under this name, comes back as this world shards it."""
    comes_back(
        places,
        name,
        sharded_state(full_tensor, name),
        blank=partial(sharded_state, zero_tensor, name),
        roads=roads,
    )


def sharded_state(fill: Callable[[str], torch.Tensor], prefix: str) -> State:
    """Every shape sharded in one way after the other, under names that don't tell which."""
    ways = list(_meshes().values())
    state: State = {}
    for position in range(8):
        for offset, name in enumerate(SHAPES):
            mesh, placements = ways[(position + offset) % len(ways)]
            if len(SHAPES[name]) == 1 and any(
                isinstance(each, Shard) and each.dim == 1 for each in placements
            ):
                placements = [Shard(0) if isinstance(each, Shard) else each for each in placements]
            state[f"{prefix}.{position}.{name}"] = _distribute(fill(name), mesh, placements)
    return state


def _distribute(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    # Without communication: gloo has no collectives for some dtypes.
    sharded = distribute_tensor(torch.zeros(full.shape), mesh, placements)
    local = full
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for placement, size, place in zip(placements, mesh.shape, coordinates, strict=True):
        if isinstance(placement, Shard):
            chunks = torch.chunk(local, size, placement.dim)
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[place] if place < len(chunks) else empty
    assert local.shape == sharded.to_local().shape
    return DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=torch.empty(full.shape).stride(),
    )


def zero_tensor(name: str) -> torch.Tensor:
    return torch.zeros(SHAPES[name], dtype=DTYPES.get(name, torch.float32))


def unsharded_state(prefix: str, fill: Callable[[str], torch.Tensor]) -> State:
    """The same state without any sharding."""
    return {f"{prefix}.{position}.{name}": fill(name) for position in range(8) for name in SHAPES}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x + self.down(torch.relu(self.up(x))))
        return result


def build_model(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(_Block(9), _Block(9), nn.Linear(9, 5))
    world = dist.get_world_size()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
        for block in list(model)[:2]:
            parallelize_module(
                block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        mesh = grid["shard"]
    for block in list(model)[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(1000 + step)
        if hasattr(torch.cpu.Stream, "record_event"):
            model(torch.randn(4, 9)).square().sum().backward()
        else:  # torch 2.6 runs fully_shard's forward on accelerators only
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 0.1 + step
        optimizer.step()
        optimizer.zero_grad()


def model_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> State:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step}
