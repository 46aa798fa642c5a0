"""What a save by a settled plan sends between ranks, and rank 0's CPU time in large jobs.

Bytes are counted where the wire gets them, in real saves. For many ranks, rank 0 is real (writer,
memory, files). What the other ranks send it along the tree is made from rank 0's own messages; the
time for that is left out. So is the work of the network, which isn't there.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dcp_mem
from benchmarks.harness.played_ranks import ManyRanks
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import State, Workload, trained
from benchmarks.harness.tables import Figure, Part, Row, Section, attempt, duration, size, within
from dcp_mem import writer as writer_module
from dcp_mem.comm.bridge.calls import DcpCall
from dcp_mem.comm.link import LENGTH_NBYTES
from dcp_mem.comm.peers import TcpWire

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Saves by a settled plan"
SENT = (Workload(4 * MIB, 100), Workload(40 * MIB, 20_000))
SENT_LIMIT = 1024
CPU_LIMIT = 0.001
HUNDRED = 100
CPU_TENSORS = (64, 2000)
LOCAL_SHAPE = (4, 64)
BYTES_PER_ITEM = 700
"""Bytes of memory for each item of each rank: more than a first plan takes."""
WARM_UPS = 6
USUAL = Counter(all_reduce=3)
"""Calls to the other ranks in a save without changes: ballot, receipts, publication."""


def run(settings: Settings) -> Section:
    worlds = (2,) if settings.quick else (2, 8)
    sizes = (128, 1024) if settings.quick else (128, 1024, 4096)
    parts = [
        attempt("steady", f"sent by a save, {ranks} ranks", partial(_sent_part, settings, ranks))
        for ranks in worlds
    ]
    parts.append(
        attempt("steady", "rank 0 of many, eight on a node", partial(_cpu_part, settings, sizes))
    )
    return Section(TITLE, parts)


# -- on the wire -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentSpec:
    workload: Workload
    memory: Path
    repeats: int


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a rank sends, without what TCP adds.

    Attributes:
        first: In its first save.
        later: In each later save.
        largest: Largest message of the later saves.
    """

    first: int
    later: Sequence[int]
    largest: int


class _Counted:
    """Counts what this rank sends to other ranks.

    Attributes:
        nbytes: Sent to all other ranks together, with the lengths of messages.
        largest: Largest message.
    """

    def __init__(self) -> None:
        self.nbytes = self.largest = 0
        self._send = TcpWire.send

    def send(self, wire: TcpWire, ranks: Sequence[int], data: Any) -> None:
        nbytes = len(memoryview(data)) + LENGTH_NBYTES
        self.nbytes += nbytes * len(ranks)
        self.largest = max(self.largest, nbytes)
        self._send(wire, ranks, data)


def _sent_part(settings: Settings, ranks: int) -> Part:
    rows, notes = [], []
    for workload in SENT:
        need(settings.tmpfs, workload.total_bytes * 5)
        with scratch(settings.tmpfs) as directory:
            spec = SentSpec(workload, directory, settings.repeats)
            by_rank = in_fresh_processes(_measure_sent, spec, ranks=ranks)
        later = sum(sum(sent.later) for sent in by_rank) / ranks / settings.repeats
        rows.append(
            Row(
                f"{workload.tensors:,} tensors: sent per rank and save",
                dcp_mem=f"{later:,.0f} B",
                target=f"≤ {SENT_LIMIT:,} B",
                met=later <= SENT_LIMIT,
            )
        )
        first = sum(sent.first for sent in by_rank) / ranks
        rows.append(Row(f"{workload.tensors:,} tensors: the first save", dcp_mem=size(first)))
        most, largest = (
            max(max(sent.later) for sent in by_rank),
            max(sent.largest for sent in by_rank),
        )
        notes.append(
            f"{workload.tensors:,} tensors: at most {most:,} B in a save, by one rank; "
            f"largest message {largest} B"
        )
    return Part(rows, [*notes, "besides, each rank asks the job's store for one key per save"])


