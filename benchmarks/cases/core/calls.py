"""How long each call holds training up: DCP's own, dcp_mem's, torch's writers, torch_checkpointing.

States are nested as trainers nest them. All calls save the same state in turn, in one process, and
an optimizer's step that comes right after each changes it. What a call saved last is loaded at the
end, and has to be the state before that step.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

import dcp_mem
from benchmarks.harness import calls, null_writer
from benchmarks.harness.calls import (
    DCP_ASYNC,
    DCP_SAVE,
    META,
    OURS,
    OVERLAPPED,
    OWN_ASYNC,
    OWN_SAVE,
    PEERS,
    REMARKS,
    TORCH_ASYNC,
    TORCH_KEPT,
    TORCH_SAVE,
)
from benchmarks.harness.clock import prepared, seconds
from benchmarks.harness.floors import Preads, by_loop, warm_mapping, ways_to_copy
from benchmarks.harness.nested import nested, wrong
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.samples import Sample, fastest, slowest, slowest_by_name
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.states import Workload
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
    beside_peer,
    named,
)
from dcp_mem import MemoryStorageReader, MemoryStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.calls import Call, Held
    from benchmarks.harness.nested import NestedState
    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "What each call holds training up for, nested states, warm"
TENSORS = (64, 2_000, 20_000)
FEW, MOST = TENSORS[0], TENSORS[-1]
BYTES_PER_RANK, QUICK_BYTES_PER_RANK = 256 * MIB, 64 * MIB
LARGE_BYTES, QUICK_LARGE_BYTES = GIB, 256 * MIB
"""Of all ranks, for all once more: what a save costs whatever its size weighs less there."""
LARGE_CALLS = (DCP_SAVE, OWN_SAVE, DCP_ASYNC)
"""Those that are measured with these. Each has two slots, and memory has to hold them all."""
DCP_SAVE_LIMIT = 1.15
OWN_SAVE_LIMITS = {1: 1.05, 2: 1.15}
"""By the number of ranks, with few tensors."""
DCP_ASYNC_LIMIT, TIMES_FASTER_THAN_TORCH = 1.10, 5.0
OVERLAPPED_SHARE, OVERLAPPED_SECONDS = 0.05, 0.002
"""Of the copy, and besides, with few tensors."""
DCP_LOAD_LIMIT, OWN_LOAD_LIMIT, VERIFIED_LIMIT = 1.20, 1.10, 1.30
"""Beside `dcp_mem.load`; without verification, beside `preadv`; with it, beside that without."""
WARM_UPS = 3
"""One more than there are slots: from then on every save reuses one."""
PEER_WARM_UPS = 1
"""The first save of a peer fills buffers, grows the heap, starts its process."""
PATIENCE = 2400.0
JOB, CHECKPOINT = "bench", "step-1"
COPY, AS_ONE, WALK = "a copy", "one large copy", "a walk"
NULL_STAGER = "dcp.async_save that stages nothing"
LOOP = "numpy's loop"
"""A way to copy large tensors that no other library takes: no limit is counted in it."""
LEAST = f"{COPY}, {WALK} and {NULL_STAGER}"
_WHY_NOT_AS_ONE = (
    "the best of the first list is the copy above. The C library copies what is larger than about "
    "a processor's cache past that cache, so one large copy may take half of the time"
)
_WHY_NOT_BY_LOOP = (
    "as dcp_mem copies pieces of 1 MiB and more where that is quicker (numpy.positive). No limit "
    "is counted in it, as neither torch nor another library copies like that"
)
OWN_LOAD, DCP_LOAD, TORCH_LOAD, PREADV = "dcp_mem.load", "dcp.load", "FileSystemReader", "preadv"
UNVERIFIED = "dcp_mem.load, verify=False"
HELD_COLUMNS = (
    "call",
    "holds training up",
    "× the copy",
    "× dcp_mem.save",
    "a step at once waits",
    "complete after",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a rank measures.

    Attributes:
        peer_repeats: Of torch's writers and readers, and of other libraries.
        calls: What saves.
    """

    workload: Workload
    directory: Path
    repeats: int
    peer_repeats: int
    calls: Sequence[str]

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def torch_checkpoint(self) -> Path:
        return self.directory / "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSamples:
    """Seconds, save by save, on one rank, or of the slowest; see `calls.Held`."""

    call: Sample
    step: Sample
    complete: Sample

    @classmethod
    def of(cls, saves: Sequence[Held]) -> HeldSamples:
        return cls(
            call=Sample(tuple(save.call for save in saves)),
            step=Sample(tuple(save.step for save in saves)),
            complete=Sample(tuple(save.complete for save in saves)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Saves on one rank, or of the slowest.

    Attributes:
        floors: Copies of the tensors as they are, by the way to copy.
        floors_as_one: One copy of all bytes, by the way to copy.
        loop: A copy by numpy's loop, a share per thread; None where the tensors are too small.
        walk: Asking each tensor of the state dict for its address, which any copy begins with.
        null_stager: `dcp.async_save`'s own work, which no writer can save it.
        by_call: By the name of the call.
    """

    floors: Mapping[str, Sample]
    floors_as_one: Mapping[str, Sample]
    loop: Sample | None
    walk: Sample
    null_stager: Sample
    by_call: Mapping[str, HeldSamples]

    @property
    def copy(self) -> Sample:
        """The copy that limits are counted in: of the tensors as they lie, in the best way."""
        return fastest(self.floors.values())

    @property
    def copy_as_one(self) -> Sample:
        """The same bytes as one tensor, in the best way."""
        return fastest(self.floors_as_one.values())

    @property
    def least_async(self) -> Sample:
        """The least that an asynchronous save through DCP can hold training up, in Python."""
        return self.copy + self.walk + self.null_stager


def run(settings: Settings) -> Section:
    parts = []
    for tensors in TENSORS:
        for ranks in (1, 2):
            per_rank = QUICK_BYTES_PER_RANK if settings.quick else BYTES_PER_RANK
            workload = Workload(per_rank * ranks, tensors)
            parts += _parts(settings, workload, ranks, (*OURS, *PEERS))
    for tensors in TENSORS:
        large = Workload(QUICK_LARGE_BYTES if settings.quick else LARGE_BYTES, tensors)
        for ranks in (1, 2):
            parts += _parts(settings, large, ranks, LARGE_CALLS)
    return Section(TITLE, parts)


def _parts(settings: Settings, workload: Workload, ranks: int, names: Sequence[str]) -> list[Part]:
    title = workload.on(ranks)
    saves = partial(_saves, settings, workload, ranks, names)
    loads = partial(_loads, settings, workload, ranks)
    return [attempt("calls", f"saves, {title}", saves), attempt("calls", f"loads, {title}", loads)]


def _spec(
    settings: Settings, workload: Workload, directory: Path, names: Sequence[str] = ()
) -> Spec:
    repeats = settings.repeats_of(workload)
    return Spec(
        workload=workload,
        directory=directory,
        repeats=min(repeats, 3) if settings.quick and workload.many else repeats,
        peer_repeats=min(settings.peer_repeats, repeats),
        calls=[name for name in names if not calls.left_out(name)],
    )


def _in_rounds(
    rank: Rank,
    ours: Mapping[str, Callable[[], float]],
    peers: Mapping[str, Callable[[], float]],
    spec: Spec,
) -> dict[str, Sample]:
    """Measure all in turn. Peers, which take ten times as long, take part in the first rounds."""
    found: dict[str, list[float]] = {name: [] for name in (*ours, *peers)}
    for number in range(spec.repeats):
        measures = {**ours, **peers} if number < spec.peer_repeats else ours
        for name, took in rank.in_turn(measures, repeats=1).items():
            found[name].extend(took.values)
    return {name: Sample(tuple(values)) for name, values in found.items()}


# -- saves -------------------------------------------------------------------------------------


def _saves(settings: Settings, workload: Workload, ranks: int, names: Sequence[str]) -> Part:
    # The state and one to load into, two floors, two slots for each of our calls, torch's files
    # and buffers.
    need(settings.tmpfs, workload.total_bytes * (4 + 2 * len(names)))
    with scratch(settings.tmpfs) as directory:
        spec = _spec(settings, workload, directory, names)
        by_rank = in_fresh_processes(_measure_saves, spec, ranks=ranks, timeout=PATIENCE)
    saved = _slowest(by_rank)
    rows = _rows(saved, workload, ranks)
    rows += [Row(name, dcp_mem=why) for name in names if (why := calls.left_out(name))]
    return Part(rows, _notes(saved), tables=[_table(saved)])


def _measure_saves(rank: Rank, spec: Spec) -> Saved:
    state = nested(spec.workload, rank)
    with ExitStack() as stack:
        floors = _floors(rank, spec.directory / f"floor-{rank.rank}", state.local, stack)
        whole = [torch.cat([tensor.flatten() for tensor in state.local])]
        as_one = _floors(rank, spec.directory / f"floor-as-one-{rank.rank}", whole, stack)
        savers = {
            name: stack.enter_context(closing(_Saver(name, state, rank, spec.directory / str(i))))
            for i, name in enumerate(spec.calls)
        }
        ours = {name: savers[name].save for name in OURS if name in savers}
        peers = {name: savers[name].save for name in PEERS if name in savers}
        ours[WALK] = partial(seconds, partial(_walk, state.tree))
        ours[NULL_STAGER] = partial(null_writer.async_save, state.tree)
        copies = {f"0 {way}": floor for way, floor in floors.items()}
        copies |= {f"1 {way}": floor for way, floor in as_one.items()}
        rank.in_turn({**copies, **ours}, repeats=WARM_UPS)
        rank.in_turn(peers, repeats=PEER_WARM_UPS)
        samples = _in_rounds(rank, {**copies, **ours}, peers, spec)
        into = wrong(spec.workload, rank)
        for saver in savers.values():
            rank.barrier()
            saver.check(into)
        return Saved(
            floors={way: samples[f"0 {way}"] for way in floors if way != LOOP},
            floors_as_one={way: samples[f"1 {way}"] for way in as_one if way != LOOP},
            loop=samples.get(f"0 {LOOP}"),
            walk=samples[WALK],
            null_stager=samples[NULL_STAGER],
            by_call={
                name: HeldSamples.of(saver.history[WARM_UPS if name in OURS else PEER_WARM_UPS :])
                for name, saver in savers.items()
            },
        )


@dataclass(slots=True)
class _Saver:
    """A call that saves `state` again and again, and its history.

    Attributes:
        ticks: Of the state that was saved last.
    """

    name: str
    state: NestedState
    rank: Rank
    directory: Path
    history: list[Held] = field(default_factory=list)
    ticks: int = 0
    call: Call = field(init=False)

    def __post_init__(self) -> None:
        self.call = calls.make(self.name, self.directory, self.state.optimizer)

    def save(self) -> float:
        """Save under the next number; return the seconds that the call took."""
        number = len(self.history) + 1
        self.ticks = self.state.ticks
        self.history.append(calls.held(self.call, number, self.state.tree, self._step))
        self.call.forget(number - 1, self.rank)
        return self.history[-1].call

    def check(self, into: NestedState) -> None:
        """Load what was saved last, and compare it with the state of that moment."""
        into.wipe()
        try:
            self.call.load(len(self.history), into.tree)
            into.check(self.ticks)
        except Exception as error:
            raise AssertionError(f"{self.name} hasn't saved what it was given: {error}") from error

    def close(self) -> None:
        self.call.close()

    def _step(self) -> float:
        self.state.optimizer.step()
        return self.state.optimizer.began


def _floors(
    rank: Rank, path: Path, tensors: Sequence[torch.Tensor], stack: ExitStack
) -> dict[str, Callable[[], float]]:
    mapping = stack.enter_context(warm_mapping(path, tensors))
    ways = dict(stack.enter_context(ways_to_copy(rank.threads, tensors)))
    if tensors[0].nbytes >= 1 << 20:
        ways[LOOP] = stack.enter_context(by_loop(rank.threads))
    return {way: partial(seconds, partial(mapping.fill, copy)) for way, copy in ways.items()}


def _walk(tree: Any) -> list[int]:
    """Return the address of each tensor in a nested state dict."""
    addresses: list[int] = []
    nested_values = [tree]
    while nested_values:
        value = nested_values.pop()
        kind = type(value)
        if kind is DTensor:
            addresses.append(value._local_tensor.data_ptr())
        elif kind is torch.Tensor:
            addresses.append(value.data_ptr())
        elif kind is dict:
            nested_values.extend(value.values())
        elif kind is list:
            nested_values.extend(value)
    return addresses


def _slowest(ranks: Sequence[Saved]) -> Saved:
    return Saved(
        floors=slowest_by_name([one.floors for one in ranks]),
        floors_as_one=slowest_by_name([one.floors_as_one for one in ranks]),
        loop=slowest(loops) if (loops := [one.loop for one in ranks if one.loop]) else None,
        walk=slowest([one.walk for one in ranks]),
        null_stager=slowest([one.null_stager for one in ranks]),
        by_call={
            name: HeldSamples(
                call=slowest([one.by_call[name].call for one in ranks]),
                step=slowest([one.by_call[name].step for one in ranks]),
                complete=slowest([one.by_call[name].complete for one in ranks]),
            )
            for name in ranks[0].by_call
        },
    )


def _table(saved: Saved) -> Table:
    copy, own = saved.copy, saved.by_call[OWN_SAVE].call
    lines: list[Sequence[Cell]] = [(COPY, Figure.of(copy), "", "", "", "")]
    for name, held in saved.by_call.items():
        lines.append(
            (
                name,
                Figure.of(held.call),
                Figure.of(held.call.per(copy), RATIO),
                Figure.of(held.call.per(own), RATIO),
                Figure.of(held.step),
                Figure.of(held.complete),
            )
        )
    return Table(HELD_COLUMNS, lines)


def _rows(saved: Saved, workload: Workload, ranks: int) -> list[Row]:
    few, most = workload.tensors == FEW, workload.tensors == MOST
    copy, of = saved.copy, {name: held.call for name, held in saved.by_call.items()}
    rows = [
        beside_floor(
            f"{DCP_SAVE}; floor: {OWN_SAVE}", of[OWN_SAVE], of[DCP_SAVE], at_most=DCP_SAVE_LIMIT
        ),
        beside_floor(f"{DCP_SAVE}; floor: {COPY}", copy, of[DCP_SAVE]),
        beside_floor(
            f"{OWN_SAVE}; floor: {COPY}",
            copy,
            of[OWN_SAVE],
            at_most=OWN_SAVE_LIMITS[ranks] if few else None,
        ),
        beside_floor(f"{OWN_SAVE}; floor: {AS_ONE}", saved.copy_as_one, of[OWN_SAVE]),
        beside_floor(f"{DCP_ASYNC}; floor: {COPY}", copy, of[DCP_ASYNC], at_most=DCP_ASYNC_LIMIT),
        beside_floor(f"{DCP_ASYNC}; floor: {LEAST}", saved.least_async, of[DCP_ASYNC]),
    ]
    if saved.loop is not None:
        rows.append(beside_floor(f"{OWN_SAVE}; floor: {LOOP}", saved.loop, of[OWN_SAVE]))
    if OWN_ASYNC in of:
        rows.append(beside_floor(f"{OWN_ASYNC}; floor: {COPY}", copy, of[OWN_ASYNC]))
    if OVERLAPPED in of:
        rows += _overlapped_rows(saved, few=few)
    if TORCH_SAVE not in of:
        return rows
    times = TIMES_FASTER_THAN_TORCH if most else None
    rows += [
        beside_peer(f"{DCP_SAVE}; peer: {TORCH_SAVE}", of[DCP_SAVE], of[TORCH_SAVE]),
        beside_peer(
            f"{DCP_ASYNC}; peer: {TORCH_ASYNC}", of[DCP_ASYNC], of[TORCH_ASYNC], at_least=times
        ),
        beside_peer(f"{DCP_ASYNC}; peer: {TORCH_KEPT}", of[DCP_ASYNC], of[TORCH_KEPT]),
    ]
    if META not in of:
        return rows
    # It returns before it has copied, as the overlapped call does.
    best = OVERLAPPED if OVERLAPPED in of else DCP_ASYNC
    whole = {name: saved.by_call[name].call + saved.by_call[name].step for name in (best, META)}
    return [
        *rows,
        beside_peer(f"{best}; peer: {META}", of[best], of[META]),
        beside_peer(f"{best}, and a step at once; peer: {META}", whole[best], whole[META]),
    ]


def _overlapped_rows(saved: Saved, *, few: bool) -> list[Row]:
    held = saved.by_call[OVERLAPPED]
    limit = OVERLAPPED_SHARE * saved.copy.median + OVERLAPPED_SECONDS
    call = beside_floor(f"{OVERLAPPED}, the call; floor: {COPY}", saved.copy, held.call)
    target = f"≤ {OVERLAPPED_SHARE:.0%} of the floor + {OVERLAPPED_SECONDS * 1e3:.0f} ms"
    return [
        replace(call, target=target, met=held.call.median <= limit) if few else call,
        beside_floor(
            f"{OVERLAPPED}, and a step at once; floor: {COPY}", saved.copy, held.call + held.step
        ),
    ]


def _notes(saved: Saved) -> list[str]:
    return [
        f"copies of the tensors as they are: {named(saved.floors)}",
        f"{AS_ONE}: {named(saved.floors_as_one)}",
        _WHY_NOT_AS_ONE,
        *([f"{LOOP}: {Figure.of(saved.loop).short}, {_WHY_NOT_BY_LOOP}"] if saved.loop else []),
        (
            "asking each tensor of the nested state dict for its address takes "
            f"{Figure.of(saved.walk).short}, {saved.walk.median / saved.copy.median:.0%} of the "
            "copy; the copies above begin with a list of the tensors"
        ),
        (
            f"{NULL_STAGER}, through a writer that does nothing, takes "
            f"{Figure.of(saved.null_stager).short}, "
            f"{saved.null_stager.median / saved.copy.median:.0%} of the copy"
        ),
        "the next save begins when the one before is complete; that wait isn't counted",
        "what every call saved last was loaded, and was the state before the step that followed",
        *REMARKS,
    ]


# -- loads -------------------------------------------------------------------------------------


def _loads(settings: Settings, workload: Workload, ranks: int) -> Part:
    # The state, the slots, torch's files, the floor's file.
    need(settings.tmpfs, workload.total_bytes * 5)
    with scratch(settings.tmpfs) as directory:
        spec = _spec(settings, workload, directory)
        in_fresh_processes(_prepare_loads, spec, ranks=ranks, timeout=PATIENCE)
        by_rank = in_fresh_processes(_measure_loads, spec, ranks=ranks, timeout=PATIENCE)
    found = slowest_by_name(by_rank)
    own = found[OWN_LOAD]
    return Part(
        [
            beside_floor(
                f"{DCP_LOAD}; floor: {OWN_LOAD}", own, found[DCP_LOAD], at_most=DCP_LOAD_LIMIT
            ),
            beside_floor(
                f"{UNVERIFIED}; floor: {PREADV}",
                found[PREADV],
                found[UNVERIFIED],
                at_most=OWN_LOAD_LIMIT if workload.tensors == FEW else None,
            ),
            beside_floor(
                f"{OWN_LOAD}; floor: {UNVERIFIED}",
                found[UNVERIFIED],
                own,
                at_most=VERIFIED_LIMIT if workload.tensors == FEW else None,
            ),
            beside_floor(f"{OWN_LOAD}; floor: {PREADV}", found[PREADV], own),
            beside_floor(f"{DCP_LOAD}; floor: {PREADV}", found[PREADV], found[DCP_LOAD]),
            beside_peer(f"{DCP_LOAD}; peer: {TORCH_LOAD}", found[DCP_LOAD], found[TORCH_LOAD]),
        ],
        [
            "each load opens a new reader, within its time, and what it loaded is compared",
            f"{PREADV} reads a file of the same bytes that is open already, with the same threads",
            (
                "all of these begin just after what they read into was made wrong: the processor "
                "still has to write some of that to memory, which takes time of whoever comes next"
            ),
        ],
    )


def _prepare_loads(rank: Rank, spec: Spec) -> None:
    """What the trainer did before it was restarted."""
    state = nested(spec.workload, rank)
    dcp.save(state.tree, storage_writer=FileSystemWriter(spec.torch_checkpoint))
    with closing(
        MemoryStorageWriter(None, memory_root=str(spec.memory), job=JOB, keep_memory=1)
    ) as writer:
        dcp_mem.save(state.tree, checkpoint_id=CHECKPOINT, storage_writer=writer)


def _measure_loads(rank: Rank, spec: Spec) -> dict[str, Sample]:
    state = wrong(spec.workload, rank)
    path = spec.directory / f"floor-{rank.rank}"

    def wipe() -> None:
        state.wipe()
        rank.barrier()  # else the rank that wipes faster waits within its load for the others

    with (
        warm_mapping(path, state.local),
        closing(Preads(path, state.local, rank.threads)) as preads,
    ):
        ours: dict[str, Callable[[], float]] = {
            PREADV: partial(seconds, preads.read),
            UNVERIFIED: partial(_load, state, spec, dcp_mem.load, verify=False),
            OWN_LOAD: partial(_load, state, spec, dcp_mem.load),
            DCP_LOAD: partial(_load, state, spec, dcp.load),
        }
        ours = {name: prepared(wipe, measure) for name, measure in ours.items()}
        peer = {TORCH_LOAD: prepared(wipe, partial(_torch_load, state, spec))}
        rank.in_turn({**ours, **peer}, repeats=1)
        return _in_rounds(rank, ours, peer, spec)


def _load(
    state: NestedState, spec: Spec, load: Callable[..., Any], *, verify: bool = True
) -> float:
    start = time.perf_counter()
    with MemoryStorageReader(None, memory_root=str(spec.memory), job=JOB, verify=verify) as reader:
        load(state.tree, storage_reader=reader)
        took = time.perf_counter() - start
    state.check(0)
    return took


def _torch_load(state: NestedState, spec: Spec) -> float:
    reader = FileSystemReader(spec.torch_checkpoint)
    took = seconds(lambda: dcp.load(state.tree, storage_reader=reader))
    state.check(0)
    return took
