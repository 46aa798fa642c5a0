"""What a save costs the rank that comes last.

The others wait for it: its save is what training waits for. Rank 1 of two begins its save later
than rank 0, by so many milliseconds. Its call is timed from its own beginning.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import dcp_mem
from benchmarks.harness.clock import seconds
from benchmarks.harness.floors import warm_mapping, ways_to_copy
from benchmarks.harness.nested import nested
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, fastest
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import Workload
from benchmarks.harness.tables import Part, Row, Section, attempt, beside_floor, named
from dcp_mem import MemoryStorageWriter
from dcp_mem.saving import eager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness.nested import NestedState
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "A rank that comes late to a save, two ranks"
WORKLOAD, QUICK_WORKLOAD = Workload(512 * MIB, 64), Workload(128 * MIB, 64)
LATE_SECONDS = (0.0, 0.010, 0.030, 0.100)
WARM_UPS = 4
PATIENCE = 600.0
ALONE, SAVE, DCP_SAVE = "its copy alone", "dcp_mem.save", "dcp.save"
AGREED_FIRST, TORCH_SAVE = "dcp_mem.save, agreed first", "dcp.save, FileSystemWriter"
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures."""

    workload: Workload
    directory: Path
    repeats: int
    late: float


def run(settings: Settings) -> Section:
    workload = QUICK_WORKLOAD if settings.quick else WORKLOAD
    return Section(
        TITLE,
        [
            attempt("late", f"{late * 1e3:.0f} ms late", partial(_part, settings, workload, late))
            for late in LATE_SECONDS
        ],
    )


def _part(settings: Settings, workload: Workload, late: float) -> Part:
    # The state, a floor, three slots for each of our calls, torch's files.
    need(settings.tmpfs, workload.total_bytes * 13)
    with scratch(settings.tmpfs) as directory:
        spec = Spec(
            workload=workload,
            directory=directory,
            repeats=settings.repeats_of(workload),
            late=late,
        )
        found = in_fresh_processes(_measure, spec, ranks=2, timeout=PATIENCE)[1]
    copies = {name: one for name, one in found.items() if name.startswith(ALONE)}
    floor = fastest(copies.values())
    rows = [
        beside_floor(f"{name}; floor: {ALONE}", floor, found[name])
        for name in (SAVE, DCP_SAVE, AGREED_FIRST)
    ]
    rows.append(Row(TORCH_SAVE, peer=named({"": found[TORCH_SAVE]}).strip()))
    return Part(
        rows,
        [
            f"{ALONE}: of the late rank's tensors as they are, while the other rank does nothing",
            f"{AGREED_FIRST}: the same, told to copy once all ranks have agreed",
        ],
    )


def _measure(rank: Rank, spec: Spec) -> dict[str, Sample]:
    state = nested(spec.workload, rank)
    with ExitStack() as stack:
        path = spec.directory / f"floor-{rank.rank}"
        mapping = stack.enter_context(warm_mapping(path, state.local))
        ways = stack.enter_context(ways_to_copy(rank.threads, state.local))
        savers = {
            name: stack.enter_context(closing(_Saver(spec, state, rank, save, number)))
            for number, (name, save) in enumerate(
                {SAVE: dcp_mem.save, DCP_SAVE: dcp.save, AGREED_FIRST: _agreed_first}.items()
            )
        }
        copies: Mapping[str, Callable[[], float]] = {
            f"{ALONE}, {way}": partial(_alone, rank, partial(mapping.fill, copy))
            for way, copy in ways.items()
        }
        saves: dict[str, Callable[[], float]] = {name: one.save for name, one in savers.items()}
        saves[TORCH_SAVE] = partial(_torch_save, spec, state, rank)
        return rank.in_turn({**copies, **saves}, repeats=spec.repeats, warm_ups=WARM_UPS)


def _alone(rank: Rank, copy: Callable[[], object]) -> float:
    return seconds(copy) if rank.rank == 1 else 0.0


def _agreed_first(*args: Any, **kwargs: Any) -> Any:
    with patch.object(eager, "LEAST_NBYTES", _NEVER):
        return dcp_mem.save(*args, **kwargs)


def _late(rank: Rank, spec: Spec, save: Callable[[], object]) -> float:
    if rank.rank == 1:
        time.sleep(spec.late)
    return seconds(save)


def _torch_save(spec: Spec, state: NestedState, rank: Rank) -> float:
    state.optimizer.step()
    writer = FileSystemWriter(spec.directory / "torch")
    return _late(rank, spec, lambda: dcp.save(state.tree, storage_writer=writer))


class _Saver:
    """A writer of its own, and saves by one call."""

    def __init__(
        self, spec: Spec, state: NestedState, rank: Rank, save: Callable[..., Any], number: int
    ) -> None:
        self._spec, self._state, self._rank, self._save = spec, state, rank, save
        memory = str(spec.directory / f"memory-{number}")
        self._writer = MemoryStorageWriter(None, memory_root=memory, job="bench", keep_memory=1)
        self._steps = 0

    def save(self) -> float:
        self._state.optimizer.step()
        self._steps += 1
        name = f"step-{self._steps}"
        return _late(
            self._rank,
            self._spec,
            lambda: self._save(self._state.tree, checkpoint_id=name, storage_writer=self._writer),
        )

    def close(self) -> None:
        self._writer.close()
