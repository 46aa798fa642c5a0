"""What the kill tests run in processes: restarts of one job to dcp_mem.

    outcomes = forked(save_and_die, 2, place, ...).join(killed={1})    # what each rank returned

Every tensor of a saved state is derived from its step: `step_of` recovers the step from a loaded
state and raises where any element of it isn't what was saved at that step.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from dcp_mem.common import faults
from dcp_mem.flushing import agent_handle
from dcp_mem.saving.overlap import Overlap
from tests.support.checkpoints.plans import SAVES
from tests.support.processes.forks import Forks

FAILURES = (Exception, CheckpointException)
"""What a save or load may raise: torch's own is no `Exception`."""

RUN = "kill-tests"
"""Run id of all forked processes: they are restarts of one job to dcp_mem."""

ROAD = "DCP_MEM_TESTS_ROAD"
"""In the environment of a process, the road of its saves: one of SAVES; by default dcp.save."""

OVERLAPPED = "DCP_MEM_TESTS_OVERLAPPED"
"""Set likewise, they go through dcp.async_save, with copies behind the training loop."""

_POLL_SECONDS = 0.005

# -- processes -------------------------------------------------------------------------------------


def forked(
    target: Callable[..., Any],
    world_size: int | None,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> Forks[Any]:
    """Start `target(*args)` on each rank of a gloo group (None: in one process without a group).

    They end as a script does at its last line: the process group just goes.
    """
    of_one_job = {"TORCHELASTIC_RUN_ID": RUN, **(env or {})}
    return Forks(target, world_size, *args, env=of_one_job, leaves_group=False)


def wait_for(
    condition: Callable[[], bool],
    what: str,
    timeout: float = 30.0,
    facts: Callable[[], str] = lambda: "",
) -> None:
    """Poll until the condition holds. Raises AssertionError at the deadline."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:.0f} s for {what}\n{facts()}")
        time.sleep(_POLL_SECONDS)


# -- states ----------------------------------------------------------------------------------------

_SHARDED = 6
_SHAPE = (131, 37)


def full_state(step: int) -> dict[str, Any]:
    """Return the state of a step, about 300 KB; its byte item's length varies between steps."""
    state: dict[str, Any] = {f"sharded{index}": _values(step, index) for index in range(_SHARDED)}
    state["replicated"] = _values(step, 100)[0].to(torch.float64)
    state["scalar"] = torch.tensor(step)
    state["note"] = f"step {step} " + "." * (step // 2 % 7 * 10)
    return state


def _values(step: int, index: int) -> torch.Tensor:
    rows, columns = _SHAPE
    return torch.arange(rows * columns).view(_SHAPE) + step * 1_000_000_007 + index * 1_000_003


def state_of(step: int) -> dict[str, Any]:
    """This rank's part of the state of a step."""
    state = full_state(step)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for index in range(_SHARDED):
            full = state[f"sharded{index}"]
            local = _local(full)
            state[f"sharded{index}"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
            )
    return state


def _local(full: torch.Tensor) -> torch.Tensor:
    shards = full.chunk(dist.get_world_size())
    return shards[dist.get_rank()].clone()


def empty_state() -> dict[str, Any]:
    """A state to load into, with values that no step has."""
    state = state_of(0)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
    state["note"] = ""
    return state


def step_of(state: Mapping[str, Any]) -> int:
    """The step that a loaded state was saved at.

    Raises AssertionError unless all of it is that step's, bit for bit.
    """
    step = int(str(state["note"]).split()[1])
    expected = full_state(step)
    assert set(state) == set(expected)
    for name, whole in expected.items():
        found = state[name]
        if isinstance(found, DTensor):
            found, whole = found.to_local(), _local(whole)
        same = torch.equal(found, whole) if isinstance(whole, torch.Tensor) else found == whole
        assert same, f"{name} is not what was saved at step {step}: {found}"
    return step


# -- places ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A job: where its checkpoints lie.

    path: None for memory only. roots: memory root of each rank, if not all `root`.
    """

    root: str
    path: str | None = None
    job: str = "job"
    keep: int = 2
    agent: str = "process"
    roots: tuple[str, ...] = ()

    @property
    def memory(self) -> str:
        return (
            self.roots[dist.get_rank() % len(self.roots)]
            if self.roots and dist.is_initialized()
            else self.root
        )

    def writer(self, **options: Any) -> MemoryStorageWriter:
        settings = {"job": self.job, "keep_memory": self.keep, "agent": self.agent, **options}
        return MemoryStorageWriter(self.path, memory_root=self.memory, **settings)

    def reader(self, *, storage: bool = True) -> MemoryStorageReader:
        return MemoryStorageReader(
            self.path if storage else None, memory_root=self.memory, job=self.job
        )


def slots_in(place: Place) -> int:
    """How many slots the job has, free ones and segments of checkpoints together, whole or not."""
    directory = Path(place.memory) / place.job
    return sum(1 for path in directory.rglob("*") if path.suffix in (".slot", ".distcp"))


def stock_load(directory: Path) -> int:
    """Step of a checkpoint directory, loaded whole with torch's own reader."""
    state = empty_state()
    dcp.load(state, storage_reader=FileSystemReader(directory))
    return step_of(state)


def stock_steps(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Return the step by name of all that torch's own reader finds under a root.

    Raises where a committed checkpoint isn't whole.
    """
    root = Path(directory)
    found = sorted(path.parent for path in root.glob("*/.metadata")) if root.exists() else []
    return {path.name: stock_load(path) for path in found}


def agents_of(root: str | os.PathLike[str]) -> list[psutil.Process]:
    """List the agents of a memory root, with killed ones that still hold files and locks.

    The kernel takes a killed process's memory first, and with it the command line.
    """
    log_file = Path(agent_handle.log_path(os.fspath(root)))
    served = (
        set(re.findall(r"agent (\d+) serves", log_file.read_text())) if log_file.exists() else set()
    )
    found = []
    for process in psutil.process_iter():
        directory = Path(f"/proc/{process.pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            told = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            is_agent = told[-2:] == ["dcp_mem.flushing.agent", os.fspath(root)] or (
                not told and str(process.pid) in served
            )
            # A leader may be a zombie while other threads of it still hold its files.
            if is_agent and (
                process.status() != psutil.STATUS_ZOMBIE or len(os.listdir(directory / "task")) > 1
            ):
                found.append(process)
    return found


# -- a trainer on a line ---------------------------------------------------------------------------


class Trainer:
    """One job in one process: what the other end of a `Line` calls."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._writers: dict[bool, MemoryStorageWriter] = {}

    def writer(self, persist: bool = True) -> MemoryStorageWriter:
        """The job's writer; it has two, of which one has nothing flushed."""
        if persist not in self._writers:
            self._writers[persist] = self.place.writer(persist=persist)
        return self._writers[persist]

    def save(self, step: int, name: str = "", persist: bool = True, road: str = "dcp.save") -> None:
        os.environ[ROAD] = road
        save(self.writer(persist), step, name)

    def wait(self, name: str, timeout: float = 60.0) -> None:
        self.writer().wait(name, timeout=timeout)

    def flush(self) -> None:
        """Wait until nothing that is meant for storage is left to flush."""
        for entry in self.writer().status():
            if entry.in_memory and entry.persist:
                self.wait(entry.name)

    def load(self, name: str | None = None, storage: bool = True) -> Loaded:
        return load(self.place, name, storage)

    def arm(self, text: str) -> None:
        faults.arm(text)

    def export(self, variables: Mapping[str, str]) -> None:
        """Set variables in the environment that an agent gets."""
        os.environ.update(variables)

    def close(self) -> None:
        for writer in list(self._writers.values()) or [self.writer()]:
            writer.close()

    def reopen(self, place: Place) -> None:
        """Go on with another job, or the same one with other settings."""
        self.place = place
        self._writers.clear()


class LineDead(Exception):
    """The process at the other end has ended."""


class Line:
    """A `Trainer` in a process of its own; a context manager. Errors return as type and text."""

    def __init__(self, place: Place) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dcp_mem-line-")
        address = f"{self._directory.name}/socket"
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(60)
            server.bind(address)
            server.listen()
            self.process = forked(serve_line, None, place, address)
            self._connection = Connection(server.accept()[0].detach())

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.process.close()
        self._directory.cleanup()

    def begin(self, name: str, *arguments: Any) -> None:
        """Have the trainer do something, without waiting for it."""
        try:
            self._connection.send((name, arguments))
        except OSError:
            raise LineDead(name) from None

    def end(self, timeout: float = 60.0) -> Any:
        """Return the call's result; raise LineDead if the process died, CallFailed on an error."""
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError(f"no answer within {timeout:.0f} s")
            error, result = self._connection.recv()
        except (EOFError, OSError) as gone:
            raise LineDead(str(gone)) from None
        if error:
            raise CallFailed(error)
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self.process.kill()


class CallFailed(Exception):
    """What the trainer raised: its type and text."""


def serve_line(place: Place, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    trainer = Trainer(place)
    while True:
        name, arguments = connection.recv()
        try:
            connection.send(("", getattr(trainer, name)(*arguments)))
        except FAILURES as error:
            connection.send((f"{type(error).__name__}: {error}", None))


# -- targets ---------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step-{step}"


def save(writer: MemoryStorageWriter, step: int, name: str = "") -> None:
    if os.environ.get(OVERLAPPED):
        _save_behind(writer, state_of(step), name or name_of(step))
        return
    road = SAVES[os.environ.get(ROAD, "dcp.save")]
    road(state_of(step), checkpoint_id=name or name_of(step), storage_writer=writer)


def _save_behind(writer: MemoryStorageWriter, state: dict[str, Any], name: str) -> None:
    """Save with dcp.async_save, and wait; the tensors are an optimizer's parameters."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    parameters = [
        torch.nn.Parameter(
            value.to_local() if isinstance(value, DTensor) else value, requires_grad=False
        )
        for value in tensors
    ]
    with writer._saver.overlapping(Overlap(torch.optim.SGD(parameters))):
        begun: Any = dcp.async_save(state, checkpoint_id=name, storage_writer=writer)
    getattr(begun, "upload_completion", begun).result(60)


def save_armed(
    place: Place, before: Sequence[int], last: int, armed: Mapping[int, str], name: str = ""
) -> str:
    """Save the steps of `before`, arm the fault points, save `last`; return what it raised."""
    writer = place.writer()
    for step in before:
        save(writer, step)
    rank = dist.get_rank() if dist.is_initialized() else 0
    faults.arm(armed.get(rank, ""))
    try:
        save(writer, last, name)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found. source: as the reader reports it."""

    step: int
    name: str
    source: str


def load(place: Place, name: str | None = None, storage: bool = True) -> Loaded:
    """Load the newest checkpoint, or a named one, into a fresh state, and check every bit of it."""
    state = empty_state()
    reader = place.reader(storage=storage)
    dcp.load(state, checkpoint_id=name, storage_reader=reader)
    report = reader.report()
    return Loaded(step_of(state), report.checkpoint_id, report.source)


def load_all(place: Place, names: Sequence[str | None], storage: bool = True) -> list[Loaded | str]:
    """Load several checkpoints in turn; return an error as its type and text."""
    found: list[Loaded | str] = []
    for name in names:
        try:
            found.append(load(place, name, storage))
        except FAILURES as error:  # noqa: PERF203 (each is asked by itself)
            found.append(f"{type(error).__name__}: {error}")
    return found


@dataclass(frozen=True, slots=True)
class Restarted:
    """A restarted job's account. slots: the most that there were after any of its saves."""

    resumed: int
    slots: int


def restart(place: Place, saves: int = 4, storage: bool = True) -> Restarted:
    """Resume from the newest checkpoint, save `saves` steps, load each; close with `keep` left."""
    resumed = load(place, storage=storage).step
    most = 0
    with place.writer() as writer:
        for step in range(resumed + 1, resumed + 1 + saves):
            save(writer, step)
            assert load(place, storage=storage).step == step
            most = max(most, slots_in(place))
            _synchronise()
    return Restarted(resumed, most)


def _synchronise() -> None:
    if dist.is_initialized():
        dist.barrier()


def save_all(place: Place, steps: Sequence[int], name: str = "", durable: bool = False) -> None:
    """Save steps (under one name, if given), waiting if `durable`; end without closing."""
    writer = place.writer()
    for step in steps:
        save(writer, step, name)
        if durable:
            writer.wait(name or name_of(step), timeout=60)


def save_for_mortal_agent(
    place: Place, step: int, armed: str, name: str = "", rank: int = 0
) -> None:
    """Save one step, to be flushed by an armed agent on the node of `rank`; don't close."""
    if _rank() == rank:
        os.environ["DCP_MEM_FAULTS"] = armed
    save(place.writer(), step, name)


def outlive_agent(place: Place, step: int, armed: str) -> None:
    """Save one step, whose agent is killed in the flush; then wait for the checkpoint."""
    os.environ["DCP_MEM_FAULTS"] = armed
    writer = place.writer()
    save(writer, step)
    del os.environ["DCP_MEM_FAULTS"]
    wait_for(lambda: not agents_of(place.memory), "the armed agent to be killed")
    writer.wait(name_of(step), timeout=60)


def flush_in_armed_thread(
    place: Place, before: Sequence[int], last: int, armed: str, name: str = ""
) -> None:
    """Make steps durable; arm a point that the next flush passes in this process."""
    with place.writer() as writer:  # its end is also that of the thread, behind all points
        for step in before:
            save(writer, step, name)
            writer.wait(name or name_of(step), timeout=60)
    writer = place.writer()
    faults.arm(armed)
    save(writer, last, name)
    writer.wait(name or name_of(last), timeout=60)


def wait_until_durable(place: Place, steps: Sequence[int]) -> None:
    """Wait for steps in a process that saves nothing itself."""
    with place.writer() as writer:
        for step in steps:
            writer.wait(name_of(step), timeout=20)


def kill_agents(root: str | os.PathLike[str]) -> None:
    """SIGKILL the agents of a memory root, and wait until they are gone."""
    for process in agents_of(root):
        process.kill()
    wait_for(
        lambda: not agents_of(root) and not agent_handle.is_alive(os.fspath(root)),
        "the killed agent to end",
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
