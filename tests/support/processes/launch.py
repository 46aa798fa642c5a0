"""Programs that begin as users' do: an interpreter of their own, and perhaps torchrun.

run = run_python(*TORCHRUN, script, root, timeout=60)       # its code, and what it printed
assert ends(run, r"rank . ends with [0-9a-f]{64}") == undisturbed
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support import REPOSITORY
from tests.support.nodes.inside import torchrun
from tests.support.processes.forks import (
    become,
    end_after,
    environment_of,
    forkserver,
)

TETHER = ("setpriv", "--pdeathsig", "KILL", "--")
"""Put before a command, this has the kernel kill it when its parent ends, however it ends."""

TORCHRUN = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
"""Put before a script, or `-m` and a module, this has `run_python` run it on two ranks."""

_ENDED_SECONDS = 20.0


@contextlib.contextmanager
def running_python(
    *command: str | Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """An interpreter while it runs, its errors with its output; ended at the end of the block.

    It gets SIGTERM then: torchrun ends its ranks, which SIGKILL would leave.
    """
    with subprocess.Popen(
        [*TETHER, sys.executable, *command],
        cwd=REPOSITORY,
        env={**os.environ, **environment_of(2), **(env or {})},
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
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter; how it ended, and in `stdout` what it printed, its errors among that.

    Raises TimeoutExpired, once it was ended.
    """
    with running_python(*command, env=env) as process:
        output, _ = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_torchrun(
    *program: str | Path, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, on two ranks, as torchrun does; else as `run_python`.

    torchrun and its ranks are forked, which saves three interpreters and their imports of torch.
    """
    with tempfile.TemporaryDirectory(prefix="dcp_mem-torchrun-") as directory:
        output = Path(directory, "output")
        environment = {**os.environ, **environment_of(2), **(env or {})}
        process = forkserver().Process(
            target=_be_torchrun, args=([*map(str, program)], environment, output)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.terminate()  # it ends its ranks, which SIGKILL would leave
            process.join(_ENDED_SECONDS)
            process.kill()
            raise subprocess.TimeoutExpired([*map(str, program)], timeout, output.read_text())
        return subprocess.CompletedProcess(
            program, process.exitcode, output.read_text(errors="replace")
        )


def _be_torchrun(program: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    become(environment, output)
    os.chdir(REPOSITORY)
    end_after(torchrun, ["--standalone", "--nproc-per-node=2", *program], _be_program)


def _be_program(command: Sequence[str]) -> None:
    """Do what an interpreter does with its arguments; the first two are itself and `-u`."""
    warnings.simplefilter("ignore")
    is_module = command[2] == "-m"
    sys.argv = list(command[3 if is_module else 2 :])
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def ends(run: subprocess.CompletedProcess[str], said: str) -> set[str]:
    """What the two ranks of a run that ended well have said of their end; `said` is a pattern."""
    assert run.returncode == 0, run.stdout
    found = set(re.findall(said, run.stdout))
    assert len(found) == 2, run.stdout
    return found
