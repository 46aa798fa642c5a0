"""Fresh processes at the price of a fork, for tests that need many of them.

    with forking(save, 2, url) as ranks:                # a gloo group of two; None: one, no group
        [first, second] = ranks.join()
    state = forked(load, url)                           # one process, and wait for what it returns

A server process that has imported torch, and nothing else has happened in, forks one for each
task: what a task leaves in memory, threads and connections is gone with it. Functions and
arguments are pickled. Ranks that raise or die fail the test; to look at an error, return it
(`raised_by`).
"""

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from typing_extensions import TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PRELOADED = [
    "adlfs",
    "s3fs",
    "torch",
    "torch._dynamo",  # which the first DTensor asks for
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "dcp_mem.flushing.agent",
    "dcp_mem.operations.housekeeping",
    "dcp_mem.reader",
    "dcp_mem.writer",
    "tests.support.processes.forks",
    "tests.support.nodes.inside",
    "tests.support.checkpoints.jobs",
    "tests.support.nodes.torchrun",
    "tests.support.checkpoints.training",
    "tests.support.processes.preloaded",  # the last: what is there by then stays as it is
]
_DUMP_STACKS = signal.SIGRTMAX
_DUMP_SECONDS = 0.5
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.005
_OUTPUT_CHARACTERS = 16384
_PR_SET_PDEATHSIG = 1


def raised_by(act: Callable[[], object]) -> Exception | None:
    """The exception that `act` raises, None where it raises none.

    What torch wraps into a CheckpointException, which names the ranks that failed, is taken out of
    it: this rank's own error, where it is among them, else that of the first.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        act()
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        own = failures.get(int(os.environ.get("FORK_RANK", "0")), next(iter(failures.values())))
        assert isinstance(own, Exception)
        return own
    except Exception as error:
        return error
    return None


def forked(
    target: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> T:
    """What `target(*args)` returns in a fresh process without a process group."""
    with forking(target, None, *args, env=env) as ranks:
        (result,) = ranks.join(timeout)
        return result


def forked_ranks(
    target: Callable[[Unpack[Ts]], T],
    world_size: int,
    *args: Unpack[Ts],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """What `target(*args)` returns on every rank of a fresh gloo group, by rank."""
    with forking(target, world_size, *args, env=env) as ranks:
        return ranks.join(timeout)


def forkserver() -> ForkServerContext:
    """What starts processes that are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def preload(module: str) -> None:
    """Have the server import a module before it starts, for tests that fork much with it."""
    _PRELOADED.insert(len(_PRELOADED) - 1, module)