def _measure_sent(rank: Rank, spec: SentSpec) -> Sent:
    counted = _Counted()

    def send(wire: TcpWire, ranks: Sequence[int], data: Any) -> None:
        counted.send(wire, ranks, data)

    state = trained(spec.workload, rank)
    with (
        patch.object(TcpWire, "send", send),
        closing(Saves(state, memory=spec.memory, save=dcp_mem.save)) as saves,
    ):
        saves.save()
        first, later = counted.nbytes, []
        for number in range(WARM_UPS + spec.repeats):
            before, counted.largest = counted.nbytes, 0 if number == WARM_UPS else counted.largest
            saves.save()
            later.append(counted.nbytes - before)
        rank.barrier()
    return Sent(first, later[WARM_UPS:], counted.largest)


# -- rank 0 of many ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuSpec:
    """What a process measures.

    Attributes:
        sizes: Ranks of the jobs.
    """

    tensors: int
    sizes: Sequence[int]
    memory: Path
    repeats: int


def _cpu_part(settings: Settings, sizes: Sequence[int]) -> Part:
    seconds = {tensors: _cpu_of(settings, tensors, (1, *sizes)) for tensors in CPU_TENSORS}
    rows = []
    for ranks in sizes:
        more = {
            tensors: _per_hundred(found[ranks] - found[1], ranks)
            for tensors, found in seconds.items()
        }
        rows += [
            within(
                f"{ranks:,} ranks, {tensors:,} tensors: CPU of rank 0 per {HUNDRED} ranks",
                sample,
                CPU_LIMIT,
            )
            for tensors, sample in more.items()
        ]
        few, many = more.values()
        rows.append(
            Row(
                f"{ranks:,} ranks: what {CPU_TENSORS[1]:,} tensors take more of that "
                f"than {CPU_TENSORS[0]}",
                dcp_mem=Figure.of(Sample((many.median - few.median,))),
            )
        )
    notes = [
        f"CPU of a save by rank 0, {tensors:,} tensors: "
        + ", ".join(f"of {ranks:,} {duration(sample)}" for ranks, sample in found.items())
        for tensors, found in seconds.items()
    ]
    return Part(rows, notes)


def _per_hundred(sample: Sample, size: int) -> Sample:
    return Sample(tuple(value * HUNDRED / size for value in sample.values))


def _cpu_of(settings: Settings, tensors: int, sizes: Sequence[int]) -> dict[int, Sample]:
    need(settings.tmpfs, sum(sizes) * tensors * BYTES_PER_ITEM)
    with scratch(settings.tmpfs) as directory:
        spec = CpuSpec(tensors, sizes, directory, 3 * settings.repeats)
        return in_fresh_processes(_measure_cpu, spec)[0]


class _Rank0:
    """Rank 0 of a job, and its saves."""

    def __init__(self, size: int, spec: CpuSpec) -> None:
        self._ranks = ManyRanks(size)
        state = _shards(size, spec.tensors)
        self.saves = Saves(state, memory=spec.memory / str(size), save=dcp_mem.save)

    def save(self) -> float:
        """Save, and return the seconds of CPU of the calling thread."""
        ranks = self._ranks
        ranks.calls.clear()
        with patch.object(
            writer_module, "direct_call", lambda *arguments: DcpCall(ranks, ranks.rank)
        ):
            played, start = ranks.played, time.thread_time()
            self.saves.save()
            return time.thread_time() - start - (ranks.played - played)

    def usual_save(self) -> float:
        """Save by the settled plan, and return the seconds of CPU."""
        took = self.save()
        assert self._ranks.calls == USUAL, (
            f"a warm save asked the other ranks for {dict(self._ranks.calls)}"
        )
        return took


def _measure_cpu(rank: Rank, spec: CpuSpec) -> dict[int, Sample]:
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=max(spec.sizes)
    )  # for meshes alone
    with ExitStack() as stack:
        of_size = {size: _Rank0(size, spec) for size in spec.sizes}
        for one in of_size.values():
            stack.enter_context(closing(one.saves))
            for _ in range(WARM_UPS):
                one.save()
        samples = rank.in_turn(
            {str(size): one.usual_save for size, one in of_size.items()},
            repeats=spec.repeats,
            warm_ups=2,
        )
        found = {size: samples[str(size)] for size in spec.sizes}
    dist.destroy_process_group()
    return found


def _shards(ranks: int, tensors: int) -> State:
    """Return rank 0's part of tensors that are sharded over all ranks."""
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
    local = [torch.full(LOCAL_SHAPE, float(index)) for index in range(tensors)]
    tree: dict[str, Any] = {
        f"layer.{index:05}.weight": DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for index, tensor in enumerate(local)
    }
    return State(tree, local)
