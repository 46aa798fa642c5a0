"""Saves from a CUDA device and loads into it, beside cudaMemcpyAsync; and steps that save."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import dcp_mem
from benchmarks.harness import calls
from benchmarks.harness.calls import DCP_ASYNC, DCP_SAVE, META, OVERLAPPED, OWN_ASYNC, OWN_SAVE
from benchmarks.harness.clock import seconds
from benchmarks.harness.nested import nested, wrong
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import Skipped, need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.states import Workload
from benchmarks.harness.tables import (
    RATE,
    RATIO,
    Cell,
    Figure,
    Part,
    Row,
    Section,
    Table,
    attempt,
    beside_floor,
    size,
)
from benchmarks.harness.training import NO_SAVE, SMALL, TINY, Shape, Trainer, loops
from dcp_mem import MemoryStorageReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.calls import Call, Held
    from benchmarks.harness.nested import NestedState
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Saves from a CUDA device, and loads into it"
DEVICE = "cuda"
WITHOUT_DEVICE = "there is no CUDA device on this machine: nothing about GPUs was measured"
TENSORS = (64, 2_000)
LARGE = Shape(layers=8, width=1024, vocabulary=32_768, batch=8, length=512)
CALLS = (DCP_SAVE, OWN_SAVE, DCP_ASYNC, OWN_ASYNC, OVERLAPPED, META)
STEPS = 6
WARM_UPS = 4
PATIENCE = 1800.0
FLOOR = "cudaMemcpyAsync to pinned memory"
LOAD_FLOOR = "cudaMemcpyAsync from pinned memory"
LOAD, UNVERIFIED = "dcp_mem.load", "dcp_mem.load, verify=False"
DCP_LOAD, TORCH_LOAD = "dcp.load", "dcp.load, FileSystemReader"
COLUMNS = ("call", "holds training up", "complete after", "GB/s", "× the floor's time")
LOAD_COLUMNS = ("call", "takes", "GB/s", "× the floor's time")
LOOP_COLUMNS = ("each step saves with", "step", "× no save", "lost", "waited for the save before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process measures; `workload` for copies, `shape` for the loop."""

    directory: Path
    repeats: int
    workload: Workload
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Seconds of saves, and of the floor.

    Attributes:
        call: Until the call returned, by its name.
        complete: Until the checkpoint was complete.
    """

    nbytes: int
    floor: Sample
    call: Mapping[str, Sample]
    complete: Mapping[str, Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Seconds of steps, and of waiting for the save before, by the name of the call."""

    nbytes: int
    step: Mapping[str, Sample]
    waited: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    nbytes = 256 * MIB if settings.quick else 2 * GIB
    shape = SMALL if settings.quick else LARGE
    parts = [
        attempt("gpu", f"copies, {one.name}", partial(_copies_part, settings, one))
        for one in (Workload(nbytes, tensors) for tensors in TENSORS)
    ]
    parts += [
        attempt("gpu", f"loads, {one.name}", partial(_loads_part, settings, one))
        for one in (Workload(nbytes, tensors) for tensors in TENSORS)
    ]
    loop = attempt("gpu", f"training, {shape.name}", partial(_loop_part, settings, shape))
    return Section(TITLE, [*parts, loop])


def _need_device() -> None:
    if not torch.cuda.is_available():
        raise Skipped(WITHOUT_DEVICE)


# -- copies ------------------------------------------------------------------------------------


def _copies_part(settings: Settings, workload: Workload) -> Part:
    _need_device()
    need(settings.tmpfs, workload.total_bytes * (2 + 2 * len(CALLS)))
    with scratch(settings.tmpfs) as directory:
        spec = Spec(directory=directory, repeats=settings.repeats, workload=workload, shape=TINY)
        m = in_fresh_processes(_measure_copies, spec, timeout=PATIENCE)[0]
    rows = [beside_floor(f"{name}; floor: {FLOOR}", m.floor, m.call[name]) for name in m.call]
    rows += _left_out()
    return Part(rows, [f"{size(m.nbytes)} a save; GB/s until complete"], tables=[_table(m)])


