"""What a training loop loses that saves at every step, call by call, beside the CPU of a copy.

A small transformer runs real steps on the CPU. Each step waits for the save before, saves, and
trains: a save that goes on behind the call takes its cores from the same step. One loop copies the
same bytes and saves nothing: what its steps lose is the least that any save in memory can take.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import calls
from benchmarks.harness.calls import DCP_ASYNC, DCP_SAVE, OVERLAPPED, OWN_ASYNC, OWN_SAVE
from benchmarks.harness.floors import one_by_one, warm_mapping, ways_to_copy
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, fastest
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.tables import (
    RATIO,
    Cell,
    Figure,
    Part,
    Row,
    Section,
    Table,
    attempt,
    beside_floor,
    named,
    size,
)
from benchmarks.harness.training import NO_SAVE, SMALL, TINY, Trainer, loops, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.calls import Call
    from benchmarks.harness.floors import Copy
    from benchmarks.harness.floors import Mapping as Mapped
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings
    from benchmarks.harness.training import SavingLoop, Shape

TITLE = "A training loop that saves at every step"
CALLS = (DCP_SAVE, OWN_SAVE, DCP_ASYNC, OWN_ASYNC, OVERLAPPED)
LIMIT = 1.00
"""What the overlapped call may take from a step, in times of the copy's CPU."""
BARE_COPY = "a bare copy"
SLOTS = 3
"""Mappings that bare copies go to in turn, as saves go to their slots."""
STEPS, QUICK_STEPS = 5, 3
WARM_UPS = 2
PATIENCE = 1800.0
COLUMNS = ("each step saves with", "step", "× no save", "lost", "waited for the save before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process measures.

    Attributes:
        steps: Timed steps of each loop, in each round.
        repeats: Rounds.
    """

    shape: Shape
    directory: Path
    steps: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds, round by round.

    Attributes:
        copies: CPU time of one copy of all bytes, all threads together, by the way to copy.
        step: Median steps, by the name of the call.
        waited: Of that, waiting for the save before.
    """

    nbytes: int
    copies: Mapping[str, Sample]
    step: Mapping[str, Sample]
    waited: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    shape = TINY if settings.quick else SMALL
    return Section(TITLE, [attempt("training", shape.name, partial(_part, settings, shape))])


def _part(settings: Settings, shape: Shape) -> Part:
    # The state, a copy, the gradients, the slots of bare copies, and two for each call.
    need(settings.tmpfs, shape.state_bytes * (3 + SLOTS + 2 * len(CALLS)))
    with scratch(settings.tmpfs) as directory:
        spec = Spec(
            shape=shape,
            directory=directory,
            steps=QUICK_STEPS if settings.quick else STEPS,
            repeats=settings.repeats,
        )
        m = in_fresh_processes(_measure, spec, timeout=PATIENCE)[0]
    copy, alone = fastest(m.copies.values()), m.step[NO_SAVE]
    measured = [name for name in (BARE_COPY, *CALLS) if name in m.step]
    rows = [
        beside_floor(f"a step that saves with {name}; floor: {NO_SAVE}", alone, m.step[name])
        for name in measured
    ]
    rows += [
        beside_floor(
            f"{name}: what a step loses; floor: CPU time of a copy",
            copy,
            m.step[name] - alone,
            at_most=LIMIT if name == OVERLAPPED else None,
        )
        for name in measured
    ]
    rows += [
        beside_floor(
            f"a step that saves with {name}; floor: with {BARE_COPY}",
            m.step[BARE_COPY],
            m.step[name],
        )
        for name in measured
        if name != BARE_COPY
    ]
    rows += [Row(name, dcp_mem=why) for name in CALLS if (why := calls.left_out(name))]
    share = copy.median / alone.median
    notes = [
        f"{size(m.nbytes)} a save; the CPU time of its copy is {share:.1%} of a step without saves",
        f"CPU time of a copy: {named(m.copies)}",
        "a step waits for the save before, saves, and runs forward, backward and AdamW",
        f"{BARE_COPY} goes to {SLOTS} warm mappings in turn, and is no checkpoint",
        "its steps lose what copying takes, and what it throws out of the processor's caches",
        "after the last round each call's checkpoint was loaded, and was the state at the call",
    ]
    return Part(rows, notes, tables=[_table(m)])


def _table(m: Measured) -> Table:
    alone = m.step[NO_SAVE]
    lines: list[list[Cell]] = []
    for name, step in m.step.items():
        times = step.per(alone)
        lost = "" if name == NO_SAVE else f"{times.median - 1:.1%}"
        waited: Cell = "" if name == NO_SAVE else Figure.of(m.waited[name])
        lines.append([name, Figure.of(step), Figure.of(times, RATIO), lost, waited])
    return Table(COLUMNS, lines)


def _measure(rank: Rank, spec: Spec) -> Measured:
    trainer = Trainer(spec.shape)
    trainer.compute()
    trainer.update()  # AdamW makes its state in the first step
    whole = torch.cat([tensor.flatten() for tensor in trainer.tensors])
    names = [name for name in CALLS if not calls.left_out(name)]
    with ExitStack() as stack:
        mapping = stack.enter_context(warm_mapping(spec.directory / "floor", [whole]))
        ways = stack.enter_context(ways_to_copy(rank.threads, [whole]))
        copies = {
            way: partial(_cpu_seconds, partial(mapping.fill, copy)) for way, copy in ways.items()
        }
        made: dict[str, Call] = {
            BARE_COPY: _BareCopy(spec.directory, trainer.tensors, _quicker(mapping, ways))
        }
        for name in names:
            made[name] = calls.make(name, spec.directory / str(len(made)), trainer.optimizer)
        of = {
            name: stack.enter_context(closing(loop))
            for name, loop in loops(trainer, made, rank).items()
        }
        waited: dict[str, list[float]] = {name: [] for name in of}

        def train(name: str, loop: SavingLoop) -> float:
            found = loop.run(spec.steps)
            waited[name].append(found.waited)
            return found.step

        measures = {name: partial(train, name, loop) for name, loop in of.items()}
        samples = rank.in_turn({**copies, **measures}, repeats=spec.repeats, warm_ups=WARM_UPS)
        for loop in of.values():
            loop.check()
    return Measured(
        nbytes=whole.nbytes,
        copies={way: samples[way] for way in copies},
        step={name: samples[name] for name in of},
        waited={name: Sample(tuple(values[WARM_UPS:])) for name, values in waited.items()},
    )


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time that this process spends while `work` runs."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _quicker(mapping: Mapped, ways: Mapping[str, Copy]) -> Copy:
    """Return the way to copy that takes less time."""
    took = {}
    for name, copy in ways.items():
        mapping.fill(copy)
        start = time.perf_counter()
        mapping.fill(copy)
        took[name] = time.perf_counter() - start
    return ways[min(took, key=took.__getitem__)]


class _BareCopy:
    """The copies of a save and nothing else: a `Call` without checkpoints."""

    def __init__(self, directory: Path, tensors: Sequence[torch.Tensor], copy: Copy) -> None:
        self._kept, self._copy = ExitStack(), copy
        self._mappings = [
            self._kept.enter_context(warm_mapping(directory / f"bare-{number}", tensors))
            for number in range(SLOTS)
        ]

    def begin(self, number: int, tree: Any) -> None:
        self._mappings[number % SLOTS].fill_with(self._copy, tensors_of(tree))

    def stepping(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def load(self, number: int, into: Any) -> None:
        one_by_one(tensors_of(into), self._mappings[number % SLOTS].views)

    def forget(self, number: int, rank: Rank) -> None:
        """Do nothing: the next copies go to the same memory."""

    def close(self) -> None:
        self._kept.close()
