"""How much of its speed a trainer's Python keeps while a checkpoint is flushed to disk.

A save to `path` returns when the checkpoint lies in memory; the flush goes on in the agent. Here
the trainer then runs a loop until the checkpoint is on disk, and counts. Of two kinds: pure Python,
and small tensor operations, each of which lets go of Python's lock and has to get it back.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import torch_peers
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import file_system, need, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import RATIO, Figure, Part, Row, Section, attempt, compared

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "A trainer's loop while 20,000 tensors are flushed to disk"
WORKLOAD = Workload(1 * GIB, 20_000)
LEAST_KEPT = 0.90
IDLE_SECONDS = 1.0
SETTLE_SECONDS = 0.5
FLUSH_TIMEOUT = 90.0
PYTHON_AT_ONCE = 10_000
OPERATIONS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Spec:
    memory: Path
    disk: Path
    repeats: int
    work: Callable[[], int]


@dataclass(frozen=True, slots=True)
class Spin:
    """Iterations of a loop, and its seconds."""

    iterations: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.iterations / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """Loops.

    Attributes:
        idle: Without a flush: before the first, between them, after the last.
        busy: Beside a flush.
    """

    idle: tuple[Spin, ...]
    busy: tuple[Spin, ...]

    @property
    def kept(self) -> Sample:
        """The share of its speed that the loop kept, compared with the idle loops around it."""
        idle = [(before.rate + after.rate) / 2 for before, after in pairwise(self.idle)]
        return Sample(tuple(spin.rate / rate for spin, rate in zip(self.busy, idle, strict=True)))

    @property
    def flush(self) -> Sample:
        return Sample(tuple(spin.seconds for spin in self.busy))


def run(settings: Settings) -> Section:
    return Section(
        TITLE,
        [
            attempt("slowdown", "pure Python", partial(_part, settings, python_work)),
            attempt("slowdown", "small tensor operations", partial(_part, settings, tensor_work)),
        ],
    )


def python_work() -> int:
    """Do some pure Python, and return the number of iterations."""
    value = 1
    for _ in range(PYTHON_AT_ONCE):
        value = (value * 31 + 7) % 1_000_003
    return PYTHON_AT_ONCE


def tensor_work() -> int:
    """Do some small tensor operations, and return their number."""
    value = torch.zeros(16)
    for _ in range(OPERATIONS_AT_ONCE):
        value.add_(1)
    return OPERATIONS_AT_ONCE


def _part(settings: Settings, work: Callable[[], int]) -> Part:
    need(settings.tmpfs, WORKLOAD.total_bytes * 5)
    repeats, torch_repeats = (3, 1) if settings.quick else (5, 2)
    with scratch(settings.tmpfs) as memory, scratch(settings.disk) as disk:
        kind = file_system(disk)
        measured = in_fresh_processes(_measure, Spec(memory, disk / "dcp_mem", repeats, work))[0]
        spec = Spec(memory, disk / "torch", torch_repeats, work)
        peer = in_fresh_processes(_measure_torch, spec)[0]
    return Part([_row(measured, peer)], _notes(measured, peer, kind))


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(WORKLOAD, rank)
    idle, busy = [_idle(spec.work)], []
    with closing(Saves(state, memory=spec.memory, path=spec.disk)) as saves:
        for _ in range(spec.repeats):
            saves.save()
            committed = spec.disk / saves.newest / ".metadata"
            busy.append(_loop(spec.work, committed.exists, FLUSH_TIMEOUT))
            if not committed.exists():
                raise TimeoutError(f"{committed} is not there after {FLUSH_TIMEOUT:.0f} s")
            saves.writer.wait()
            idle.append(_idle(spec.work))
    return Measured(tuple(idle), tuple(busy))


def _measure_torch(rank: Rank, spec: Spec) -> Measured:
    state = trained(WORKLOAD, rank)
    idle, busy = [_idle(spec.work)], []
    for _ in range(spec.repeats):
        running = torch_peers.async_save(state, spec.disk)
        busy.append(_loop(spec.work, running.upload.done, FLUSH_TIMEOUT))
        running.upload.result()
        shutil.rmtree(spec.disk)
        idle.append(_idle(spec.work))
    return Measured(tuple(idle), tuple(busy))


def _idle(work: Callable[[], int]) -> Spin:
    time.sleep(SETTLE_SECONDS)
    nowhere = Path("/nowhere/.metadata")
    return _loop(work, nowhere.exists, IDLE_SECONDS)


def _loop(work: Callable[[], int], done: Callable[[], bool], timeout: float) -> Spin:
    """Work until `done`, for `timeout` seconds at most."""
    iterations = 0
    start = time.perf_counter()
    while not done() and time.perf_counter() - start < timeout:
        iterations += work()
    return Spin(iterations, time.perf_counter() - start)


def _row(measured: Measured, peer: Measured) -> Row:
    kept = Figure.of(measured.kept, RATIO)
    return Row(
        "share of its speed that the loop keeps; floor: idle; peer: dcp.async_save",
        floor=Figure.of(Sample((1.0,)), RATIO),
        dcp_mem=kept,
        ratio=kept,
        target=f"≥ {LEAST_KEPT:.2f}",
        met=kept.median >= LEAST_KEPT,
        peer=Figure.of(peer.kept, RATIO),
        versus_peer=compared(kept.median, peer.kept.median, ("less", "more", "as much")),
    )


def _notes(measured: Measured, peer: Measured, kind: str) -> list[str]:
    each = ", ".join(f"{value:.2f}" for value in measured.kept.values)
    took = (
        f"the loop went on for {measured.flush.median:.1f} s per flush of dcp_mem, "
        f"{peer.flush.median:.1f} s per save of torch's thread executor"
    )
    return [
        f"the loop runs beside everything else on {os.cpu_count()} cores; the disk is {kind}",
        f"flush by flush {each}; the first also starts the agent",
        took,
    ]