def _table(m: Copied) -> Table:
    floor = Figure.of(m.floor)
    lines: list[Sequence[Cell]] = [(FLOOR, floor, floor, _rate(m.nbytes, m.floor), "")]
    for name, call in m.call.items():
        complete = m.complete[name]
        times = Figure.of(complete.per(m.floor), RATIO)
        lines.append((name, Figure.of(call), Figure.of(complete), _rate(m.nbytes, complete), times))
    return Table(COLUMNS, lines)


def _rate(nbytes: int, sample: Sample) -> Figure:
    return Figure.of(Sample(tuple(nbytes / value / 1e9 for value in sample.values)), RATE)


def _measure_copies(rank: Rank, spec: Spec) -> Copied:
    state = nested(spec.workload, rank, DEVICE)
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in state.local]
    with ExitStack() as stack:
        made = _made(spec.directory, state.optimizer, stack)
        history: dict[str, list[Held]] = {name: [] for name in made}
        saves = {
            name: partial(_save, call, state, history[name], rank) for name, call in made.items()
        }
        floor = partial(seconds, partial(_copy_to_pinned, pinned, state.local))
        samples = rank.in_turn({FLOOR: floor, **saves}, repeats=spec.repeats, warm_ups=WARM_UPS)
        into = wrong(spec.workload, rank)
        for name, call in made.items():
            expected = state.ticks
            _save(call, state, history[name], rank)
            into.wipe()
            call.load(len(history[name]), into.tree)
            into.check(expected)
            del history[name][-1]
    later = {name: saved[WARM_UPS:] for name, saved in history.items()}
    return Copied(
        nbytes=state.local_bytes,
        floor=samples[FLOOR],
        call={name: Sample(tuple(one.call for one in saved)) for name, saved in later.items()},
        complete={
            name: Sample(tuple(one.complete for one in saved)) for name, saved in later.items()
        },
    )


