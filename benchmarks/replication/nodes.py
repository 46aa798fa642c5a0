"""Nodes to measure on, and jobs that run there."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from benchmarks.processes import MeasurementFailed, Rank
from benchmarks.procfs import available_bytes
from benchmarks.scratch import MEMORY_MARGIN, Skipped
from tests.cluster import Cluster, running_cluster
from tests.servers import ServerUnavailable
from tests.torchrun import JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


S = TypeVar("S")
T = TypeVar("T")

_ERROR = re.compile(r"\[rank\d+\]: ([\w.]+: .*)")

PATIENCE = 60.0
"""Seconds that a rank waits for the others."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes that live, and what they are asked to do. link: what each is connected with ("4gbit"); None: all there is."""

    cluster: Cluster
    link: str | None

    def measure(self, measure: Callable[[Rank, S], T], spec: S, *, timeout: float = 300) -> list[T]:
        """Call `measure(rank, spec)` on a rank of each node; what they return, by rank. Raises MeasurementFailed."""
        job = self.cluster.launch(_as_rank, measure, spec, patience=PATIENCE)
        try:
            return job.results(timeout)
        except JobFailed as error:
            raise MeasurementFailed(_reason(str(error))) from None
        finally:
            job.kill()

    def lose(self, number: int) -> None:
        """Lose a node, and put an empty one into its place."""
        self.cluster.nodes[number].kill()
        self.cluster.add()
        self.connect()

    def connect(self) -> None:
        """Give every node its link."""
        if self.link is not None:
            for node in self.cluster.nodes:
                node.throttle(self.link)


LINKS = (None, "4gbit")
"""Without a limit the cores of this machine are one: they carry all nodes. With it they have time to spare, as elsewhere."""


def over(link: str | None) -> str:
    """What to call that."""
    return "" if link is None else f", over links of {link.removesuffix('gbit')} Gb/s"


@contextmanager
def nodes(count: int, *, memory_bytes: int, huge: str, besides: int = 0, link: str | None = None) -> Iterator[Nodes]:
    """So many nodes with so much tmpfs each; nothing of them is left at the end.

    huge: huge pages of the tmpfs ("never", "within_size", "always"). besides: bytes that the processes take.
    Raises Skipped where there can be none.
    """
    needed = count * memory_bytes + besides
    free = available_bytes() - MEMORY_MARGIN
    if free < needed:
        raise Skipped(f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free")
    try:
        # Jobs print at the end what their ranks have printed; what matters of it is in the error.
        with redirect_stdout(io.StringIO()), running_cluster(count, memory_bytes=memory_bytes, huge=huge) as cluster:
            found = Nodes(cluster, link)
            found.connect()
            yield found
    except ServerUnavailable as reason:
        raise Skipped(str(reason)) from None


def _as_rank(measure: Callable[[Rank, S], T], spec: S) -> T:
    torch.ones(1 << 22).clone()  # the pool of threads is up before anything is timed
    return measure(Rank(dist.get_rank(), dist.get_world_size(), torch.get_num_threads()), spec)


def _reason(text: str) -> str:
    """What failed, with the error that a rank has raised last, if one has."""
    return "\n".join([text, *_ERROR.findall(text)[-1:]])
