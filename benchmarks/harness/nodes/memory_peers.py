"""Other libraries that keep copies of a rank's state on another node, used without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.harness.clock import seconds
from benchmarks.harness.nodes.cluster import MEMORY

if TYPE_CHECKING:
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.states import State


class Saver(Protocol):
    """A library that saves one state again and again.

    Attributes:
        parts: Seconds of parts of each save, by name.
    """

    parts: Mapping[str, Sequence[float]]

    def save(self) -> float:
        """Save, and return the seconds that blocked."""
        ...

    def settle(self) -> None:
        """Wait for all background work of the save."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library, and how it is used here.

    Attributes:
        make: Called on all ranks, which then save together.
    """

    name: str
    package: str
    module: str
    make: Callable[[State, Rank], Saver]
    remark: str

    @property
    def is_installed(self) -> bool:
        return find_spec(self.module) is not None


class _Gemini:
    """lm-resiliency's GEMINI: threads copy states between processes after a save."""

    def __init__(self, state: State, rank: Rank) -> None:
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        config = InMemoryCkptConfig(
            replication_jump=rank.world // 2,
            disk_flush_interval=0,
            disk_folder=str(MEMORY / "gemini"),
            pin_memory=False,
        )
        self.parts: Mapping[str, Sequence[float]] = {}
        self._manager = InMemoryCheckpointManager(config)
        self._tensors = _named(state)
        self._step = 0

    def save(self) -> float:
        self._step += 1
        return seconds(
            lambda: self._manager.save({**self._tensors, "step": self._step}, self._step)
        )

    def settle(self) -> None:
        if not self._manager.finalize_replication():
            raise AssertionError("the peer has no copy")

    def close(self) -> None:
        self._manager.close()


class _Nvrx:
    """NVIDIA's resiliency extension: every rank of a clique has the files of all, here on tmpfs."""

    def __init__(self, state: State, rank: Rank) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
            CliqueReplicationStrategy,
        )

        class TimedStrategy(CliqueReplicationStrategy):  # type: ignore[misc]
            def replicate(inner, local_ckpt: Any, id_: str) -> Any:  # noqa: N805
                answers: list[Any] = []
                self._exchanges.append(
                    seconds(
                        lambda: answers.append(
                            super(TimedStrategy, inner).replicate(local_ckpt, id_)
                        )
                    )
                )
                return answers[0]

        self._exchanges: list[float] = []
        self.parts: Mapping[str, Sequence[float]] = {"the exchange alone": self._exchanges}
        strategy = TimedStrategy.from_replication_params(rank.world // 2, 2)
        self._manager = LocalCheckpointManager(str(MEMORY / "nvrx"), repl_strategy=strategy)
        self._tensors = _named(state)
        self._step = 0

    def save(self) -> float:
        self._step += 1
        return seconds(
            lambda: self._manager.save(
                tensor_aware({**self._tensors, "step": self._step}), self._step
            )
        )

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


def _named(state: State) -> dict[str, torch.Tensor]:
    return {f"layer.{index:05}.weight": tensor for index, tensor in enumerate(state.local)}


def tensor_aware(tree: dict[str, Any]) -> Any:
    """Return a flat state in the form that NVRx takes.

    NVRx's own BasicTensorAwareStateDict refuses tensors that aren't on a GPU.
    """
    return _TensorAware(tree)


def nvrx_strategy_on_cpus(jump: int) -> Any:
    """Return NVRx's replication among ranks that are `jump` apart, which also loads without a GPU.

    NVRx's own `GroupWrapper` moves each tensor that it sends to the GPU, and receives on the GPU
    what was saved on a CPU; on a machine without CUDA the load after a lost node ends there.
    """
    from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        CliqueReplicationStrategy,
    )

    class OnCpus(GroupWrapper):  # type: ignore[misc]
        def isend_state_dict(self, state_dict: Any, dst: int) -> dict[str, float]:
            tensors = state_dict.pop_tensors()
            self.send_object(state_dict, dst)
            for tensor in tensors:
                torch.distributed.send(tensor, dst, group=self.group)
            state_dict.insert_tensors(tensors)
            return {"data_sent": sum(tensor.nbytes for tensor in tensors)}

        def irecv_state_dict(self, src: int) -> tuple[Any, dict[str, float]]:
            came = self.recv_object(src)
            came.init_tensors()
            for tensor in came.tensors:
                torch.distributed.recv(tensor, src, group=self.group)
            return came, {"data_recv": sum(tensor.nbytes for tensor in came.tensors)}

    strategy = CliqueReplicationStrategy.from_replication_params(jump, 2)
    strategy.local_group = OnCpus(strategy.local_group.group)
    return strategy


class _TensorAware:
    """A flat dict of CPU tensors with the methods of NVRx's `TensorAwareStateDict`."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree
        self.is_hollow = False

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return [value for value in self._tree.values() if isinstance(value, torch.Tensor)]

    def pop_tensors(self) -> list[torch.Tensor]:
        popped = list(self.tensors)
        self._tree = {
            name: torch.empty_like(value, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in self._tree.items()
        }
        self.is_hollow = True
        return popped

    def init_tensors(self) -> None:
        self.insert_tensors([torch.empty_like(tensor, device="cpu") for tensor in self.tensors])

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        given = iter(tensor_data)
        self._tree = {
            name: next(given) if isinstance(value, torch.Tensor) else value
            for name, value in self._tree.items()
        }
        self.is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        return

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        return


GEMINI = (
    "lm-resiliency (open GEMINI): a save is a copy into the process's own memory, without "
    "agreement between ranks; two of its own states and two of its peer's lie there, and are lost "
    "when the process is killed. Pinned memory is off, because there is no GPU"
)
NVRX = (
    "NVRx: LocalCheckpointManager on the node's tmpfs with CliqueReplicationStrategy over gloo. "
    "Without CUDA only is_async=False works (is_async=True ends with 'Torch not compiled with CUDA "
    "enabled'), and that with a state dict made here (BasicTensorAwareStateDict asserts `is_cuda` "
    "of every tensor). The exchange comes before the write, and blocks, in both modes"
)
PEERS = (
    Peer(
        name="lm-resiliency",
        package="lm-resiliency",
        module="lm_resiliency",
        make=_Gemini,
        remark=GEMINI,
    ),
    Peer(
        name="NVRx",
        package="nvidia-resiliency-ext",
        module="nvidia_resiliency_ext",
        make=_Nvrx,
        remark=NVRX,
    ),
)
