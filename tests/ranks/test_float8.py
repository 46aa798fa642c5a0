"""Tensors of eight and four bits come back to the bit, by every way to save, shard and export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_mem
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.plans import save_by
from tests.support.checkpoints.roundtrip import Places, assert_same, comes_back, other_bytes
from tests.support.command import command
from tests.support.processes.forks import forked_ranks, on_ranks

pytestmark = pytest.mark.timeout(180)

_NAMES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
KINDS = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
_ROWS, _COLUMNS = 12, 22


def _bytes(number: int) -> torch.Tensor:
    """All 256 bytes, NaN and infinities of every format among them, beginning elsewhere."""
    return (torch.arange(_ROWS * _COLUMNS) + number).to(torch.uint8).view(_ROWS, _COLUMNS)


def _state(number: int) -> dict[str, Any]:
    """Whole tensors of each kind: contiguous, transposed, a part of another, empty, one value."""
    state: dict[str, Any] = {}
    for name, kind in KINDS.items():
        values = _bytes(number).view(kind)
        wider = torch.cat([_bytes(number), _bytes(number + 1)], 1).view(kind)
        state[name] = {
            "whole": values,
            "turned": _bytes(number).t().contiguous().view(kind).t(),
            "part": wider[:, 3:17],
            "empty": torch.empty(0, 4, dtype=kind),
            "one": values[3, 5].clone(),
            "parameter": torch.nn.Parameter(values.clone(), requires_grad=False),
        }
    return state


@pytest.mark.parametrize("road", ["save", "dcp.save", "async", "async by dcp"])
def test_eight_bits_come_back_by_every_road(memory_root: Path, tmp_path: Path, road: str) -> None:
    places = Places(str(memory_root), str(tmp_path / "root"))
    forked_ranks(_roundtrips, 1, places, road)


def _roundtrips(places: Places, road: str) -> None:
    with places.writer() as writer:
        for step in range(3):  # the first is planned, later ones are recognised and copied ahead
            save_by(road, writer, _state(step), f"step-{step}")
        writer.wait("step-2", timeout=60)
        comes_back(places, "step-2", _state(2))
        blank = _blank(_state(2))
        dcp_mem.load(blank, checkpoint_id="step-2", storage_reader=places.reader("memory", ""))
        assert_same(_state(2), blank, "dcp_mem.load")


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {
            key: other_bytes(torch.empty(tensor.shape, dtype=tensor.dtype))
            for key, tensor in tensors.items()
        }
        for name, tensors in state.items()
    }


@on_ranks(1)
def test_eight_bits_are_copied_behind_the_loop(memory_job: Job) -> None:
    """Save while a loop goes on, with parameters that are copied behind it."""
    model = torch.nn.Linear(64, 64)
    kept = {name: torch.nn.Parameter(_bytes(7).view(kind), False) for name, kind in KINDS.items()}
    optimizer = torch.optim.SGD([*model.parameters(), *kept.values()], lr=0.1)
    with memory_job.writer() as writer:
        for step in range(3):
            state = {"model": model.state_dict(), "kept": kept}
            future = dcp_mem.async_save(
                state, checkpoint_id=f"step-{step}", storage_writer=writer, overlap=optimizer
            )
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            future.result()
        blank = {
            name: other_bytes(torch.empty(_ROWS, _COLUMNS, dtype=kind))
            for name, kind in KINDS.items()
        }
        dcp_mem.load({"kept": blank}, checkpoint_id="step-2", storage_reader=memory_job.reader())
    for name, kind in KINDS.items():
        assert_same(_bytes(7).view(kind), blank[name], name)


def _distributed(number: int, dimension: int, kind: torch.dtype, *, filled: bool) -> DTensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    raw = _bytes(number).chunk(world, dimension)
    own = raw[rank].contiguous() if rank < len(raw) else _bytes(0)[:, :0]
    local = own.clone() if filled else torch.full_like(own, 0x5A)
    shape = torch.Size((_ROWS, _COLUMNS))
    return DTensor.from_local(
        local.view(kind), mesh, [Shard(dimension)], run_check=False, shape=shape, stride=(22, 1)
    )


def _save_sharded(job: Job, road: str) -> None:
    state: dict[str, Any] = {
        name: _distributed(3, 0, kind, filled=True) for name, kind in KINDS.items()
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, kind in KINDS.items():
        local = _bytes(5).view(kind)
        state[f"{name}.replicated"] = DTensor.from_local(local, mesh, [Replicate()])
    with job.writer() as writer:
        for step in range(2):
            save_by(road, writer, state, f"step-{step}")


def _load_sharded(job: Job) -> None:
    for dimension in (0, 1):
        state: dict[str, Any] = {
            name: _distributed(3, dimension, kind, filled=False) for name, kind in KINDS.items()
        }
        whole = {
            f"{name}.replicated": other_bytes(torch.empty(_ROWS, _COLUMNS, dtype=kind))
            for name, kind in KINDS.items()
        }
        state |= whole
        dcp_mem.load(state, checkpoint_id="step-1", storage_reader=job.reader())
        for name, kind in KINDS.items():
            expected = _distributed(3, dimension, kind, filled=True).to_local()
            assert_same(expected, state[name].to_local(), name)
            assert_same(_bytes(5).view(kind), whole[f"{name}.replicated"], name)


@pytest.mark.parametrize("road", ["save", "dcp.save", "async by dcp"])
def test_eight_bits_load_with_any_sharding(memory_job: Job, road: str) -> None:
    forked_ranks(_save_sharded, 2, memory_job, road)
    forked_ranks(_load_sharded, 3, memory_job)
    forked_ranks(_load_sharded, 1, memory_job)


def test_eight_bits_are_exported_to_safetensors(job: Job, tmp_path: Path) -> None:
    state = {
        name: _bytes(number).view(kind)
        for number, (name, kind) in enumerate(KINDS.items())
        if name != "float4_e2m1fn_x2"  # safetensors count its halves
    }
    with job.writer(agent="thread") as writer:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer)
    target = tmp_path / "hf"
    places = ["--memory-root", job.memory, "--job", str(job.name)]
    result = command(
        "export", str(job.url), "step-1", str(target), "--format", "safetensors", *places
    )
    assert result.exit_code == 0, result.output
    index = json.loads((target / "model.safetensors.index.json").read_text())
    (file,) = set(index["weight_map"].values())
    with safe_open(target / file, "pt") as found:
        assert set(found.keys()) == set(state)
        for name, tensor in state.items():
            assert_same(tensor, found.get_tensor(name), name)
