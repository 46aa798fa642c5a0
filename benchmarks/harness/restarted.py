"""A training that is killed and goes on, and notes when it came how far.

torchrun runs it: `-m benchmarks.harness.restarted ROAD LOSS DIRECTORY MEMORY STEPS`. torch is
imported within `main`, so that its import is one of the things that are noted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

BEGUN = time.time()
"""When Python had begun with this module."""
KILLED, NOTICED, PHASES = (
    "killed",
    "noticed",
    (
        *("processes", "torch's import", "the library's import", "groups", "model"),
        *("state dict", "load", "state put back", "step"),
    ),
)
"""What is noted: the kill, when the survivor's step has failed, and the end of each phase."""
TORCH, META, NVRX, MEMORY, SAME_PROCESS = (
    "torch, directory",
    "torch_checkpointing, directory",
    "NVRx, memory",
    "dcp_mem",
    "dcp_mem, same processes",
)
ROADS = (TORCH, META, NVRX, MEMORY, SAME_PROCESS)
NEEDS = {META: "torch_checkpointing", NVRX: "nvidia_resiliency_ext"}
"""The package that a road needs."""
RANK, NODE = "rank", "node"
"""What is lost."""
LOST = "lost"
"""A file that is there once the victim has saved for the last time."""
_NEEDED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
"""What such a training imports, whatever it saves with."""
VICTIM = 1
"""The rank that is killed, or fails, or whose node is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What a rank is told.

    Attributes:
        loss: `RANK` or `NODE`.
        directory: What all ranks see.
        memory: A directory in the node's memory.
        steps: Training steps until the loss, each of them saved.
    """

    road: str
    loss: str
    directory: Path
    memory: Path
    steps: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of this module that say so."""
        return self.road, self.loss, str(self.directory), str(self.memory), str(self.steps)

    @classmethod
    def of(cls, arguments: list[str]) -> Life:
        road, loss, directory, memory, steps = arguments
        return cls(
            road=road,
            loss=loss,
            directory=Path(directory),
            memory=Path(memory),
            steps=int(steps),
        )


class Road(Protocol):
    """A way to save a training and to load it again."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save; on return the training can go on from here, whatever is lost."""
        ...

    def load(self, state: dict[str, Any]) -> int:
        """Load the newest checkpoint in place; return its step, 0 where there is none."""
        ...

    def close(self) -> None: ...


class Stamps:
    """Notes of one rank's life: when each phase had ended, by Unix time."""

    def __init__(self, directory: Path, rank: int, life: int) -> None:
        self._path = path_of(directory, rank, life)

    def note(self, phase: str, when: float | None = None) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([phase, time.time() if when is None else when]) + "\n")


def path_of(directory: Path, rank: int, life: int) -> Path:
    """Return the file with a rank's notes of one life."""
    return directory / f"stamps-{rank}-{life}"


def main() -> None:
    """Train; in the first life until the loss, in the second for one step."""
    life = Life.of(sys.argv[1:])
    rank, number = int(os.environ["RANK"]), int((life.directory / LOST).exists())
    stamps = Stamps(life.directory, rank, number)
    stamps.note(PHASES[0], BEGUN)
    for module in _NEEDED:
        import_module(module)
    import torch.distributed as dist

    stamps.note(PHASES[1])
    make_road = _importing(life.road)
    stamps.note(PHASES[2])
    dist.init_process_group("gloo")
    stamps.note(PHASES[3])
    is_last = number > 0
    while _train(stamps, make_road(life), life, ends=is_last):
        # In the same processes: everybody leaves the groups, and they are made again.
        stamps, is_last = Stamps(life.directory, rank, 1), True
        dist.destroy_process_group()
        for phase in PHASES[:3]:
            stamps.note(phase)
        dist.init_process_group("gloo", **_again(life.directory, rank))
        stamps.note(PHASES[3])


def _train(stamps: Stamps, road: Road, life: Life, *, ends: bool) -> bool:
    """Load and train; return whether a rank has failed in a process that lives on."""
    import torch.distributed as dist

    from benchmarks.harness.sharded_training import ShardedTraining

    training = ShardedTraining()
    stamps.note(PHASES[4])
    state = training.state()
    stamps.note(PHASES[5])
    step = road.load(state)
    stamps.note(PHASES[6])
    if step:
        training.take(step)
    stamps.note(PHASES[7])
    while True:
        try:
            training.step()
        except RuntimeError:
            stamps.note(NOTICED)
            raise
        step += 1
        if ends:
            stamps.note(PHASES[8])
            road.close()
            dist.destroy_process_group()
            return False
        road.save(step, training.state())
        if step == life.steps and life.road == SAME_PROCESS:
            dist.barrier()  # the rank that has failed tells the others
            stamps.note(KILLED)
            return True
        if step == life.steps and dist.get_rank() == VICTIM:
            _be_lost(stamps, life)


