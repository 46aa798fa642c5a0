"""A small job for tests of whole checkpoints: its places, states, saves and loads.

A state belongs to one number, all of it, and says which: a mix of two saves can't pass. The
functions run on one rank or on several; what several saved, one can load.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from dcp_mem.reader import RecoveryReport
from dcp_mem.runtime import session

State = dict[str, Any]

_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Job:
    """Where a job keeps its checkpoints: a storage URL (or none), a memory root."""

    url: str | None
    memory: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    name: str | None = "job"

    def writer(self, **options: Any) -> MemoryStorageWriter:
        return MemoryStorageWriter(self.url, **self._places(), **options)

    def reader(self, **options: Any) -> MemoryStorageReader:
        return MemoryStorageReader(self.url, **self._places(), **options)

    @property
    def directory(self) -> Path:
        """The job's directory in memory."""
        return Path(self.memory, self.name or "")

    @property
    def arguments(self) -> list[str]:
        """What the command line is told of the job, behind its root."""
        named = [] if self.name is None else ["--job", self.name]
        return ["--memory-root", self.memory, *named]

    def _places(self) -> dict[str, Any]:
        return {
            "memory_root": self.memory,
            "job": self.name,
            "storage_options": self.storage_options,
        }


def own_rank() -> int:
    """This process's rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def slots_of(directory: Path) -> int:
    """How many slots a job has on this node, free ones and segments together."""
    return sum(1 for path in directory.rglob("*") if path.suffix in (".slot", ".distcp"))


def occupied(directory: Path) -> int:
    """The bytes of the files below a directory, there or set aside; several names count once."""
    facts = [path.lstat() for path in directory.rglob("*") if not path.is_dir()]
    return sum({one.st_ino: max(one.st_blocks * 512, one.st_size) for one in facts}.values())


def committed_in(root: Path) -> set[str]:
    """The names of the checkpoints that torch finds in a directory."""
    return {path.parent.name for path in root.glob("*/.metadata")}


def make_state(number: int) -> State:
    """The state of that number: sharded over the ranks, replicated, and objects."""
    sharded: torch.Tensor = torch.arange(600.0).view(60, 10) + number
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = DTensor.from_local(
            sharded.chunk(dist.get_world_size())[dist.get_rank()], mesh, [Shard(0)]
        )
    return {
        "sharded": sharded,
        "replicated": torch.full((33,), number, dtype=torch.bfloat16),
        "nested": {"scalar": torch.tensor(number), "step": number},
        "text": f"state {number}",
    }


def number_of(state: State) -> int:
    """The number that all of the state belongs to.

    Fails where its parts belong to different ones.
    """
    number: int = state["nested"]["step"]
    expected = make_state(number)
    _assert_equal(state, expected)
    return number


def _assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        other = found[key]
        if isinstance(value, dict):
            _assert_equal(other, value)
        elif isinstance(value, torch.Tensor):
            here, there = (
                each.to_local() if isinstance(each, DTensor) else each for each in (other, value)
            )
            assert here.dtype == there.dtype, key
            assert torch.equal(here, there), key
        else:
            assert other == value, key


def save(writer: MemoryStorageWriter, number: int, name: str | None = None) -> None:
    """Save the state of that number, as `step-<number>` unless another name is given."""
    dcp.save(make_state(number), checkpoint_id=name or f"step-{number}", storage_writer=writer)


def load(reader: dcp.StorageReader, name: str | None = None) -> int:
    """Load the named checkpoint, by default the newest, and return the number of its state."""
    state = make_state(0)
    for tensor in (state["sharded"], state["replicated"], state["nested"]["scalar"]):
        tensor.fill_(-1)
    dcp.load(state, checkpoint_id=name, storage_reader=reader)
    return number_of(state)


@dataclass(frozen=True)
class Loaded:
    """What a load brought: the number of the state, and the reader's account."""

    number: int
    report: RecoveryReport


def load_anew(job: Job, name: str | None = None, **options: Any) -> Loaded:
    """Load through a new reader of the job."""
    with job.reader(**options) as reader:
        return Loaded(load(reader, name), reader.report())


def save_one(job: Job) -> None:
    """Save step-1; closing the writer flushes it."""
    with job.writer(agent="thread") as writer:
        save(writer, 1)


def save_unflushed(job: Job, *numbers: int, keep_memory: int = 2) -> None:
    """Save step-1, or those steps, for storage, and tell no agent of it."""
    with patch.object(session.Session, "wake_agent", lambda *_, **__: None):
        writer = job.writer(keep_memory=keep_memory)
        for number in numbers or (1,):
            save(writer, number)
        writer.close(flush=False)


def save_two(job: Job, agent: str = "thread") -> None:
    """Save step-1 and step-2, both complete in memory and durable."""
    with job.writer(agent=agent) as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)


def save_two_with_torch(directory: Path) -> None:
    """Save step-1 and step-2 with torch's own writer."""
    for number in (1, 2):
        dcp.save(
            make_state(number),
            storage_writer=dcp.FileSystemWriter(str(directory / f"step-{number}")),
        )


def load_as_torch(stored: Path) -> int:
    """Load a stored checkpoint with torch's own reader and return the number of its state."""
    return load(dcp.FileSystemReader(str(stored)))


def save_in_two_places(job: Job) -> None:
    """step-1 on storage only, step-2 in both places, step-3 in memory only."""
    with job.writer(keep_memory=2, agent="thread") as writer:
        for number in (1, 2):
            writer.annotate_next_save(step=number, metrics={"loss": 1 / number})
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)
    with job.writer(keep_memory=2, agent="thread", persist=False) as writer:
        save(writer, 3)


def wait_until(
    condition: Callable[[], object], what: str = "", timeout: float = _PATIENCE_SECONDS
) -> None:
    """Ask until the condition holds. Fails when it takes too long."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what or condition}"
        time.sleep(_PAUSE_SECONDS)


def wait_for_spare_slots() -> None:
    """Wait until this process has the slots ready that it makes behind its last save."""
    wait_until(lambda: not any(one.prefaulting.is_busy for one in list(session._sessions.values())))


def agents(memory: str | Path) -> list[psutil.Process]:
    """The running agents of a memory root."""
    command = ["-m", "dcp_mem.flushing.agent", str(memory)]
    return [process for process in psutil.process_iter() if _command(process)[-3:] == command]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
