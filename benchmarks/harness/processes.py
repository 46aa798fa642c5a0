"""Measurements in fresh processes: one per rank, connected by gloo where there are several."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from benchmarks.harness.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import SpawnProcess

SILENCE, MOST_SILENCE = 0.02, 5.0
"""Seconds without work of any thread that end a wait for it, and the longest such wait."""
S = TypeVar("S")
T = TypeVar("T")


class MeasurementFailed(Exception):
    """A measuring process raised, was killed or took too long."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the ranks that measure together."""

    rank: int
    world: int
    threads: int

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def together(self, measure: Callable[[], float]) -> float:
        """Return what `measure` returns when all ranks start it together.

        What the measurement before has left to do, checksums say, is over by then on all ranks: in
        a training loop a step lies between them.
        """
        _wait_for_silence()
        self.barrier()
        return measure()

    def in_turn(
        self, measures: Mapping[str, Callable[[], float]], *, repeats: int, warm_ups: int = 0
    ) -> dict[str, Sample]:
        """Run `measures` one after the other, again and again, and return their figures by name."""
        rounds = [
            [self.together(one) for one in measures.values()] for _ in range(warm_ups + repeats)
        ]
        samples = map(Sample, zip(*rounds[warm_ups:], strict=True))
        return dict(zip(measures, samples, strict=True))


def _wait_for_silence() -> None:
    """Return once this process's threads do nothing any more, or after `MOST_SILENCE` seconds."""
    end = time.monotonic() + MOST_SILENCE
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(SILENCE)
        if time.process_time() - before < SILENCE / 10:
            return


@dataclass(frozen=True, slots=True)
class _Job(Generic[S, T]):
    """What a fresh process is given."""

    measure: Callable[[Rank, S], T]
    spec: S
    rank: Rank
    rendezvous: Path


def in_fresh_processes(
    measure: Callable[[Rank, S], T], spec: S, *, ranks: int = 1, timeout: float = 600
) -> list[T]:
    """Call `measure(rank, spec)` in one fresh process per rank.

    The cores are shared out evenly as torch threads.

    Args:
        measure: A function at the top of its module.
        timeout: Seconds.

    Returns:
        What the ranks return, by rank.

    Raises:
        MeasurementFailed: A rank failed, or the time ran out; the processes have been ended.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="dcp_mem-bench-rendezvous-") as directory:
        rendezvous = Path(directory, "store")
        try:
            for index in range(ranks):
                here, there = context.Pipe()
                job = _Job(measure, spec, Rank(index, ranks, threads), rendezvous)
                process = context.Process(target=_run, args=(there, job))
                process.start()
                there.close()
                processes.append(process)
                connections.append(here)
            return _answers(processes, connections, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


def _answers(
    processes: list[SpawnProcess], connections: list[Connection], deadline: float
) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        pending = [c for i, c in enumerate(connections) if i not in answers]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise MeasurementFailed("took too long")
        for connection in ready:
            index = connections.index(connection)  # type: ignore[arg-type]
            answers[index] = _answer(index, processes[index], connections[index])
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [answers[index] for index in range(len(connections))]


def _answer(index: int, process: SpawnProcess, connection: Connection) -> Any:
    try:
        failed, answer = connection.recv()
    except EOFError:
        process.join(5)
        raise MeasurementFailed(f"rank {index} ended with {process.exitcode}") from None
    if failed:
        raise MeasurementFailed(f"rank {index}:\n{answer}")
    return answer


def _run(connection: Connection, job: _Job[S, T]) -> None:
    """Run a job in a fresh process, and send its answer."""
    try:
        _set_up(job.rank, job.rendezvous)
        answer = job.measure(job.rank, job.spec)
        if job.rank.world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        connection.send((True, traceback.format_exc()))
    else:
        connection.send((False, answer))
    connection.close()


def _set_up(rank: Rank, rendezvous: Path) -> None:
    warnings.simplefilter("ignore")  # torch warns on every save without a process group
    torch.set_num_threads(rank.threads)
    torch.ones(1 << 22).clone()  # the pool of threads is up before anything is timed
    os.environ["TORCHELASTIC_RUN_ID"] = rendezvous.parent.name  # as if torchrun had started this
    if rank.world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank.rank, world_size=rank.world
        )
