"""How much tmpfs a node needs for its own checkpoints and for copies, in multiples of its state."""

from __future__ import annotations

import os
import threading
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import dcp_mem
from benchmarks.harness.nodes.cluster import MEMORY
from benchmarks.harness.nodes.jobs import PATIENCE, nodes
from benchmarks.harness.repeated import Saves
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import Part, Row, Section, attempt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Memory with copies on other nodes"
KEEPS = (1, 2)
SAVES = 8
STATED = {"ML Flashpoint": 4, "Nebula": 3}
"""Times the state, as the documentation of each says."""
PARITY_LIMIT = 1.3
ROUNDING = 2 * MIB
"""A slot's size is a multiple of this."""
BESIDES = 1.01
"""Times the slots: manifests and catalogs lie beside them."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of redundancy.

    Attributes:
        copies: On other nodes.
        parity: Nodes of a parity group, without the one that has the parity; 0: none.
    """

    name: str
    copies: int = 0
    parity: int = 0

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the writer."""
        if self.parity:
            return {"redundancy": dcp_mem.parity(self.parity)}
        return {"replicas": self.copies}

    @property
    def states(self) -> float:
        """What a checkpoint takes of a node's memory, in multiples of the node's state."""
        return 1 + self.copies + (1 / self.parity if self.parity else 0)


NONE, ONE, TWO, PARITY = (
    Mode("no copies"),
    Mode("replicas=1", 1),
    Mode("replicas=2", 2),
    Mode("parity(4)", parity=4),
)


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    mode: Mode
    keep: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes.

    Attributes:
        state: The rank's part of the state.
        after: What the node's tmpfs held after the last save.
        most: What it held at most.
    """

    state: int
    after: int
    most: int


def run(settings: Settings) -> Section:
    huge = settings.huge
    each = (32 if settings.quick else 256) * MIB
    parts = [
        attempt(
            "memory", f"3 nodes, keep={keep}", partial(_part, huge, each, 3, keep, (NONE, ONE, TWO))
        )
        for keep in KEEPS
    ]
    if hasattr(dcp_mem, "parity"):
        parts += [
            attempt(
                "memory",
                f"5 nodes, keep={keep}",
                partial(_part, huge, each, 5, keep, (NONE, PARITY)),
            )
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
    stated = [
        Row(f"{name}, as stated", dcp_mem=f"{times} × state") for name, times in STATED.items()
    ]
    return Part(
        [*rows, *stated],
        [
            f"{SAVES} saves of {each // MIB} MiB on each node; each waits for the copies before it",
            "what the whole tmpfs holds, on the node with most; a slot is a multiple of 2 MiB",
        ],
    )


def _row(mode: Mode, keep: int, measured: Measured, alone: Measured) -> Row:
    times = measured.most / alone.most
    slots = (1 + mode.copies) * (keep + 1)
    limit = slots * (measured.state + ROUNDING) * BESIDES
    text = f"≤ {slots} = {1 + mode.copies} × (keep + 1) × state, slots rounded up, + 1%"
    return Row(
        f"tmpfs of a node, {mode.name}",
        dcp_mem=f"{measured.most / measured.state:.2f} × state at most, "
        f"{measured.after / measured.state:.2f} at the end",
        ratio=f"{times:.2f} × no copies",
        target=f"≤ {PARITY_LIMIT} × no copies" if mode.parity else text,
        met=times <= PARITY_LIMIT if mode.parity else measured.most <= limit,
    )


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    saves = Saves(
        state, memory=MEMORY / "dcp_mem", keep=spec.keep, save=dcp_mem.save, **spec.mode.arguments
    )
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
    """Watch what the node's tmpfs holds while the block runs.

    Args:
        interval: Seconds between looks.
    """
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
    """Bytes that the whole tmpfs of this node holds, unlinked files included."""
    found = os.statvfs(MEMORY)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