def _be_lost(stamps: Stamps, life: Life) -> None:
    (life.directory / LOST).touch()
    while life.loss == NODE:  # the node is killed from outside
        time.sleep(3600)
    stamps.note(KILLED)
    os.kill(os.getpid(), signal.SIGKILL)


def _again(directory: Path, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(directory / "store"), world)
    return {"store": store, "rank": rank, "world_size": world}


# -- roads -----------------------------------------------------------------------------------------


def _importing(road: str) -> Callable[[Life], Road]:
    """Import a road's library; return what makes the road."""
    if road == TORCH:
        return _Torch
    if road == META:
        import torch_checkpointing  # noqa: F401 - its import is what is measured

        return _Meta
    if road == NVRX:
        import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
        return _Nvrx
    import dcp_mem

    _ = dcp_mem.CheckpointManager  # imported when it is first used
    return _Memory


class _Torch:
    """torch's writer and reader, directories on disk."""

    def __init__(self, life: Life) -> None:
        self._directory = life.directory / "disk"

    def save(self, step: int, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=self._directory / str(step))

    def load(self, state: dict[str, Any]) -> int:
        import torch.distributed.checkpoint as dcp

        whole = [int(one.parent.name) for one in self._directory.glob("*/.metadata")]
        if not whole:
            return 0
        dcp.load(state, checkpoint_id=self._directory / str(max(whole)))
        return max(whole)

    def close(self) -> None:
        return


class _Meta:
    """torch_checkpointing's manager, directories on disk."""

    def __init__(self, life: Life) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._directory = life.directory / "disk"
        self._directory.mkdir(exist_ok=True)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

    def save(self, step: int, state: dict[str, Any]) -> None:
        pending = self._manager.save(str(self._directory / str(step)), state)
        if pending is not None:
            pending.result()
        (self._directory / f"{step}.done").touch()

    def load(self, state: dict[str, Any]) -> int:
        whole = [int(one.stem) for one in self._directory.glob("*.done")]
        if not whole:
            return 0
        self._manager.load(str(self._directory / str(max(whole))), into=state, strict=True)
        return max(whole)

    def close(self) -> None:
        self._manager.close()


class _Nvrx:
    """NVRx's local checkpoints in the node's memory, copied to the other node if one is lost."""

    def __init__(self, life: Life) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )

        from benchmarks.harness.nodes.memory_peers import nvrx_strategy_on_cpus

        strategy = nvrx_strategy_on_cpus(1) if life.loss == NODE else None
        self._manager = LocalCheckpointManager(str(life.memory), repl_strategy=strategy)

    def save(self, step: int, state: dict[str, Any]) -> None:
        from benchmarks.harness.nodes.memory_peers import tensor_aware

        self._manager.save(tensor_aware(_own_tensors(state)), step)

    def load(self, state: dict[str, Any]) -> int:
        step = int(self._manager.find_latest())
        if step < 0:
            return 0
        loaded, _ = self._manager.load()
        for tensor, saved in zip(_own_tensors(state).values(), loaded.tensors, strict=True):
            tensor.copy_(saved)
        return step

    def close(self) -> None:
        return


def _own_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's tensors of a state dict; the other values don't change in training."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_flatten

    values = [value for value in tree_flatten(state)[0] if isinstance(value, torch.Tensor)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return {str(number): tensor for number, tensor in enumerate(local)}


class _Memory:
    """dcp_mem's manager: memory, behind it the disk; copied to the other node if one is lost."""

    def __init__(self, life: Life) -> None:
        from dcp_mem import CheckpointManager

        self._is_copied = life.loss == NODE
        self._manager = CheckpointManager(
            str(life.directory / "disk"),
            memory_root=str(life.memory),
            job="bench",
            replicas=1 if self._is_copied else None,
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        from dcp_mem import State

        self._manager.save(step, state)
        if self._is_copied:
            self._manager.wait(step, State.REPLICATED)

    def load(self, state: dict[str, Any]) -> int:
        step = self._manager.restore(state) or 0
        source = self._manager.report().source if step else ""
        if self._is_copied and step and source != "memory and peers":
            raise AssertionError(f"the checkpoint came from {source}")
        return step

    def close(self) -> None:
        self._manager.close(flush=False)


if __name__ == "__main__":
    main()
