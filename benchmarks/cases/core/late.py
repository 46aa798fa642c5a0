"""What a save costs the rank that comes last.

The others wait for it: its save is what training waits for. Rank 1 of two begins its save later
than rank 0, by so many milliseconds. Its call is timed from its own beginning.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.harness import calls
from benchmarks.harness.calls import DCP_SAVE, OWN_SAVE, TORCH_SAVE
from benchmarks.harness.clock import seconds
from benchmarks.harness.floors import warm_mapping, ways_to_copy
from benchmarks.harness.nested import nested
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, fastest
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import Workload
from benchmarks.harness.tables import Part, Row, Section, attempt, beside_floor, named
from dcp_mem.saving import eager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.harness.nested import NestedState
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "A rank that comes late to a save, two ranks"
WORKLOAD, QUICK_WORKLOAD = Workload(512 * MIB, 64), Workload(128 * MIB, 64)
LATE_SECONDS = (0.0, 0.010, 0.030, 0.100)
WARM_UPS = 4
PATIENCE = 600.0
ALONE, AGREED_FIRST = "its copy alone", "dcp_mem.save, agreed first"
SAVES = (OWN_SAVE, DCP_SAVE, AGREED_FIRST, TORCH_SAVE)
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
        for name in SAVES
        if name != TORCH_SAVE
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
            name: stack.enter_context(closing(_Saver(name, spec, state, rank))) for name in SAVES
        }
        copies: dict[str, Callable[[], float]] = {
            f"{ALONE}, {way}": partial(_alone, rank, partial(mapping.fill, copy))
            for way, copy in ways.items()
        }
        saves = {name: saver.save for name, saver in savers.items()}
        return rank.in_turn({**copies, **saves}, repeats=spec.repeats, warm_ups=WARM_UPS)


def _alone(rank: Rank, copy: Callable[[], object]) -> float:
    return seconds(copy) if rank.rank == 1 else 0.0


class _Saver:
    """A call that saves `state` again and again; on rank 1 it begins later than on rank 0."""

    def __init__(self, name: str, spec: Spec, state: NestedState, rank: Rank) -> None:
        self._spec, self._state, self._rank = spec, state, rank
        self._least = _NEVER if name == AGREED_FIRST else eager.LEAST_NBYTES
        called = OWN_SAVE if name == AGREED_FIRST else name
        self._call = calls.make(called, spec.directory / name, state.optimizer)
        self._number = 0

    def save(self) -> float:
        self._state.optimizer.step()
        self._number += 1
        if self._rank.rank == 1:
            time.sleep(self._spec.late)
        with patch.object(eager, "LEAST_NBYTES", self._least):
            took = seconds(lambda: self._call.begin(self._number, self._state.tree))
        self._call.forget(self._number - 1, self._rank)
        return took

    def close(self) -> None:
        self._call.close()
