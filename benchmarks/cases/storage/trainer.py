"""How much longer a trainer's steps take while the agent flushes to storage beside it."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.storage.targets import AZURE, S3, running_sink
from benchmarks.harness.tables import Part, Section, attempt, beside_floor, duration
from dcp_mem import MemoryStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "A trainer's steps while a checkpoint is flushed"
WORKLOAD = Workload(2 * GIB, 64)
LIMIT = 1.10
ALONE_SECONDS = 3.0
SETTLE_SECONDS = 0.5
FLUSH_TIMEOUT = 120.0
SIDE = 768
SINK_NICE = 19
"""In a real job the storage is elsewhere: here it only gets what cores are left."""


@dataclass(frozen=True, slots=True)
class Spec:
    memory: Path
    url: str
    repeats: int
    storage_options: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, flush by flush.

    Attributes:
        alone: Median step before and after the flush.
        beside: Median step beside the flush.
        flush: How long the flush took.
    """

    alone: Sample
    beside: Sample
    flush: Sample


def run(settings: Settings) -> Section:
    kinds = (S3,) if settings.quick else (S3, AZURE)
    parts = [
        attempt("trainer", f"{WORKLOAD.name}, {kind}", partial(_part, settings, kind))
        for kind in kinds
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, kind: str) -> Part:
    need(settings.tmpfs, WORKLOAD.total_bytes * 4)
    with scratch(settings.tmpfs) as memory, running_sink(SINK_NICE) as sink:
        target = sink.target(kind)
        spec = Spec(
            memory, target.url, 2 if settings.quick else settings.repeats, target.storage_options
        )
        m = in_fresh_processes(_measure, spec)[0]
    row = beside_floor("a step beside a flush; floor: alone", m.alone, m.beside, at_most=LIMIT)
    note = (
        f"one thread multiplies matrices; a flush took {duration(m.flush)}; the sink runs at nice "
        f"{SINK_NICE}"
    )
    return Part([row], [note])


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(WORKLOAD, rank)
    torch.set_num_threads(1)
    alone, beside, flush = [], [], []
    writer = MemoryStorageWriter(
        spec.url,
        memory_root=spec.memory,
        job="bench",
        keep_memory=1,
        storage_options=spec.storage_options,
    )
    with closing(writer):
        _save(writer, state.tree, "warm-up")  # starts the agent
        writer.wait()
        for number in range(spec.repeats):
            before = _alone()
            _save(writer, state.tree, f"step-{number}")
            steps, took = _beside(writer)
            beside.append(steps.median)
            flush.append(took)
            alone.append((before.median + _alone().median) / 2)
    return Measured(Sample(tuple(alone)), Sample(tuple(beside)), Sample(tuple(flush)))


def _save(writer: MemoryStorageWriter, tree: dict[str, Any], name: str) -> None:
    dcp.save(tree, checkpoint_id=name, storage_writer=writer)


def _alone() -> Sample:
    time.sleep(SETTLE_SECONDS)
    deadline = time.perf_counter() + ALONE_SECONDS
    return _steps(lambda: time.perf_counter() > deadline)


def _beside(writer: MemoryStorageWriter) -> tuple[Sample, float]:
    """Steps until the newest checkpoint is durable, and seconds until then."""
    start = time.perf_counter()
    waiting = threading.Thread(target=writer.wait, kwargs={"timeout": FLUSH_TIMEOUT})
    waiting.start()
    steps = _steps(lambda: not waiting.is_alive())
    waiting.join()
    took = time.perf_counter() - start
    if took >= FLUSH_TIMEOUT:
        raise TimeoutError(f"the flush took more than {FLUSH_TIMEOUT:.0f} s")
    return steps, took


def _steps(done: Callable[[], bool]) -> Sample:
    """Seconds of each step until `done`."""
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    values = []
    while not done():
        start = time.perf_counter()
        torch.mm(a, b)
        values.append(time.perf_counter() - start)
    return Sample(tuple(values))
