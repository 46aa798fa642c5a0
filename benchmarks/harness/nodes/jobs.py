"""A function run on a rank of each of several nodes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from benchmarks.harness.nodes import rank as rank_process
from benchmarks.harness.nodes.cluster import INTERFACE, MEMORY, Cluster, running_cluster
from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.procfs import available_bytes
from benchmarks.harness.runs import BENCHMARKS
from benchmarks.harness.scratch import MEMORY_MARGIN, Skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.harness.processes import Rank

S = TypeVar("S")
T = TypeVar("T")

PATIENCE = 60.0
"""Seconds that a rank waits for other ranks."""
LINKS = (None, "4gbit")
"""Without a limit, all nodes share the machine's cores for the network. With it, the cores have
time to spare, as they have where nodes are machines."""
_FIRST_PORT = 29500
_POLL_SECONDS = 0.01
_OUTPUT_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes that live, and what they are asked to do.

    Attributes:
        link: Rate of each node's link ("4gbit"); None: without a limit.
    """

    cluster: Cluster
    link: str | None

    def measure(self, measure: Callable[[Rank, S], T], spec: S, *, timeout: float = 300) -> list[T]:
        """Call `measure(rank, spec)` on a rank of each node.

        Args:
            measure: A function at the top of its module.
            timeout: Seconds.

        Returns:
            What the ranks return, by rank.

        Raises:
            MeasurementFailed: A rank failed, or the time ran out; the nodes end with the block
                that made them.
        """
        number = len(list(self.cluster.directory.glob("job*")))
        directory = self.cluster.directory / f"job{number}"
        directory.mkdir()
        (directory / rank_process.JOB).write_bytes(pickle.dumps((measure, spec, PATIENCE)))
        _wait(self._start(directory, number), directory, timeout)
        answers = [
            directory / rank_process.ANSWER.format(rank) for rank in range(len(self.cluster.nodes))
        ]
        return [pickle.loads(answer.read_bytes()) for answer in answers]

    def _start(self, directory: Path, number: int) -> list[subprocess.Popen[bytes]]:
        nodes = self.cluster.nodes
        paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            "DCP_MEM_ROOT": str(MEMORY / "dcp_mem"),
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(_FIRST_PORT + number),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": f"job{number}",  # as if torchrun had started the ranks
        }
        command = [sys.executable, "-m", rank_process.__name__, str(directory)]
        processes = []
        for rank, node in enumerate(nodes):
            with _output(directory, rank).open("wb") as output:
                process = subprocess.Popen(
                    node.namespaces.inside(command),
                    env={**environment, "RANK": str(rank), "GROUP_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            processes.append(process)
        return processes

    def lose(self, number: int) -> None:
        """Lose a node, and put an empty one into its place."""
        self.cluster.nodes[number].lose()
        self.cluster.add()
        self.connect()

    def connect(self) -> None:
        """Give every node its link."""
        if self.link is not None:
            for node in self.cluster.nodes:
                node.throttle(self.link)


def over(link: str | None) -> str:
    """Return what to call a link in a title."""
    return "" if link is None else f", over links of {link.removesuffix('gbit')} Gb/s"


@contextmanager
def nodes(
    count: int, *, memory_bytes: int, huge: str, besides: int = 0, link: str | None = None
) -> Iterator[Nodes]:
    """Make nodes; nothing of them is left at the end.

    Args:
        memory_bytes: Size of each node's tmpfs.
        huge: Its huge pages: "never", "within_size" or "always".
        besides: Bytes that the processes take.
        link: Rate of each node's link ("4gbit"); None: without a limit.

    Raises:
        Skipped: Memory, permissions or programs are missing.
    """
    needed = count * memory_bytes + besides
    free = available_bytes() - MEMORY_MARGIN
    if free < needed:
        raise Skipped(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free")
    with running_cluster(count, memory_bytes=memory_bytes, huge=huge) as cluster:
        found = Nodes(cluster, link)
        found.connect()
        yield found


def _wait(processes: list[subprocess.Popen[bytes]], directory: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise MeasurementFailed(_said(directory, failed[0]))
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"took more than {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise MeasurementFailed(_said(directory, failed[0]))


def _output(directory: Path, rank: int) -> Path:
    return directory / f"output-{rank}"


def _said(directory: Path, rank: int) -> str:
    """What a rank has printed last; its last line names the error."""
    text = _output(directory, rank).read_text(errors="replace")[-_OUTPUT_CHARACTERS:].rstrip()
    return f"rank {rank}:\n{text or 'ended without a word'}"