def become(environment: Mapping[str, str], output: Path) -> None:
    """Give this process a session, an environment and a file that it prints to.

    It dies with the server, and so with the test's process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    written = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for descriptor, number in ((null, 0), (written, 1), (written, 2)):
        os.dup2(descriptor, number)
    take(environment)
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")


def take(environment: Mapping[str, str]) -> None:
    """Make this the environment, also for what was imported under another one."""
    import torch

    from dcp_mem.common import faults

    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    faults.arm(environment.get("DCP_MEM_FAULTS", ""))


def leave_group() -> None:
    """destroy_process_group.

    That of torch 2.6 holds the GIL while it waits for threads that want it to let go of their last
    work.
    """
    import torch
    import torch.distributed as dist

    if torch.__version__ < "2.7":
        time.sleep(0.2)
    dist.destroy_process_group()


def end_after(act: Callable[[Unpack[Ts]], object], *args: Unpack[Ts]) -> NoReturn:
    """Act, and end as an interpreter does."""
    code = 1
    try:
        act(*args)
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def forking(
    target: Callable[[Unpack[Ts]], T],
    world_size: int | None,
    *args: Unpack[Ts],
    env: Mapping[str, str] | None = None,
) -> Iterator["Forks[T]"]:
    """The processes while they run; killed at the end. World size None: one, without a group."""
    context = forkserver()
    with tempfile.TemporaryDirectory(prefix="dcp_mem-forks-") as directory:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
        job = pickle.dumps((target, args))
        processes = [
            context.Process(
                target=_live, args=(job, Path(directory), rank, world_size, environment)
            )
            for rank in range(world_size or 1)
        ]
        try:
            for process in processes:
                process.start()
            yield Forks(processes, Path(directory))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


class Forks(Generic[T]):
    """Running processes, one for each rank."""

    def __init__(self, processes: Sequence[ForkServerProcess], directory: Path) -> None:
        self._processes, self._directory = processes, directory

    def pid(self, rank: int = 0) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int = 0) -> None:
        """End one with SIGKILL, and wait until it is gone."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def join(self, timeout: float = 60.0) -> list[T]:
        """What every rank returns. Fails with their output where one raises, dies or hangs."""
        deadline, doomed = time.monotonic() + timeout, False
        while time.monotonic() < deadline and any(
            each.exitcode is None for each in self._processes
        ):
            if any(each.exitcode for each in self._processes) and not doomed:
                doomed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        hung = [each for each in self._processes if each.exitcode is None]
        for process in hung:
            os.kill(process.pid or 0, _DUMP_STACKS)
        if hung:
            time.sleep(_DUMP_SECONDS)
        outputs = [self._output(rank) for rank in range(len(self._processes))]
        if hung or any(each.exitcode for each in self._processes):
            ends = [
                f"--- rank {rank}:"
                f" {'HUNG' if each in hung else f'exit code {each.exitcode}'}\n{output}"
                for rank, (each, output) in enumerate(zip(self._processes, outputs, strict=True))
            ]
            raise AssertionError("\n".join(["a forked process failed", *ends]))
        for rank, output in enumerate(outputs):
            print("".join(f"[rank {rank}] {line}\n" for line in output.splitlines()), end="")
        return [
            pickle.loads((self._directory / f"{rank}.returned").read_bytes())
            for rank in range(len(self._processes))
        ]

    def _output(self, rank: int) -> str:
        path = self._directory / f"{rank}.output"
        return path.read_text(errors="replace")[-_OUTPUT_CHARACTERS:] if path.exists() else ""


def _live(
    job: bytes, directory: Path, rank: int, world_size: int | None, environment: dict[str, str]
) -> None:
    """The life of one process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    os.environ["FORK_RANK"] = str(rank)
    output = os.open(directory / f"{rank}.output", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    faulthandler.register(_DUMP_STACKS, 2)
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    with (directory / f"{rank}.returned").open("wb") as returned:  # now: it may become another user
        try:
            returned.write(pickle.dumps(_act(job, directory, rank, world_size)))
        except BaseException:
            traceback.print_exc()
            sys.exit(1)


def _act(job: bytes, directory: Path, rank: int, world_size: int | None) -> object:
    import torch
    import torch.distributed as dist

    target, args = pickle.loads(job)
    if world_size is None:
        return target(*args)
    torch.set_num_threads(1)
    if os.environ.get("FORK_BACKEND") == "none":
        _join_without_backend(directory, rank, world_size)
        return target(*args)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # one that ended sooner, with little to do, would break off the others' connecting
    dist.barrier()
    result = target(*args)
    leave_group()
    return result


def _join_without_backend(directory: Path, rank: int, world_size: int) -> None:
    """Join a group whose collectives do nothing, for ranks that are too many for gloo's sockets.

    Its store is real.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    port = directory / "port"
    if rank == 0 and not os.fork():
        _serve_store(port)
    while not port.exists():
        time.sleep(_POLL_SECONDS)
    store = dist.TCPStore(
        "127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False
    )
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)


def _serve_store(port: Path) -> NoReturn:
    """Serve a store in a process of its own, as torchrun's agent does, until its parent ends."""
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.with_suffix(".part").write_text(str(served.port))
    port.with_suffix(".part").rename(port)
    while True:
        signal.pause()
