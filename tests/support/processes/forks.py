"""Fresh processes at the price of a fork, for tests that need many of them.

    with forking(save, 2, url) as ranks:                # a gloo group of two; None: one, no group
        [first, second] = ranks.join()
    state = forked(load, url)                           # one process, and wait for what it returns

    killed_ranks(save_and_die, 2, url)                  # what returned, and a RankDeath for others

    @on_ranks(2)                                        # all of a test runs on each rank
    def test_a_state_comes_back(places): ...

A server process that has imported torch, and nothing else has happened in, forks one for each
task: what a task leaves in memory, threads and connections is gone with it. Functions and
arguments are pickled, so functions are defined at module level. Ranks that raise or die fail the
test; to look at an error, return it (`raised_by`). No process outlives its ranks, but for those
that detached themselves on purpose, as the flush agent does; the `memory_root` fixture ends that
one. Warnings from dcp_mem are errors in the ranks too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Generic, NoReturn, TypeVar

import psutil
from typing_extensions import TypeVarTuple, Unpack

from tests.support import REPOSITORY

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
_DUMP_STACKS = signal.SIGRTMAX  # leaves the signals to the tests that jobs and schedulers use
_DUMP_SECONDS = 0.5
_CHILDREN_SECONDS = 2.0  # of a process that no init reaps no more than this is waited for
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.005
_OUTPUT_CHARACTERS = 16384
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A process that did not return from its function, or not end well after it."""

    rank: int
    exit_code: int | None
    """None where a signal ended it, or its time was over."""
    signal: signal.Signals | None
    """None where it exited, or its time was over."""
    traceback: str
    """Of the exception that left the function, else empty."""
    output: str = field(repr=False)
    """The end of its standard output and error; where it hung, with the stacks of its threads."""

    @property
    def hung(self) -> bool:
        """Whether it still ran when its time was over."""
        return self.exit_code is None and self.signal is None

    def __str__(self) -> str:
        if self.hung:
            end = "still running, stacks below"
        elif self.signal is not None:
            end = self.signal.name
        else:
            end = f"exit code {self.exit_code}"
        return f"--- rank {self.rank}: {end}\n{self.output.rstrip()}"


class RanksFailed(AssertionError):
    """Ranks died that should not have, or none died that should have."""

    def __init__(self, reason: str, outcomes: Sequence[object]) -> None:
        self.outcomes = tuple(outcomes)
        deaths = [str(outcome) for outcome in outcomes if isinstance(outcome, RankDeath)]
        super().__init__("\n".join([reason, *deaths]))


class RanksHung(RanksFailed):
    """Ranks still ran when the time was over."""


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


