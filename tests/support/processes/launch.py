"""Functions run in fresh processes: one alone, or the ranks of a process group.

    losses = run_ranks(train, 2, url, timeout=30)               # what each rank returned
    outcomes = run_ranks(save_and_die, 2, url, expect_signal=signal.SIGKILL)
    state = run_fresh(load, url)                                # one process, no process group

Processes are forked from the server of `tests.support.processes.forks`, and end as interpreters do.
Functions and arguments are pickled, so functions are defined at module level. No process outlives a
call: ranks and their children are killed, but for those that detached themselves on purpose, as the
flush agent does; the `memory_root` fixture ends that one. Warnings from dcp_mem are errors in the
ranks too.

Programs that begin as users' do have an interpreter of their own, and perhaps torchrun:

    run = run_python(*TORCHRUN, script, root, timeout=60)       # its code, and what it printed
    assert ends(run, r"rank . ends with [0-9a-f]{64}") == undisturbed
"""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import torch.distributed as dist
from typing_extensions import TypeVarTuple, Unpack

from tests.support import REPOSITORY
from tests.support.processes.forks import become, end_after, forkserver, leave_group

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TETHER = ("setpriv", "--pdeathsig", "KILL", "--")
"""Put before a command, this has the kernel kill it when its parent ends, however it ends."""

TORCHRUN = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Put before a script, or `-m` and a module, this has `run_python` run it on two ranks."""

_DUMP_STACKS = signal.SIGRTMAX  # Leaves the signals to the tests that jobs and schedulers use.
_DUMP_SECONDS = 0.5
_CHILDREN_SECONDS = 2.0  # Of a process that no init reaps no more than this is waited for.
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.01
_OUTPUT_BYTES = 16384


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A process that did not return from its function, or not end well after it."""

    rank: int
    exit_code: int | None
    """None where a signal ended it, or the launcher did."""
    signal: signal.Signals | None
    """None where it exited, or the launcher ended it."""
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


@overload
def run_ranks(
    target: Callable[[Unpack[Ts]], T],
    world_size: int,
    *args: Unpack[Ts],
    timeout: float = ...,
    env: Mapping[str, str] | None = ...,
    expect_signal: None = ...,
) -> list[T]: ...


@overload
def run_ranks(
    target: Callable[[Unpack[Ts]], T],
    world_size: int,
    *args: Unpack[Ts],
    timeout: float = ...,
    env: Mapping[str, str] | None = ...,
    expect_signal: signal.Signals,
) -> list[T | RankDeath]: ...


def run_ranks(
    target: Callable[[Unpack[Ts]], T],
    world_size: int,
    *args: Unpack[Ts],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect_signal: signal.Signals | None = None,
) -> Any:
    """Run `target(*args)` on every rank of a fresh gloo process group; outcomes by rank.

    Without `expect_signal` every rank has to return; with it at least one has to die of that
    signal, and the others return or die as they may. `timeout` is in seconds and covers the start
    of the processes; once a rank has died unexpectedly the others get 15 s at most.

    Raises RanksFailed, and RanksHung at the timeout.
    """
    with launched(target, world_size, *args, env=env) as ranks:
        return ranks.join(timeout=timeout, expect_signal=expect_signal)


@overload
def run_fresh(
    target: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    timeout: float = ...,
    env: Mapping[str, str] | None = ...,
    expect_signal: None = ...,
) -> T: ...


@overload
def run_fresh(
    target: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    timeout: float = ...,
    env: Mapping[str, str] | None = ...,
    expect_signal: signal.Signals,
) -> RankDeath: ...


def run_fresh(
    target: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    expect_signal: signal.Signals | None = None,
) -> Any:
    """Run `target(*args)` in one fresh process without a process group; else as `run_ranks`."""
    with launched(target, None, *args, env=env) as ranks:
        (outcome,) = ranks.join(timeout=timeout, expect_signal=expect_signal)
        return outcome


@contextlib.contextmanager
def launched(
    target: Callable[[Unpack[Ts]], T],
    world_size: int | None,
    *args: Unpack[Ts],
    env: Mapping[str, str] | None = None,
) -> Iterator["Ranks[T]"]:
    """The ranks while they run, for tests that act on them from outside; killed at the end.

    `world_size=None` is one process without a process group.
    """
    if target.__module__ == "__main__":
        raise ValueError(f"{target.__name__} is in __main__, where no other process can import it")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp_mem-ranks-")))
        (directory / "job").write_bytes(pickle.dumps((target, world_size, args)))
        environment = {**os.environ, **_environment(world_size), **(env or {})}
        yield Ranks(
            [
                stack.enter_context(_Process(directory, rank, environment))
                for rank in range(world_size or 1)
            ]
        )


