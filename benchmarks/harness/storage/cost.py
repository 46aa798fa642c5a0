"""What a route costs the process that takes it: CPU, memory, time."""

from __future__ import annotations

import gc
import os
import resource
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from benchmarks.harness.procfs import Growth, resident, watching
from benchmarks.harness.samples import Sample
from benchmarks.harness.storage import contents, source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.storage.source import Segment
    from benchmarks.harness.storage.targets import Target

GB = 1e9
SMALL_BYTES = 1 << 20
LOOK_SECONDS = 0.01


class Way(Protocol):
    """A client that moves the segments: entered before the clock starts, called while it runs.

    An upload reads the segments. A read overwrites them with the target's objects of their names.
    """

    def __call__(
        self, target: Target, segments: Sequence[Segment]
    ) -> AbstractContextManager[Callable[[], None]]: ...


@dataclass(frozen=True, slots=True)
class Route:
    """A way by the names of its module and function: only the process that takes it imports it.

    Attributes:
        kinds: Targets that it works with.
        needs: Packages that it needs.
        leaves_objects: Whether the target has the objects after an upload.
    """

    name: str
    module: str
    function: str
    kinds: tuple[str, ...]
    needs: tuple[str, ...] = ()
    leaves_objects: bool = True

    def way(self) -> Way:
        way: Way = getattr(
            import_module(f"benchmarks.harness.storage.routes.{self.module}"), self.function
        )
        return way


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process measures.

    Attributes:
        fill: A route that uploads the objects first, for a route that reads them.
    """

    route: Route
    target: Target
    directory: Path
    repeats: int
    fill: Route | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a route costs.

    Attributes:
        cpu: Seconds per GB, user and system, of the process and of its children that have ended.
        rate: GB/s.
        anonymous: Peak growth of RssAnon, in bytes, since the client had moved something small.
        total: The same of RssAnon, RssShmem and RssFile together.
    """

    cpu: Sample
    rate: Sample
    anonymous: int
    total: int


def measure(rank: Rank, spec: Spec) -> Cost:
    """Take a route again and again, in this process.

    Raises:
        AssertionError: The route didn't move all bytes.
    """
    assert rank.world == 1
    way = spec.route.way()
    target = spec.target.below(f"{spec.route.module}-{spec.route.function}")
    small, segments = source.mapped(spec.directory, SMALL_BYTES), source.mapped(spec.directory)
    if spec.fill is not None:
        _once(spec.fill.way(), target, [*small, *segments])
    _once(way, target, small)  # imports, threads and connections are there from here on
    if spec.fill is not None:
        source.mark(segments)
    cost = _rounds(way, target, segments, spec.repeats)
    if spec.fill is not None:
        source.check_overwritten(segments)
    elif spec.route.leaves_objects:
        nbytes, stored = (
            sum(segment.nbytes for segment in segments),
            contents.large_bytes(target, SMALL_BYTES),
        )
        if stored < nbytes:
            raise AssertionError(f"{stored} bytes are there after an upload of {nbytes}")
    contents.remove(target)
    return cost


def _rounds(way: Way, target: Target, segments: Sequence[Segment], repeats: int) -> Cost:
    """Run a round in which memory is watched, then the timed ones: watching takes CPU."""
    nbytes = sum(segment.nbytes for segment in segments)
    cpu, rate = [], []
    with way(target, segments) as move:
        gc.collect()
        before, growth = resident().anonymous, Growth()
        with watching(lambda: [os.getpid()], LOOK_SECONDS) as peaks:
            move()
        peaks.look(os.getpid())
        cost_of_memory = max(0, peaks.anonymous - before), max(0, growth.peak)
        for _ in range(repeats):
            start, cpu_start = time.perf_counter(), _cpu_seconds()
            move()
            rate.append(nbytes / GB / (time.perf_counter() - start))
            cpu.append((_cpu_seconds() - cpu_start) / (nbytes / GB))
        return Cost(Sample(tuple(cpu)), Sample(tuple(rate)), *cost_of_memory)


def _once(way: Way, target: Target, segments: Sequence[Segment]) -> None:
    with way(target, segments) as move:
        move()


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
