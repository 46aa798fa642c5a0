"""How much tmpfs a node needs for what it keeps and for what it keeps for others, as multiples of its own state."""

from __future__ import annotations

import os
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import dcp_mem
from benchmarks.ours import Saves
from benchmarks.replication.nodes import PATIENCE, nodes
from benchmarks.report import Part, Row, Section, attempt
from benchmarks.settings import MIB
from benchmarks.states import Workload, trained
from tests.cluster import MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.processes import Rank
    from benchmarks.settings import Settings

TITLE = "Memory with copies on other nodes"
KEEPS = (1, 2)
SAVES = 8
STATED = {"ML Flashpoint": 4, "Nebula": 3}
"""Times the state, as their documentation says."""
PARITY_LIMIT = 1.3
ROUNDING = 2 * MIB
"""Of every slot."""
BESIDES = 1.01
"""Manifests and catalogs lie beside the slots."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of redundancy. arguments: of the writer. copies: what lies on a node, in states; parity: of how many nodes."""

    name: str
    copies: int = 0
    parity: int = 0

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the writer is told, once `dcp_mem` is imported where it is made."""
        if self.parity:
            return {"redundancy": dcp_mem.parity(self.parity)}
        return {"replicas": self.copies}

    @property
    def states(self) -> float:
        """What a checkpoint takes of a node's memory, in states of one node."""
        return 1 + self.copies + (1 / self.parity if self.parity else 0)


NONE, ONE, TWO, PARITY = Mode("no copies"), Mode("replicas=1", 1), Mode("replicas=2", 2), Mode("parity(4)", parity=4)


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    mode: Mode
    keep: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes: a rank's part of the state, and what its node's tmpfs held after the last save, and at most."""

    state: int
    after: int
    most: int


def run(settings: Settings, huge: str) -> Section:
    each = (32 if settings.quick else 256) * MIB
    parts = [
        attempt("memory", f"3 nodes, keep={keep}", partial(_part, huge, each, 3, keep, (NONE, ONE, TWO)))
        for keep in KEEPS
    ]
    if hasattr(dcp_mem, "parity"):
        parts += [
            attempt("memory", f"5 nodes, keep={keep}", partial(_part, huge, each, 5, keep, (NONE, PARITY)))
            for keep in KEEPS
        ]
    return Section(TITLE, parts)


def _part(huge: str, each: int, count: int, keep: int, modes: Sequence[Mode]) -> Part:
    workload = Workload(each * count, 64)
    found: dict[Mode, Measured] = {}
    for mode in modes:
        room = int((mode.states * (keep + 2) + 1) * (each + ROUNDING))
        with nodes(count, memory_bytes=room, huge=huge, besides=count * each) as cluster:
            by_rank = cluster.measure(_measure, Spec(workload, mode, keep))
        found[mode] = max(by_rank, key=lambda one: one.most)
    rows = [_row(mode, keep, measured, found[NONE]) for mode, measured in found.items()]
    stated = [Row(f"{name}, as stated", ours=f"{times} x state") for name, times in STATED.items()]
    return Part(
        [*rows, *stated],
        [
            f"{SAVES} saves of {each // MIB} MiB on each node, each of which waits for the copies of the one before",
            "what the whole tmpfs holds counts, of the node that has most in it; a slot is a multiple of 2 MiB",
        ],
    )


def _row(mode: Mode, keep: int, measured: Measured, alone: Measured) -> Row:
    times = measured.most / alone.most
    slots = (1 + mode.copies) * (keep + 1)
    limit = slots * (measured.state + ROUNDING) * BESIDES
    text = f"≤ {slots} = {1 + mode.copies} x (keep + 1) x state, slots rounded up, + 1%"
    return Row(
        f"tmpfs of a node, {mode.name}",
        ours=f"{measured.most / measured.state:.2f} x state at most, {measured.after / measured.state:.2f} at the end",
        ratio=f"{times:.2f} x no copies",
        target=f"≤ {PARITY_LIMIT} x no copies" if mode.parity else text,
        met=times <= PARITY_LIMIT if mode.parity else measured.most <= limit,
    )


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    saves = Saves(state, memory=MEMORY / "dcp_mem", keep=spec.keep, save=dcp_mem.save, **spec.mode.arguments)
    with closing(saves), _watched() as most:
        for _ in range(SAVES):
            saves.save()
            if spec.mode != NONE:
                saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
        rank.barrier()
        after = _in_use()
    return Measured(state.local_bytes, after, max(most))


@contextmanager
def _watched(interval: float = 0.002) -> Iterator[list[int]]:
    """What the node's tmpfs holds, looked at every so many seconds while the block runs."""
    looks, stop = [_in_use()], threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            looks.append(_in_use())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        stop.set()
        thread.join()


def _in_use() -> int:
    """Bytes that the whole tmpfs of this node holds, with and without a name."""
    found = os.statvfs(MEMORY)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
