"""How long a save blocks whose checkpoint is copied, beside a save without copies and peers."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import dcp_mem
from benchmarks.harness.nodes.cluster import MEMORY
from benchmarks.harness.nodes.jobs import PATIENCE, nodes
from benchmarks.harness.nodes.memory_peers import PEERS, Peer
from benchmarks.harness.repeated import Saves
from benchmarks.harness.samples import Sample, slowest, slowest_by_name
from benchmarks.harness.settings import MIB
from benchmarks.harness.states import State, Workload, trained
from benchmarks.harness.tables import Part, Row, Section, attempt, beside_floor, beside_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

T = TypeVar("T")

TITLE = "Blocking save with copies on another node"
NODES = 2
KEEP = 1
WARM_UPS = 3
LIMIT = 1.10
POLICIES = ("wait", "skip", "cancel")
MOST_CHECKPOINTS = 2 * (KEEP + 3) + KEEP + 1
"""On a node: of a writer with copies, some still under way, and of a writer without."""
PEER_CHECKPOINTS = 10
"""On a node: a peer keeps two states and two of the other node, or pickles them."""


@dataclass(frozen=True, slots=True)
class Spec:
    workload: Workload
    repeats: int
    policy: str = "wait"
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Rushed:
    """Seconds that saves block.

    Attributes:
        caught: How many saves came while the copies of the one before were under way.
    """

    alone: Sample
    copied: Sample
    caught: int


@dataclass(frozen=True, slots=True)
class BesidePeer:
    """Seconds that saves block.

    Attributes:
        parts: Of the peer's saves, by name.
    """

    dcp_mem: Sample
    peer: Sample
    parts: Mapping[str, Sample]


def run(settings: Settings) -> Section:
    huge = settings.huge
    workload = Workload((128 if settings.quick else 512) * MIB, 64)
    steady = attempt("blocking", _title(workload), partial(_steady_part, settings, huge, workload))
    rushed = [
        attempt(
            "blocking",
            f'{_title(workload)}, saves that come while copies run, on_replication="{policy}"',
            partial(_rushed_part, settings, huge, workload, policy),
        )
        for policy in POLICIES
    ]
    peers = [
        attempt(
            "blocking",
            f"{_title(workload)}, beside {peer.name}",
            partial(_peer_part, settings, huge, workload, peer),
        )
        for peer in PEERS
    ]
    return Section(TITLE, [steady, *rushed, *peers])


def _title(workload: Workload) -> str:
    return f"{workload.total_bytes // NODES // MIB} MiB on each of {NODES} nodes"


def _measure(
    measure: Callable[[Rank, Spec], T], spec: Spec, huge: str, checkpoints: int = MOST_CHECKPOINTS
) -> list[T]:
    nbytes = spec.workload.total_bytes // NODES
    with nodes(
        NODES, memory_bytes=checkpoints * nbytes, huge=huge, besides=2 * NODES * nbytes
    ) as found:
        return found.measure(measure, spec)


# -- with room between saves -------------------------------------------------------------------


def _steady_part(settings: Settings, huge: str, workload: Workload) -> Part:
    by_rank = _measure(_measure_steady, Spec(workload, settings.repeats), huge)
    found = slowest_by_name(by_rank)
    row = beside_floor(
        "dcp_mem.save with replicas=1; floor: without",
        found["alone"],
        found["copied"],
        at_most=LIMIT,
    )
    return Part(
        [row], [f"each with keep={KEEP}; copies of the one before have ended when a save begins"]
    )


def _measure_steady(rank: Rank, spec: Spec) -> dict[str, Sample]:
    state = trained(spec.workload, rank)
    with ExitStack() as stack:
        alone = stack.enter_context(closing(_saves(state, "alone")))
        copied = stack.enter_context(closing(_saves(state, "copied", replicas=1)))
        measures: dict[str, Callable[[], float]] = {
            "alone": alone.save,
            "copied": partial(_save_and_wait, copied),
        }
        return rank.in_turn(measures, repeats=spec.repeats, warm_ups=WARM_UPS)


def _saves(state: State, name: str, replicas: int = 0, policy: str = "wait") -> Saves:
    return Saves(
        state,
        memory=MEMORY / name,
        keep=KEEP,
        save=dcp_mem.save,
        changes=True,
        replicas=replicas,
        on_replication=policy,
    )


def _save_and_wait(saves: Saves) -> float:
    took = saves.save()
    saves.writer.wait(saves.newest, "replicated", timeout=PATIENCE)
    return took


# -- without -----------------------------------------------------------------------------------


def _rushed_part(settings: Settings, huge: str, workload: Workload, policy: str) -> Part:
    by_rank = _measure(_measure_rushed, Spec(workload, settings.repeats, policy), huge)
    alone, copied = (
        slowest([one.alone for one in by_rank]),
        slowest([one.copied for one in by_rank]),
    )
    row = beside_floor(
        "dcp_mem.save with replicas=1, right behind another; floor: without", alone, copied
    )
    caught = min(one.caught for one in by_rank)
    return Part(
        [row],
        [f"{caught} of {settings.repeats} came while the copies of the one before were under way"],
    )


def _measure_rushed(rank: Rank, spec: Spec) -> Rushed:
    state = trained(spec.workload, rank)
    caught: list[bool] = []
    with ExitStack() as stack:
        alone = stack.enter_context(closing(_saves(state, "alone")))
        copied = stack.enter_context(
            closing(_saves(state, "copied", replicas=1, policy=spec.policy))
        )

        def alone_again() -> float:
            alone.save()
            return alone.save()

        def copied_again() -> float:
            copied.save()
            caught.append(not _is_settled(copied))
            took = copied.save()
            _settle(copied)
            return took

        found = rank.in_turn(
            {"alone": alone_again, "copied": copied_again}, repeats=spec.repeats, warm_ups=WARM_UPS
        )
    return Rushed(found["alone"], found["copied"], sum(caught[WARM_UPS:]))


def _settle(saves: Saves) -> None:
    """Wait until no copies are under way, whether they have failed or not."""
    deadline = time.monotonic() + PATIENCE
    while not _is_settled(saves):
        if time.monotonic() > deadline:
            raise AssertionError(f"copies are still under way after {PATIENCE:.0f} s")
        time.sleep(0.01)


def _is_settled(saves: Saves) -> bool:
    in_memory = [status for status in saves.writer.status() if status.in_memory]
    return all(status.replicas or status.replication_error for status in in_memory)


# -- other libraries ---------------------------------------------------------------------------


def _peer_part(settings: Settings, huge: str, workload: Workload, peer: Peer) -> Part:
    what = f"dcp_mem.save with replicas=1; peer: {peer.name}"
    if not peer.is_installed:
        return Part([Row(what, peer=f"not installed: pip install {peer.package}")])
    by_rank = _measure(
        _measure_peer, Spec(workload, settings.repeats, peer=peer), huge, PEER_CHECKPOINTS
    )
    measured = slowest([one.dcp_mem for one in by_rank])
    saved = slowest([one.peer for one in by_rank])
    parts = slowest_by_name([one.parts for one in by_rank])
    return Part(
        [
            beside_peer(what, measured, saved),
            *(beside_peer(f"{what}, {name}", measured, part) for name, part in parts.items()),
        ],
        [peer.remark],
    )


def _measure_peer(rank: Rank, spec: Spec) -> BesidePeer:
    assert spec.peer is not None
    state = trained(spec.workload, rank)
    with ExitStack() as stack:
        copied = stack.enter_context(closing(_saves(state, "copied", replicas=1)))
        saver = stack.enter_context(closing(spec.peer.make(state, rank)))

        def peer_save() -> float:
            took = saver.save()
            saver.settle()
            return took

        measures: dict[str, Callable[[], float]] = {
            "dcp_mem": partial(_save_and_wait, copied),
            "peer": peer_save,
        }
        found = rank.in_turn(measures, repeats=spec.repeats, warm_ups=WARM_UPS)
    parts = {name: Sample(tuple(values[WARM_UPS:])) for name, values in saver.parts.items()}
    return BesidePeer(found["dcp_mem"], found["peer"], parts)
