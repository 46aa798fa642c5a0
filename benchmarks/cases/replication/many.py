"""What saves, copies and recoveries cost jobs of as many ranks as this machine carries.

Every rank is a process of its own, forked from one that has imported torch. Eight of them share a
memory root of their own, and so are a node to dcp_mem, whose memory can be lost. Their states are
small: what is measured is what grows with the number of ranks.

1. All ranks save several times, with a copy of each node's segments on another node.
2. All processes are killed, and one node's memory is lost.
3. New processes load the newest checkpoint, and compare all of it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
import dcp_mem.functional
import dcp_mem.reader
import dcp_mem.writer  # the forks have these from their parent: importing them isn't measured
from benchmarks.harness.forks import (
    RANKS_PER_NODE,
    Footprint,
    footprint,
    in_forks,
    meet,
    sockets_row,
)
from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import MIB
from benchmarks.harness.tables import Part, Row, Section, attempt

if TYPE_CHECKING:
    from benchmarks.harness.settings import Settings

TITLE = "Saves and recoveries of many ranks"
WORLDS, QUICK_WORLDS = (64, 128, 192), (16,)
SAVES = 5
TENSORS = 20
COLUMNS = 64
BYTES_PER_RANK = 16 * MIB
"""Of memory, tmpfs included; more than a rank takes."""
SECONDS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What one rank measured while it saved.

    Attributes:
        first: Seconds of the first save, in which ranks connect and plan.
        first_cpu: CPU seconds of this rank in it.
        later: Median seconds of a later save.
        later_cpu: CPU seconds of this rank in a later save, its copy not counted.
        opened: By saving and copying.
    """

    first: float
    first_cpu: float
    later: float
    later_cpu: float
    opened: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What one rank measured while it loaded.

    Attributes:
        seconds: Of the load.
        cpu: CPU seconds of this rank in it.
        opened: By loading, at its end.
        is_equal: Whether all of its state is what was saved.
        from_peers: Bytes that all ranks together got from other nodes' memory.
    """

    seconds: float
    cpu: float
    opened: Footprint
    is_equal: bool
    from_peers: int


def run(settings: Settings) -> Section:
    worlds = QUICK_WORLDS if settings.quick else WORLDS
    parts = [
        attempt(
            "many",
            f"{world} ranks on {world // RANKS_PER_NODE} nodes",
            partial(_part, settings, world),
        )
        for world in worlds
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, world: int) -> Part:
    need(settings.tmpfs, world * BYTES_PER_RANK)
    with scratch(settings.tmpfs) as directory:
        saved = in_forks(_save, world, directory, preload=__name__, seconds=SECONDS)
        shutil.rmtree(_root(directory, RANKS_PER_NODE))
        loaded = in_forks(_load, world, directory, preload=__name__, seconds=SECONDS)
    if not all(one.is_equal for one in loaded):
        wrong = [rank for rank, one in enumerate(loaded) if not one.is_equal]
        raise MeasurementFailed(f"ranks {wrong} have loaded something else than they saved")
    rows = [
        Row("ranks that have loaded what they saved", dcp_mem=f"{len(loaded)} of {world}"),
        sockets_row([*(one.opened for one in saved), *(one.opened for one in loaded)]),
        Row("threads of a rank, at most", dcp_mem=f"{max(one.opened.threads for one in saved)}"),
        _row(
            "the first save, connecting included",
            [one.first for one in saved],
            [one.first_cpu for one in saved],
        ),
        _row("a later save", [one.later for one in saved], [one.later_cpu for one in saved]),
        _row(
            "a load, one node's memory lost",
            [one.seconds for one in loaded],
            [one.cpu for one in loaded],
        ),
    ]
    notes = [
        (
            f"{SAVES} saves of {_state_nbytes() / 1e3:.0f} kB a rank with replicas=1; in the load, "
            f"{loaded[0].from_peers / 1e6:.1f} MB came from other nodes"
        )
    ]
    return Part(rows, notes)


def _row(what: str, seconds: list[float], cpu: list[float]) -> Row:
    of_all, of_first = sum(cpu), cpu[0] * 1e3
    took = f"{max(seconds):.2f} s; CPU of all ranks {of_all:.2f} s, of rank 0 {of_first:.0f} ms"
    return Row(what, dcp_mem=took)


# -- the ranks -------------------------------------------------------------------------------------


def _root(directory: Path, rank: int) -> Path:
    """Return the memory root of a rank's node."""
    return directory / f"node-{rank // RANKS_PER_NODE}"


def _join(rank: int, world: int, store: dist.Store) -> None:
    """Join a group whose collectives do nothing: gloo's would take thousands of sockets."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    dist.init_process_group("fake", store=store, rank=rank, world_size=world)


def _state(rank: int, world: int, step: int) -> dict[str, Any]:
    """Return the state of a step: sharded over all ranks, replicated, and objects."""
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {"step": step, f"own.{rank}": f"of rank {rank} in step {step}"}
    for number in range(TENSORS):
        shard = torch.full((2, COLUMNS), float(rank + number * world + step * 1e6))
        state[f"layer{number}"] = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
    state["replicated"] = torch.full((COLUMNS,), float(step))
    return state


def _state_nbytes() -> int:
    return TENSORS * 2 * COLUMNS * 4


def _save(rank: int, world: int, store: dist.Store, directory: Path) -> Saved:
    _join(rank, world, store)
    root = _root(directory, rank)
    states = [_state(rank, world, step) for step in range(SAVES)]
    before = footprint()
    took, cpu = [], []
    with dcp_mem.MemoryStorageWriter(None, memory_root=str(root), job="many", replicas=1) as writer:
        for step, state in enumerate(states):
            meet(store, f"step {step}", world)
            started, spent = time.perf_counter(), time.thread_time()
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            took.append(time.perf_counter() - started)
            cpu.append(time.thread_time() - spent)
            writer.wait(f"step-{step}", dcp_mem.State.REPLICATED)
        opened = footprint().since(before)
        meet(store, "measured", world)
        return Saved(
            first=took[0],
            first_cpu=cpu[0],
            later=median(took[1:]),
            later_cpu=median(cpu[1:]),
            opened=opened,
        )


def _load(rank: int, world: int, store: dist.Store, directory: Path) -> Loaded:
    _join(rank, world, store)
    saved, state = _state(rank, world, SAVES - 1), _state(rank, world, -1)
    before = footprint()
    with dcp_mem.MemoryStorageReader(
        None, memory_root=str(_root(directory, rank)), job="many"
    ) as reader:
        meet(store, "ready", world)
        started, cpu = time.perf_counter(), time.process_time()
        dcp_mem.load(state, storage_reader=reader)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        opened = footprint().since(before)
        sources = reader.report().sources
        meet(store, "measured", world)
    return Loaded(
        seconds=seconds,
        cpu=cpu,
        opened=opened,
        is_equal=state.keys() == saved.keys()
        and all(_is_equal(state[name], value) for name, value in saved.items()),
        from_peers=sources.get("peers", 0),
    )


def _is_equal(found: Any, saved: Any) -> bool:
    if isinstance(saved, DTensor):
        return torch.equal(found.to_local(), saved.to_local())
    if isinstance(saved, torch.Tensor):
        return torch.equal(found, saved)
    return bool(found == saved)
