"""A state as trainers nest it, {"model": …, "optim": …}, and an optimizer that changes it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.harness.states import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.states import Workload

PER_PARAMETER = ("weight", "exp_avg", "exp_avg_sq")
"""The tensors of a parameter: itself, and its optimizer's state."""
WRONG = -1.0


class Ticks(torch.optim.Optimizer):
    """An optimizer whose step adds one to the first element of every tensor.

    It holds parameters and states as AdamW does, and torch calls the hooks of its step. So a save
    that takes what a later step has written is found out, and the step itself costs next to
    nothing.

    Attributes:
        group: The state dict's values that aren't tensors; "step" counts the steps.
        began: When the last step began, after its hooks, by `time.perf_counter`.
    """

    def __init__(
        self,
        states: Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]],
        local: Sequence[torch.Tensor],
        group: dict[str, Any],
    ) -> None:
        super().__init__(list(states), {"lr": group["lr"]})
        self.state.update({parameter: dict(state) for parameter, state in states.items()})
        self.group = group
        self.began = 0.0
        self._firsts = [tensor.view(-1)[:1] for tensor in local]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.began = time.perf_counter()
        torch._foreach_add_(self._firsts, 1.0)
        self.group["step"] += 1


@dataclass(frozen=True, slots=True)
class NestedState(State):
    """A nested state dict, this rank's tensors in it, and the optimizer that they belong to."""

    optimizer: Ticks

    @property
    def ticks(self) -> int:
        """The number of steps so far."""
        return int(self.optimizer.group["step"])

    def check(self, ticks: int) -> None:
        """Raise AssertionError unless this is the state after so many steps."""
        for index, tensor in enumerate(self.local):
            first, rest = tensor.view(-1)[:1], tensor.view(-1)[1:]
            value = _value(index)
            if first.item() != value + ticks or not bool((rest == value).all()):
                raise AssertionError(
                    f"tensor {index} is not that of step {ticks}: it begins with {first.item()}, "
                    f"not {value + ticks}"
                )
        if self.ticks != ticks:
            raise AssertionError(f"the byte item is that of step {self.ticks}, not {ticks}")

    def wipe(self) -> None:
        """Make all values wrong."""
        for tensor in self.local:
            tensor.fill_(WRONG)
        self.optimizer.group["step"] = int(WRONG)


def nested(workload: Workload, rank: Rank, device: str = "cpu") -> NestedState:
    """Return a state to save: DTensors where there are several ranks, else plain tensors.

    Every third tensor is a parameter, the others are its optimizer's state.
    """
    shape = workload.rows // rank.world, workload.columns
    local = [torch.full(shape, _value(i), device=device) for i in range(workload.tensors)]
    mesh = init_device_mesh(device, (rank.world,)) if rank.world > 1 else None
    whole = [
        one if mesh is None else DTensor.from_local(one, mesh, [Shard(0)], run_check=False)
        for one in local
    ]
    model: dict[str, torch.Tensor] = {}
    optim: dict[str, dict[str, torch.Tensor]] = {}
    states: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    for index in range(0, len(whole), len(PER_PARAMETER)):
        value, *moments = whole[index : index + len(PER_PARAMETER)]
        name = f"layers.{index // len(PER_PARAMETER):05}.weight"
        parameter = torch.nn.Parameter(value)
        model[name] = parameter.detach()  # as in a module's state_dict()
        optim[name] = states[parameter] = dict(zip(PER_PARAMETER[1:], moments, strict=False))
    group: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "step": 0}
    tree = {"model": model, "optim": {"state": optim, "param_groups": [group]}}
    return NestedState(tree, local, Ticks(states, local, group))


def wrong(workload: Workload, rank: Rank, device: str = "cpu") -> NestedState:
    """Return a state to load into, whose pages are touched and whose values are wrong."""
    state = nested(workload, rank, device)
    state.wipe()
    return state


def _value(index: int) -> float:
    return float(index + 1)
