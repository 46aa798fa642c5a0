"""Run the training script under torchrun and read back what its ranks recorded."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp_mem.demo.journal import Entry, read_journal

LOG_TAIL_LINES: Final = 40


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of torchrun: how many ranks, how many restarts, and what the script is told."""

    ranks: int
    max_restarts: int
    arguments: tuple[str, ...]
    records: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """The journals of all ranks, by rank, and the Unix time at which torchrun was started."""

    journals: tuple[list[Entry], ...]
    begun: float
    seconds: float


class RunFailedError(Exception):
    """A run ended in an error that no restart cured."""

    def __init__(self, returncode: int, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        super().__init__(f"torchrun exited with {returncode}; the end of its log:")
        self.log_tail = "\n".join(lines[-LOG_TAIL_LINES:])


def run(launch: Launch, on_line: Callable[[str], None]) -> Outcome:
    """Run the script to its end, passing on each line that it prints; or raise RunFailedError.

    Raises RunFailedError.
    """
    log = launch.records / "torchrun.log"
    begun = time.time()
    with log.open("w", encoding="utf-8") as errors:
        returncode = follow(command(launch), environment(launch.ranks), errors.fileno(), on_line)
    if returncode != 0:
        raise RunFailedError(returncode, log)
    journals = tuple(read_journal(launch.records, rank) for rank in range(launch.ranks))
    return Outcome(journals, begun, time.time() - begun)


def command(launch: Launch) -> list[str]:
    """Return the command line of torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"),
        *(f"--nproc-per-node={launch.ranks}", f"--max-restarts={launch.max_restarts}"),
        *("-m", "dcp_mem.demo.train", f"--journal={launch.records}", *launch.arguments),
    ]


def environment(ranks: int) -> dict[str, str]:
    """Return this process's environment, and what several ranks on one machine need."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    added = {
        "OMP_NUM_THREADS": str(threads),
        # Without it, restarted workers find the addresses that gloo published before the
        # restart in the store that torchrun keeps for them, and fail to connect (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if sys.platform == "linux":
        added["GLOO_SOCKET_IFNAME"] = "lo"  # a fresh machine may not resolve its own name
    return os.environ | added


def follow(
    arguments: list[str],
    variables: dict[str, str],
    errors: int,
    on_line: Callable[[str], None],
) -> int:
    """Run a command, handing on its output line by line; return its exit code.

    The command doesn't outlive the caller: it is terminated when an exception passes through.
    """
    with subprocess.Popen(
        arguments, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                on_line(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    return process.returncode
