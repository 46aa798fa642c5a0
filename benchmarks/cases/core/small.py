"""What loads of many small tensors cost, from each place that a checkpoint may lie in.

Expected: from storage, at most twice the CPU time of a load from memory, and that of reading the
bytes; ten times as many tensors cost at most ten times as much; torch's reader costs about seven
times as much as ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_mem
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, slowest_by_name
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.storage.targets import running_server
from benchmarks.harness.tables import Part, Row, Section, attempt, beside_floor, beside_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Loads of many small tensors, CPU seconds"
COUNTS, QUICK_COUNTS = (20_000, 200_000), (2_000, 20_000)
ITEM_BYTES = 1600
"""Of a segment, for a tensor of three floats."""
SERVER, NAME, JOB = "moto", "step-1", "bench"
BYTES, MEMORY, DIRECTORY, S3, PEER = "bytes", "memory", "a directory", "S3", "a peer"
TORCH = "FileSystemReader"
LIMIT = 2.0
PATIENCE = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures, and where it saves to and loads from."""

    directory: Path
    count: int
    repeats: int
    s3: str
    s3_options: Mapping[str, Any] = field(repr=False)

    @property
    def url(self) -> str:
        return str(self.directory / "storage")

    def state(self, value: float) -> dict[str, torch.Tensor]:
        return {f"layer.{index}": torch.full((3,), value * index) for index in range(self.count)}


def run(settings: Settings) -> Section:
    counts = QUICK_COUNTS if settings.quick else COUNTS
    found: dict[int, Mapping[str, Sample]] = {}
    parts = [
        attempt("small", f"{count:,} tensors", partial(_part, settings, count, found))
        for count in counts
    ]
    if len(found) == len(counts):
        parts.append(Part([*_growth(found)], title=f"{counts[1]:,} beside {counts[0]:,}"))
    return Section(TITLE, parts)


def _part(settings: Settings, count: int, found: dict[int, Mapping[str, Sample]]) -> Part:
    need(settings.tmpfs, 8 * count * ITEM_BYTES)
    with scratch(settings.tmpfs) as directory, running_server(SERVER) as server:
        spec = Spec(
            directory=directory,
            count=count,
            repeats=1 if count > QUICK_COUNTS[1] else min(settings.repeats, 5),
            s3=server.url,
            s3_options=server.storage_options,
        )
        (alone,) = in_fresh_processes(_measure, spec, timeout=PATIENCE)
        peers = in_fresh_processes(_measure_peers, spec, ranks=2, timeout=PATIENCE)
    together = slowest_by_name(peers)
    found[count] = {**alone, PEER: together[PEER]}
    floor = alone[MEMORY] + alone[MEMORY] + alone[BYTES]
    return Part(
        [
            *(
                beside_floor(
                    f"from {place}; floor: memory twice, and the bytes", floor, alone[place]
                )
                for place in (DIRECTORY, S3)
            ),
            *(
                beside_floor(f"from {place}; floor: memory", alone[MEMORY], alone[place])
                for place in (DIRECTORY, S3)
            ),
            beside_floor("from a peer, two ranks; floor: memory", together[MEMORY], together[PEER]),
            beside_peer(f"from a directory; peer: {TORCH}", alone[DIRECTORY], alone[TORCH]),
        ],
        [f"bytes: {alone[BYTES].median:.3f} s to read the files of {DIRECTORY}"],
    )


def _growth(found: Mapping[int, Mapping[str, Sample]]) -> list[Row]:
    few, many = sorted(found)
    return [
        beside_floor(
            f"from {place}; floor: {few:,} tensors",
            found[few][place],
            found[many][place],
            at_most=many / few,
            in_turn=False,
        )
        for place in (MEMORY, DIRECTORY, S3, PEER)
    ]


def _measure(rank: Rank, spec: Spec) -> dict[str, Sample]:
    """Save to a directory and to S3, and load from memory and from both."""
    here, empty = spec.directory / "here", spec.directory / "empty"
    _save(spec, here, spec.url, {})
    _save(spec, spec.directory / "s3", spec.s3, spec.s3_options)
    files = [path for path in (spec.directory / "storage" / NAME).rglob("*") if path.is_file()]
    measures: dict[str, Callable[[], float]] = {
        BYTES: partial(_cpu_seconds, lambda: [path.read_bytes() for path in files]),
        MEMORY: partial(_loaded, spec, here, None, {}),
        DIRECTORY: partial(_loaded, spec, empty, spec.url, {}),
        S3: partial(_loaded, spec, empty, spec.s3, spec.s3_options),
        TORCH: partial(_loaded_by_torch, spec),
    }
    return rank.in_turn(measures, repeats=spec.repeats)


def _measure_peers(rank: Rank, spec: Spec) -> dict[str, Sample]:
    """Save on one node and on two, and load from memory and from the other rank's."""
    common, nodes = spec.directory / "common", [spec.directory / node for node in ("a", "b")]
    _save(spec, common, None, {})
    _save(spec, nodes[rank.rank], None, {})
    measures: dict[str, Callable[[], float]] = {
        MEMORY: partial(_loaded, spec, common, None, {}),
        PEER: partial(_loaded, spec, nodes[1 - rank.rank], None, {}),
    }
    return rank.in_turn(measures, repeats=spec.repeats)


def _save(spec: Spec, root: Path, url: str | None, options: Mapping[str, Any]) -> None:
    with dcp_mem.MemoryStorageWriter(
        url, memory_root=root, job=JOB, storage_options=options
    ) as writer:
        dcp_mem.save(spec.state(1.0), checkpoint_id=NAME, storage_writer=writer)


def _loaded(spec: Spec, root: Path, url: str | None, options: Mapping[str, Any]) -> float:
    state = spec.state(0.0)
    with dcp_mem.MemoryStorageReader(
        url, memory_root=root, job=JOB, storage_options=options
    ) as reader:
        took = _cpu_seconds(lambda: dcp_mem.load(state, storage_reader=reader))
    return _checked(spec, state, took)


def _loaded_by_torch(spec: Spec) -> float:
    state = spec.state(0.0)
    reader = dcp.FileSystemReader(f"{spec.url}/{NAME}")
    return _checked(spec, state, _cpu_seconds(lambda: dcp.load(state, storage_reader=reader)))


def _cpu_seconds(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def _checked(spec: Spec, state: Mapping[str, torch.Tensor], took: float) -> float:
    last = f"layer.{spec.count - 1}"
    if state[last][0] != spec.count - 1:
        raise AssertionError(f"{last} was not restored")
    return took