def on_ranks(
    world_size: int | str | None, *, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test run on every rank of a fresh gloo group; None: in a process without one.

    The number of ranks may be the name of a parameter of the test. What the test is given has to be
    pickled.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def start(**given: Any) -> None:
            size = given[world_size] if isinstance(world_size, str) else world_size
            where = (test.__module__, test.__qualname__)
            if size is None:
                forked(_play, *where, given, timeout=timeout, env=env)
            else:
                forked_ranks(_play, size, *where, given, timeout=timeout, env=env)

        return start

    return decorate


in_process = on_ranks(None)
"""Has a test run in a process of its own."""


def _play(module: str, name: str, given: Mapping[str, Any]) -> None:
    getattr(_imported(module), name).__wrapped__(**given)


def _imported(module: str) -> ModuleType:
    """Import a module of tests whose asserts say what they have compared."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    if module not in sys.modules:
        install_importhook(get_config()).mark_rewrite(module)
    return importlib.import_module(module)


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
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def killed_ranks(
    target: Callable[[Unpack[Ts]], T],
    world_size: int | None,
    *args: Unpack[Ts],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[T | RankDeath]:
    """How the ranks ended, of which at least one has to die of SIGKILL."""
    with forking(target, world_size, *args, env=env) as ranks:
        outcomes = ranks.ended(timeout)
        if not any(isinstance(one, RankDeath) and one.signal == signal.SIGKILL for one in outcomes):
            raise RanksFailed("no rank died of SIGKILL", outcomes)
        return outcomes


@contextlib.contextmanager
def forking(
    target: Callable[[Unpack[Ts]], T],
    world_size: int | None,
    *args: Unpack[Ts],
    env: Mapping[str, str] | None = None,
) -> Iterator[Forks[T]]:
    """The processes while they run; killed at the end. World size None: one, without a group."""
    ranks = Forks(target, world_size, *args, env=env)
    try:
        yield ranks
    finally:
        ranks.close()


class Forks(Generic[T]):
    """Running processes, one for each rank. Whoever starts them joins or closes them."""

    def __init__(
        self,
        target: Callable[[Unpack[Ts]], T],
        world_size: int | None,
        *args: Unpack[Ts],
        env: Mapping[str, str] | None = None,
        leaves_group: bool = True,
    ) -> None:
        if target.__module__ == "__main__":
            raise ValueError(f"{target.__name__} is in __main__: no other process can import it")
        self._files = tempfile.TemporaryDirectory(prefix="dcp_mem-forks-")
        self._directory = Path(self._files.name)
        job = pickle.dumps((target, world_size, args, leaves_group))
        environment = {**os.environ, **environment_of(world_size), **(env or {})}
        self._processes = [
            forkserver().Process(target=_live, args=(job, self._directory, rank, environment))
            for rank in range(world_size or 1)
        ]
        self._open = list(self._processes)
        try:
            for process in self._processes:
                process.start()
        except BaseException:
            self.close()
            raise

    def pid(self, rank: int = 0) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def is_running(self, rank: int = 0) -> bool:
        return self._processes[rank].exitcode is None

    def send(self, rank: int, number: int) -> None:
        """Send a signal to one rank; one that has ended ignores it."""
        if self.is_running(rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), number)

    def kill(self, rank: int = 0) -> None:
        """End one with SIGKILL, and wait until it is gone."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def wait_until_stopped(self, rank: int, timeout: float = 30.0) -> None:
        """Wait until a rank has stopped itself."""
        deadline = time.monotonic() + timeout
        while self.is_running(rank) and not _is_stopped(self.pid(rank)):
            if time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} has not stopped\n{self._output(rank)}")
            time.sleep(_POLL_SECONDS)

    def join(self, timeout: float = 60.0, *, killed: Collection[int] = ()) -> list[T]:
        """What every rank returns; of those in `killed`, which SIGKILL has to end, a RankDeath.

        Where others raise or die, the rest get 15 s at most. Raises RanksFailed with their output,
        and RanksHung at the timeout.
        """
        outcomes = self._outcomes(timeout, spared=killed)
        dead = [one for one in outcomes if isinstance(one, RankDeath) and not one.hung]
        died = {one.rank for one in dead}
        if unexpected := sorted(died.symmetric_difference(killed)):
            raise RanksFailed(f"ranks {unexpected} {'died' if died else 'live'}", outcomes)
        if not all(one.signal == signal.SIGKILL for one in dead):
            raise RanksFailed("ranks ended in another way than by SIGKILL", outcomes)
        return outcomes

    def ended(self, timeout: float = 60.0) -> list[T | RankDeath]:
        """How every rank ends, whatever that is. Raises RanksHung at the timeout."""
        return self._outcomes(timeout, spared=range(len(self._processes)))

    def close(self) -> None:
        """Kill what still runs, and the children of the ranks with it."""
        processes, self._open = self._open, []
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
                _kill_group(process.pid)
        self._files.cleanup()

    def _outcomes(self, timeout: float, spared: Collection[int]) -> list[Any]:
        """Wait; the death of a rank that isn't spared brings the deadline forward."""
        deadline, doomed = time.monotonic() + timeout, False
        while time.monotonic() < deadline:
            codes = [process.exitcode for process in self._processes]
            if None not in codes:
                break
            if not doomed and any(code and rank not in spared for rank, code in enumerate(codes)):
                doomed, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        hung = self._kill_hung()
        outcomes = [self._outcome(rank, rank in hung) for rank in range(len(self._processes))]
        for rank in range(len(self._processes)):
            lines = self._output(rank).splitlines()
            print("".join(f"[rank {rank}] {line}\n" for line in lines), end="")
        self.close()
        dead = [one for one in outcomes if isinstance(one, RankDeath)]
        if hung and all(one.hung or one.rank in spared for one in dead):
            raise RanksHung(f"ranks {hung} have not ended within {timeout:.0f} s", outcomes)
        return outcomes

    def _kill_hung(self) -> list[int]:
        """Have all that still run write down their stacks, and kill them."""
        hung = [rank for rank in range(len(self._processes)) if self.is_running(rank)]
        for rank in hung:
            self.send(rank, signal.SIGCONT)
            self.send(rank, _DUMP_STACKS)
        if hung:
            time.sleep(_DUMP_SECONDS)
        for rank in hung:
            self.kill(rank)
        return hung

    def _outcome(self, rank: int, hung: bool) -> Any:
        code = self._processes[rank].exitcode or 0
        returned = self._read(f"{rank}.returned")
        if code == 0 and returned:
            return pickle.loads(returned)
        ended_by = signal.Signals(-code) if code < 0 and not hung else None
        return RankDeath(
            rank=rank,
            exit_code=None if hung or ended_by else code,
            signal=ended_by,
            traceback=self._read(f"{rank}.raised").decode(),
            output=self._output(rank),
        )

    def _output(self, rank: int) -> str:
        return self._read(f"{rank}.output").decode(errors="replace")[-_OUTPUT_CHARACTERS:]

    def _read(self, name: str) -> bytes:
        path = self._directory / name
        return path.read_bytes() if path.exists() else b""


def environment_of(world_size: int | None) -> dict[str, str]:
    """What a process of ours is told beside what this one is."""
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo"}
    return environment | ({} if world_size is None else {"OMP_NUM_THREADS": "1"})


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _kill_group(leader: int) -> None:
    """Kill a rank's children: they are in its group, which keeps its id until they are gone."""
    deadline = time.monotonic() + _CHILDREN_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def _live(job: bytes, directory: Path, rank: int, environment: dict[str, str]) -> None:
    """The life of one process."""
    become({**environment, "FORK_RANK": str(rank)}, directory / f"{rank}.output")
    faulthandler.enable(2)
    faulthandler.register(_DUMP_STACKS, 2)
    # The files are opened now: it may become another user.
    with (
        (directory / f"{rank}.returned").open("wb") as returned,
        (directory / f"{rank}.raised").open("w") as raised,
    ):
        end_after(_run, job, directory, rank, returned, raised)


def _run(job: bytes, directory: Path, rank: int, returned: IO[bytes], raised: IO[str]) -> None:
    try:
        value = pickle.dumps(_act(job, directory, rank))
    except Exception:
        raised.write(traceback.format_exc())
        raised.flush()
        raise
    returned.write(value)
    returned.flush()


def _act(job: bytes, directory: Path, rank: int) -> object:
    import torch.distributed as dist

    target, world_size, args, leaves_group = pickle.loads(job)
    if world_size is None:
        return target(*args)
    if os.environ.get("FORK_BACKEND") == "none":
        _join_without_backend(directory, rank, world_size)
        return target(*args)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # one that ended sooner, with little to do, would break off the others' connecting
    dist.barrier()
    result = target(*args)
    if leaves_group and dist.is_initialized():
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
