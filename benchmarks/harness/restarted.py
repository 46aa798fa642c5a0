"""A training that is killed and goes on, and notes when it came how far.

torchrun runs it: `-m benchmarks.harness.restarted ROAD DIRECTORY STEPS`. torch is imported within
`main`, so that its import is one of the things that are noted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

BEGUN = time.time()
"""When Python had begun with this module."""
KILLED, PHASES = (
    "killed",
    ("processes", "torch's import", "the library's import", "groups", "model", "load", "step"),
)
"""What is noted: the kill, and the end of each phase after it."""
TORCH, META, MEMORY, SAME_PROCESS = (
    "torch, directory",
    "torch_checkpointing, directory",
    "dcp_mem",
    "dcp_mem, same processes",
)
ROADS = (TORCH, META, MEMORY, SAME_PROCESS)
_NEEDED = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")
"""What such a training imports, whatever it saves with."""
VICTIM = 1
"""The rank that is killed, or fails."""


class Road(Protocol):
    """A way to save a training and to load it again."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save; on return the training can go on from here."""
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
    """Train; in the first life until the kill, in the second for one step."""
    road, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    stamps = Stamps(directory, rank, life)
    stamps.note(PHASES[0], BEGUN)
    for module in _NEEDED:
        import_module(module)
    import torch.distributed as dist

    stamps.note(PHASES[1])
    make_road = _importing(road)
    stamps.note(PHASES[2])
    dist.init_process_group("gloo")
    stamps.note(PHASES[3])
    is_last = life > 0
    while _train(stamps, make_road(directory), steps, road, ends=is_last):
        # In the same processes: everybody leaves the groups, and they are made again.
        stamps, is_last = Stamps(directory, rank, 1), True
        dist.destroy_process_group()
        for phase in PHASES[:3]:
            stamps.note(phase)
        dist.init_process_group("gloo", **_again(directory, rank))
        stamps.note(PHASES[3])


def _train(stamps: Stamps, road: Road, steps: int, name: str, *, ends: bool) -> bool:
    """Load and train; return whether a rank has failed in a process that lives on."""
    import torch.distributed as dist

    from benchmarks.harness.sharded_training import ShardedTraining

    training = ShardedTraining()
    stamps.note(PHASES[4])
    step = road.load(training.state())
    if step:
        training.take(step)
    stamps.note(PHASES[5])
    while True:
        training.step()
        step += 1
        if ends:
            stamps.note(PHASES[6])
            road.close()
            dist.destroy_process_group()
            return False
        road.save(step, training.state())
        if step == steps and name == SAME_PROCESS:  # the rank that has failed tells the others
            dist.barrier()
            stamps.note(KILLED)
            return True
        if step == steps and dist.get_rank() == VICTIM:
            stamps.note(KILLED)
            os.kill(os.getpid(), signal.SIGKILL)


def _again(directory: Path, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(directory / "store"), world)
    return {"store": store, "rank": rank, "world_size": world}


# -- roads -----------------------------------------------------------------------------------------


def _importing(road: str) -> Callable[[Path], Road]:
    """Import a road's library; return what makes the road."""
    if road == TORCH:
        return _Torch
    if road == META:
        import torch_checkpointing  # noqa: F401 - its import is what is measured

        return _Meta
    import dcp_mem

    _ = dcp_mem.CheckpointManager  # imported when it is first used
    return _Memory


class _Torch:
    """torch's writer and reader, directories on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "disk"

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

    def __init__(self, directory: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._directory = directory / "disk"
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


class _Memory:
    """dcp_mem's manager: memory, and behind it the disk."""

    def __init__(self, directory: Path) -> None:
        from dcp_mem import CheckpointManager

        self._manager = CheckpointManager(
            str(directory / "disk"), memory_root=str(directory / "memory"), job="bench"
        )

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._manager.save(step, state)

    def load(self, state: dict[str, Any]) -> int:
        return self._manager.restore(state) or 0

    def close(self) -> None:
        self._manager.close(flush=False)


if __name__ == "__main__":
    main()