class Ranks(Generic[T]):
    """Running ranks."""

    def __init__(self, processes: Sequence["_Process"]) -> None:
        self._processes = processes

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank; one that has ended ignores it."""
        self._processes[rank].send(number)

    def is_running(self, rank: int) -> bool:
        return self._processes[rank].exit_code() is None

    def join(
        self, *, timeout: float = 60.0, expect_signal: signal.Signals | None = None
    ) -> list[T | RankDeath]:
        """Wait for all ranks and return their outcomes, as `run_ranks` does.

        Raises RanksFailed, and RanksHung at the timeout.
        """
        self._wait(time.monotonic() + timeout, expect_signal)
        outcomes, hung = self._outcomes()
        deaths = [outcome for outcome in outcomes if isinstance(outcome, RankDeath)]
        died = [death.rank for death in deaths if not death.hung]
        if died and expect_signal is None:
            raise RanksFailed(f"ranks {died} died", outcomes)
        if hung:
            ranks = [process.rank for process in hung]
            raise RanksHung(f"ranks {ranks} have not ended within {timeout:.0f} s", outcomes)
        if expect_signal is not None and expect_signal not in [death.signal for death in deaths]:
            raise RanksFailed(f"no rank died of {expect_signal.name}", outcomes)
        for process in self._processes:
            process.show_output()
        return outcomes

    def ended(self, timeout: float = 60.0) -> list[T | RankDeath]:
        """Wait for all ranks and return their outcomes, whatever they are.

        Raises RanksHung at the timeout.
        """
        deadline = time.monotonic() + timeout
        while any(each.exit_code() is None for each in self._processes):
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        outcomes, hung = self._outcomes()
        for process in self._processes:
            process.show_output()
        if hung:
            ranks = [process.rank for process in hung]
            raise RanksHung(f"ranks {ranks} have not ended within {timeout:.0f} s", outcomes)
        return outcomes

    def _outcomes(self) -> tuple[list[Any], "list[_Process]"]:
        """The outcomes, and the processes that hung, which are killed."""
        hung = self._kill_hung()
        return [process.outcome(hung=process in hung) for process in self._processes], hung

    def _wait(self, deadline: float, expect_signal: signal.Signals | None) -> None:
        """Wait until all have ended, or the deadline; an unexpected death brings that forward."""
        doomed = False
        while time.monotonic() < deadline:
            exit_codes = [process.exit_code() for process in self._processes]
            if None not in exit_codes:
                break
            if any(exit_codes) and expect_signal is None and not doomed:
                doomed = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)

    def _kill_hung(self) -> "list[_Process]":
        """Have all that still run write down their stacks, and kill them."""
        hung = [process for process in self._processes if process.exit_code() is None]
        for process in hung:
            process.send(signal.SIGCONT)
            process.send(_DUMP_STACKS)
        if hung:
            time.sleep(_DUMP_SECONDS)
        for process in hung:
            process.send(signal.SIGKILL)
        return hung


class _Process:
    """One rank's process and the files through which it answers; use as a context manager."""

    def __init__(self, directory: Path, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._returned = directory / f"{rank}.returned"
        self._raised = directory / f"{rank}.raised"
        self._output = directory / f"{rank}.output"
        self._output.touch()
        self._process = forkserver().Process(
            target=_live, args=(directory, rank, dict(environment))
        )
        self._process.start()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        # A killed rank's children are in its group, which keeps its id until they are gone too.
        deadline = time.monotonic() + _CHILDREN_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._pid, signal.SIGKILL)
                time.sleep(_POLL_SECONDS)

    def send(self, number: signal.Signals) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def exit_code(self) -> int | None:
        """None while it runs; of a signal, its negative number."""
        return self._process.exitcode

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def outcome(self, *, hung: bool) -> Any:
        """What it returned, or how it died."""
        exit_code = None if hung else self.exit_code()
        if exit_code == 0 and self._returned.exists():
            return pickle.loads(self._returned.read_bytes())
        killed_by = signal.Signals(-exit_code) if exit_code is not None and exit_code < 0 else None
        return RankDeath(
            rank=self.rank,
            exit_code=exit_code if killed_by is None else None,
            signal=killed_by,
            traceback=self._raised.read_text() if self._raised.exists() else "",
            output=self._read_output(),
        )

    def show_output(self) -> None:
        """Put its output where pytest shows it, should the test fail later."""
        for line in self._read_output().splitlines():
            print(f"[rank {self.rank}] {line}")

    def _read_output(self) -> str:
        with self._output.open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - _OUTPUT_BYTES))
            return output.read().decode(errors="replace")


@contextlib.contextmanager
def running_python(
    *command: str | Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """An interpreter while it runs, its errors with its output; ended at the end of the block.

    It gets SIGTERM then: torchrun ends its ranks, which SIGKILL would leave.
    """
    with subprocess.Popen(
        [*TETHER, sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, **_environment(2), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()  # else a full pipe would hold it up


def run_python(
    *command: str | Path, timeout: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run an interpreter; how it ended, and in `stdout` what it printed, its errors among that.

    Raises TimeoutExpired, once it was ended.
    """
    with running_python(*command, env=env) as process:
        output, _ = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def ends(run: "subprocess.CompletedProcess[str]", said: str) -> set[str]:
    """What the two ranks of a run that ended well have said of their end; `said` is a pattern."""
    assert run.returncode == 0, run.stdout
    found = set(re.findall(said, run.stdout))
    assert len(found) == 2, run.stdout
    return found


def _environment(world_size: int | None) -> dict[str, str]:
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "GLOO_SOCKET_IFNAME": "lo"}
    if (world_size or 1) > 1:
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def _live(directory: Path, rank: int, environment: Mapping[str, str]) -> None:
    """The life of one rank's process."""
    become(environment, directory / f"{rank}.output")
    faulthandler.enable()
    faulthandler.register(_DUMP_STACKS)
    end_after(_run, directory, rank)


def _run(directory: Path, rank: int) -> None:
    try:
        target, world_size, args = pickle.loads((directory / "job").read_bytes())
        if world_size is not None:
            store = dist.FileStore(str(directory / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            # one that ended sooner, with little to do, would break off the others' connecting
            dist.barrier()
        returned = pickle.dumps(target(*args))
        if dist.is_initialized():
            leave_group()
    except Exception:
        (directory / f"{rank}.raised").write_text(traceback.format_exc())
        raise
    (directory / f"{rank}.returned").write_bytes(returned)
