"""Programs inside of a node's namespaces, at the price of a fork.

    program = Program(holder, output, environment, torchrun, arguments, rank_main)

A program is forked from the server of `tests.support.processes.forks`, which has imported torch,
and enters the namespaces of the process `holder`, as nsenter does. torchrun is torch's own there,
with one difference: where it would start an interpreter for a rank, the rank is forked by a process
that torchrun's itself was forked beside. So a rank has nothing of torchrun's: no threads, no
connections, and a session of its own.
"""

import ctypes
import os
import pickle
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from typing_extensions import TypeVarTuple, Unpack

from tests.support import REPOSITORY
from tests.support.processes.forks import become, end_after, forkserver, take

Ts = TypeVarTuple("Ts")

# The mounts come last: entering them loses this machine's /proc.
_KINDS = (
    "net",
    "uts",
    "ipc",
    "pid",
    "mnt",
)
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_POLL_SECONDS = 0.005
_MESSAGE_BYTES = 1 << 20
_TORCHRUN, _RANK = "torchrun", "rank"
_RENAMED = "pt_elastic"  # what torch calls the process, once torchrun has begun

_libc = ctypes.CDLL(None, use_errno=True)


class Program:
    """A running program. Whoever starts one kills it, or waits for its end."""

    def __init__(
        self,
        holder: int,
        output: Path,
        environment: Mapping[str, str],
        act: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
    ) -> None:
        """holder: id of a process that is in the namespaces.

        environment: all of it. act: defined at module level.
        """
        self._process = forkserver().Process(
            target=_enter, args=(holder, output, dict(environment), act, args)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The id of the process outside, which waits for the program and ends as it does."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs, and of a signal its negative number."""
        return self._process.exitcode

    def wait(self) -> int:
        """The exit code, once it has ended."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def is_torchrun(process: psutil.Process) -> bool:
    """Whether this is a node's torchrun."""
    return process.name() in (_TORCHRUN, _RENAMED)


def is_rank(process: psutil.Process) -> bool:
    """Whether this is a rank that a node's torchrun has started."""
    return bool(process.name() == _RANK)


def torchrun(arguments: Sequence[str], rank: Callable[[Sequence[str]], object]) -> None:
    """Run torchrun; each rank calls `rank` with its arguments, instead of an interpreter."""
    forks = _Forks(rank)
    _be_called(_TORCHRUN)

    def popen(
        _: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]
    ) -> _Rank:
        return forks.start(command, environment)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    run.main(list(arguments))


class _Forks:
    """Forks ranks, in a process that is there for nothing else; torchrun becomes their parent."""

    def __init__(self, rank: Callable[[Sequence[str]], object]) -> None:
        self._line, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._line.close()
            end_after(_serve, line, rank)
        line.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> "_Rank":
        # What detaches itself later, as the flush agent does, has to go to the namespaces' first
        # process.
        _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        try:
            self._line.send(pickle.dumps((tuple(command), dict(environment))))
            return _Rank(command, int(self._line.recv(_MESSAGE_BYTES)))
        finally:
            _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0))


class _Rank:
    """What torchrun asks of a Popen."""

    def __init__(self, command: Sequence[str], pid: int) -> None:
        self.args, self.pid = command, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


def _serve(line: socket.socket, rank: Callable[[Sequence[str]], object]) -> None:
    """Fork a rank for each message, until torchrun has ended."""
    while message := line.recv(_MESSAGE_BYTES):
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork() == 0:
                end_after(_be_rank, line, between, message, rank)
            os._exit(0)
        os.waitpid(between, 0)


def _be_rank(
    line: socket.socket, between: int, message: bytes, rank: Callable[[Sequence[str]], object]
) -> None:
    os.setsid()
    while os.getppid() == between:  # torchrun may wait for its own children alone
        time.sleep(_POLL_SECONDS)
    command, environment = pickle.loads(message)
    line.send(str(os.getpid()).encode())
    line.close()
    _be_called(_RANK)
    take(environment)
    rank(command)


def _enter(
    holder: int,
    output: Path,
    environment: Mapping[str, str],
    act: Callable[..., object],
    args: Sequence[object],
) -> None:
    """The life of the process outside."""
    become(environment, output)
    for space in [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in _KINDS]:
        _check(_libc.setns(space, 0))
        os.close(space)
    os.chdir(REPOSITORY)
    child = os.fork()
    if child == 0:
        end_after(act, *args)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _be_called(name: str) -> None:
    _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0))


def _check(answer: int) -> None:
    if answer:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