def _copy_to_pinned(pinned: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for into, tensor in zip(pinned, tensors, strict=True):
        into.copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()


def _save(call: Call, state: NestedState, history: list[Held], rank: Rank) -> float:
    def step() -> float:
        state.optimizer.step()
        return state.optimizer.began

    torch.cuda.synchronize()
    history.append(calls.held(call, len(history) + 1, state.tree, step))
    torch.cuda.synchronize()
    call.forget(len(history) - 1, rank)
    return history[-1].call


# -- loads -------------------------------------------------------------------------------------


def _loads_part(settings: Settings, workload: Workload) -> Part:
    _need_device()
    need(settings.tmpfs, workload.total_bytes * 4)
    with scratch(settings.tmpfs) as directory:
        spec = Spec(directory=directory, repeats=settings.repeats, workload=workload, shape=TINY)
        samples = in_fresh_processes(_measure_loads, spec, timeout=PATIENCE)[0]
    floor = samples.pop(LOAD_FLOOR)
    first = Figure.of(floor)
    nbytes = workload.total_bytes
    lines: list[Sequence[Cell]] = [(LOAD_FLOOR, first, _rate(nbytes, floor), "")]
    for name, sample in samples.items():
        times = Figure.of(sample.per(floor), RATIO)
        lines.append((name, Figure.of(sample), _rate(nbytes, sample), times))
    rows = [
        beside_floor(f"{name}; floor: {LOAD_FLOOR}", floor, sample)
        for name, sample in samples.items()
    ]
    notes = [f"{size(nbytes)}, from this node's tmpfs into tensors on the device"]
    return Part(rows, notes, tables=[Table(LOAD_COLUMNS, lines)])


def _measure_loads(rank: Rank, spec: Spec) -> dict[str, Sample]:
    state, into = nested(spec.workload, rank, DEVICE), nested(spec.workload, rank, DEVICE)
    pinned = [tensor.cpu().pin_memory() for tensor in state.local]
    files = str(spec.directory / "files")
    with closing(calls.make(OWN_SAVE, spec.directory, state.optimizer)) as saved:
        saved.begin(1, state.tree)
        dcp.save(state.tree, checkpoint_id=files)

        def own(load: Callable[..., None], *, verify: bool = True) -> float:
            with MemoryStorageReader(
                None, memory_root=str(spec.directory), job=calls.JOB, verify=verify
            ) as reader:
                return _loaded(partial(load, into.tree, storage_reader=reader), into, state.ticks)

        def torchs() -> float:
            load = partial(dcp.load, into.tree, storage_reader=FileSystemReader(files))
            return _loaded(load, into, state.ticks)

        measures: dict[str, Callable[[], float]] = {
            LOAD_FLOOR: partial(seconds, partial(_copy_from_pinned, into.local, pinned)),
            LOAD: partial(own, dcp_mem.load),
            UNVERIFIED: partial(own, dcp_mem.load, verify=False),
            DCP_LOAD: partial(own, dcp.load),
            TORCH_LOAD: torchs,
        }
        return rank.in_turn(measures, repeats=spec.repeats, warm_ups=1)


def _copy_from_pinned(tensors: Sequence[torch.Tensor], pinned: Sequence[torch.Tensor]) -> None:
    for tensor, one in zip(tensors, pinned, strict=True):
        tensor.copy_(one, non_blocking=True)
    torch.cuda.synchronize()


def _loaded(load: Callable[[], None], into: NestedState, ticks: int) -> float:
    into.wipe()
    torch.cuda.synchronize()

    def run() -> None:
        load()
        torch.cuda.synchronize()

    took = seconds(run)
    into.check(ticks)
    return took


# -- training ----------------------------------------------------------------------------------


def _loop_part(settings: Settings, shape: Shape) -> Part:
    _need_device()
    need(settings.tmpfs, shape.state_bytes * (1 + 2 * len(CALLS)))
    with scratch(settings.tmpfs) as directory:
        spec = Spec(
            directory=directory,
            repeats=settings.repeats,
            workload=Workload(MIB, TENSORS[0]),
            shape=shape,
        )
        m = in_fresh_processes(_measure_loop, spec, timeout=PATIENCE)[0]
    alone = m.step[NO_SAVE]
    rows = [
        beside_floor(f"a step that saves with {name}; floor: {NO_SAVE}", alone, step)
        for name, step in m.step.items()
        if name != NO_SAVE
    ]
    lines: list[Sequence[Cell]] = []
    for name, step in m.step.items():
        times = step.per(alone)
        lost = f"{times.median - 1:.1%}"
        waited = Figure.of(m.waited[name])
        lines.append((name, Figure.of(step), Figure.of(times, RATIO), lost, waited))
    notes = [f"{size(m.nbytes)} a save, one save a step; steps end with loss.item()"]
    return Part([*rows, *_left_out()], notes, tables=[Table(LOOP_COLUMNS, lines)])


def _measure_loop(rank: Rank, spec: Spec) -> Trained:
    trainer = Trainer(spec.shape, DEVICE)
    trainer.compute()
    trainer.update()  # AdamW makes its state in the first step
    with ExitStack() as stack:
        of = loops(trainer, _made(spec.directory, trainer.optimizer, stack), rank)
        waited: dict[str, list[float]] = {name: [] for name in of}

        def train(name: str) -> float:
            found = of[name].run(STEPS)
            waited[name].append(found.waited)
            return found.step

        measures = {name: partial(train, name) for name in of}
        step = rank.in_turn(measures, repeats=spec.repeats, warm_ups=1)
        for loop in of.values():
            loop.check()
        nbytes = sum(tensor.nbytes for tensor in trainer.tensors)
    return Trained(
        nbytes=nbytes,
        step=step,
        waited={name: Sample(tuple(values[1:])) for name, values in waited.items()},
    )


# -- both --------------------------------------------------------------------------------------


def _made(directory: Path, optimizer: torch.optim.Optimizer, stack: ExitStack) -> dict[str, Call]:
    return {
        name: stack.enter_context(closing(calls.make(name, directory / str(index), optimizer)))
        for index, name in enumerate(CALLS)
        if not calls.left_out(name)
    }


def _left_out() -> list[Row]:
    return [Row(name, dcp_mem=why) for name in CALLS if (why := calls.left_out(name))]
