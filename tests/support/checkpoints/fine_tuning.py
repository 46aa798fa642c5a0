"""A job that fine-tunes: adapters that change at each step, between tensors that don't.

Nodes are memory roots: each rank has the one of its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import MemoryStorageWriter
from dcp_mem.common import faults
from dcp_mem.common.values import State
from dcp_mem.memory.job import JobMemory

BASE_NBYTES, ADAPTER_NBYTES = 3 << 20, 256 << 10
LAYERS = 8
_SLACK = 1 << 20
Values = Mapping[str, int]


def sent_at_most(changed_nbytes: float) -> float:
    """What may be sent where so many bytes have changed."""
    return 1.1 * changed_nbytes + _SLACK


@dataclass(frozen=True)
class Nodes:
    """Where the nodes' memory lies."""

    root: str

    def memory(self, rank: int | None = None) -> str:
        return f"{self.root}/node{dist.get_rank() if rank is None else rank}"

    def writer(self, **options: Any) -> MemoryStorageWriter:
        return MemoryStorageWriter(
            memory_root=self.memory(), job="job", **{"keep_memory": 1, **options}
        )

    def held(self, node: int) -> JobMemory:
        return JobMemory(f"{self.root}/node{node}", "job")


def trained(step: int) -> dict[str, int]:
    """Values with which the adapters change at each step, and the base never does."""
    adapters = {f"layer{layer}.adapter": step for layer in range(LAYERS)}
    return {**adapters, **{f"layer{layer}.base": 0 for layer in range(LAYERS)}, "note": step}


def state_of(values: Values) -> dict[str, Any]:
    """Make a state in which tensors that train lie between those that don't."""
    rank, state = dist.get_rank(), dict[str, Any]()
    for layer in range(LAYERS):
        for kind, nbytes in (("base", BASE_NBYTES), ("adapter", ADAPTER_NBYTES)):
            name = f"layer{layer}.{kind}"
            start = values[name] * 1009 + rank * 7 + layer
            state[f"rank{rank}.{name}"] = torch.arange(nbytes // 4, dtype=torch.int32) + start
    return {**state, f"rank{rank}.note": "." * (values["note"] % 3 * 100)}


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    state = state_of(trained(step))
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def save(writer: MemoryStorageWriter, name: str, values: Values) -> None:
    dcp_mem.save(state_of(values), checkpoint_id=name, storage_writer=writer)
    writer.wait(name, "replicated", timeout=60)


def amounts(writer: MemoryStorageWriter, name: str) -> tuple[int, int]:
    """Bytes that all ranks have sent of a checkpoint, and that were there already."""
    status = next(one for one in writer.status() if one.name == name)
    assert status.state is State.REPLICATED
    return status.replication_sent_nbytes, status.replication_reused_nbytes


def loads(nodes: Nodes, step: int) -> list[str]:
    """Names of the tensors that aren't loaded as they were saved."""
    state = {name: torch.zeros_like(value) for name, value in tensors_of(step).items()}
    reader = dcp_mem.MemoryStorageReader(memory_root=nodes.memory(), job="job")
    dcp_mem.load(state, checkpoint_id=f"step-{step}", storage_reader=reader)
    return [name for name, value in tensors_of(step).items() if not torch.equal(state[name], value)]


def saves_until_killed(nodes: Nodes, options: Mapping[str, Any], killed: int, point: str) -> str:
    """Save twice; the second time, a rank is killed at a point. Return what others then raise."""
    writer = nodes.writer(**options)
    save(writer, "step-1", trained(1))
    if dist.get_rank() == killed:
        faults.arm(f"{point}:kill:1")
    dcp_mem.save(state_of(trained(2)), checkpoint_id="step-2", storage_writer=writer)
    try:
        writer.wait("step-2", "replicated", timeout=30)
    except Exception as error:
        return type(error).__name__
    return ""
