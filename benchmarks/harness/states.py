"""The states that are saved: equal tensors, sharded over the ranks where there are several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.harness.settings import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from benchmarks.harness.processes import Rank

BYTES_PER_ELEMENT = 4
MOST_RANKS = 4
"""The rows of a tensor are a multiple of this, so that all shards are equally large."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A state of about `nominal_bytes` in `tensors` float32 matrices of equal shape.

    Matrices, not vectors, because torch's planning takes time in proportion to the first dimension
    of each DTensor.
    """

    nominal_bytes: int
    tensors: int

    @property
    def name(self) -> str:
        size, unit = (self.nominal_bytes / GIB, "GiB")
        if size < 1:
            size, unit = (self.nominal_bytes / MIB, "MiB")
        return f"{size:.3g} {unit} as {self.tensors:,} tensors"

    def on(self, ranks: int) -> str:
        """Return what to call this state on so many ranks."""
        return f"{self.name}, {ranks} rank{'s' * (ranks > 1)}"

    @property
    def columns(self) -> int:
        return 64 if self.many else 1024

    @property
    def rows(self) -> int:
        wanted = self.nominal_bytes // self.tensors // BYTES_PER_ELEMENT // self.columns
        return wanted - wanted % MOST_RANKS

    @property
    def total_bytes(self) -> int:
        return self.rows * self.columns * self.tensors * BYTES_PER_ELEMENT

    @property
    def many(self) -> bool:
        """Whether work per tensor takes longer than the bytes."""
        return self.tensors > 1000


@dataclass(frozen=True, slots=True)
class State:
    """A state dict as a trainer hands it to DCP, and this rank's tensors in it."""

    tree: dict[str, Any]
    local: list[torch.Tensor]

    @property
    def local_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local)


def trained(workload: Workload, rank: Rank) -> State:
    """Return a state to save, whose tensors are filled with different values."""
    return _state(workload, rank, [_value(index) for index in range(workload.tensors)], step=1)


def blank(workload: Workload, rank: Rank) -> State:
    """Return a state to load into, whose pages are touched and whose values are wrong."""
    return _state(workload, rank, [-1.0] * workload.tensors, step=-1)


def check_trained(state: State) -> None:
    """Raise AssertionError unless `state` has the values that `trained` fills in."""
    for index, tensor in enumerate(state.local):
        if not bool((tensor == _value(index)).all()):
            raise AssertionError(f"tensor {index} was not restored")
    if state.tree["step"] != 1:
        raise AssertionError(f"the byte item was not restored: {state.tree['step']!r}")


def change(state: State) -> None:
    """Make every value of `state` another one, as full fine-tuning does."""
    for tensor in state.local:
        tensor.neg_()


def wipe(state: State) -> None:
    """Make `state` blank again."""
    wipe_tensors(state.local)
    state.tree["step"] = -1


def wipe_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Make all values wrong. On return the processor's caches still have to write some of them."""
    for tensor in tensors:
        tensor.fill_(-1.0)


def _value(index: int) -> float:
    return float(index + 1)


def _state(workload: Workload, rank: Rank, values: list[float], step: int) -> State:
    shape = workload.rows // rank.world, workload.columns
    local = [torch.empty(shape).fill_(value) for value in values]
    mesh = init_device_mesh("cpu", (rank.world,)) if rank.world > 1 else None
    tree: dict[str, Any] = {f"layer.{i:05}.weight": _global(t, mesh) for i, t in enumerate(local)}
    tree["step"] = step
    return State(tree, local)


def _global(local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None:
        return local
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
