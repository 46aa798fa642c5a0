"""From a loss to the first training step after it: what people wait for, phase by phase.

A small FSDP2 training runs under torchrun; after a save, one rank is killed, or one of two nodes
with all that is in its memory, while an empty node waits to take its place. Each phase counts until
the slowest rank has ended it. In the column "same processes" no process ends: a rank has failed and
says so, and the groups are made again, as managers of in-process restarts do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.harness.nodes.cluster import INTERFACE
from benchmarks.harness.nodes.cluster import MEMORY as NODE_MEMORY
from benchmarks.harness.nodes.jobs import nodes
from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.restarted import (
    KILLED,
    LOST,
    MEMORY,
    META,
    NEEDS,
    NODE,
    NOTICED,
    NVRX,
    PHASES,
    RANK,
    ROADS,
    SAME_PROCESS,
    TORCH,
    VICTIM,
    Life,
    Stamps,
    path_of,
)
from benchmarks.harness.runs import BENCHMARKS
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import mounted_tmpfs, scratch
from benchmarks.harness.settings import GIB
from benchmarks.harness.tables import Cell, Figure, Part, Row, Section, Table, attempt
from benchmarks.harness.training import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.nodes.cluster import Node
    from benchmarks.harness.settings import Settings

TITLE = "From a loss to the first step"
RANKS, STEPS = 2, 3
PATIENCE = 180.0
WAITING = 3.0
"""Seconds that the spare node has been waiting for, at least, when another one is lost."""
PORT = 29400
KEEP_ALIVE_SECONDS = 1
MOST_SHARE = 0.05
"""Of the whole, that importing dcp_mem and loading may take."""
OURS = ("the library's import", "load")

_PHASE_NOTE = (
    "model: it is made and sharded; state dict, state put back: torch's get_state_dict and "
    "set_state_dict; load: the newest checkpoint, verified by dcp_mem; step: the first one, which "
    "allocates what later ones have"
)
_PAGE_CACHE_NOTE = "a page cache that is warm; imports from a cold disk take several times as long"
NOTES = (
    f"{TORCH}, {META}: checkpoints lie on the same tmpfs, which is quicker than any disk",
    (
        f"{NVRX}: a local checkpoint manager without replication, in the same tmpfs. Its own form "
        "of states takes tensors on a GPU only, so a form was made here"
    ),
    (
        "processes: the kill is noticed, torchrun ends the other rank and starts both; "
        f"{_PHASE_NOTE}"
    ),
    _PAGE_CACHE_NOTE,
)
NODE_NOTES = (
    (
        f"{TORCH}, {META}: checkpoints lie on a tmpfs that all nodes share, which is quicker than "
        "any shared storage"
    ),
    f"{MEMORY}: replicas=1, and each save is REPLICATED before the next step",
    (
        f"{NVRX}: cliques of two. On CPUs its load after a lost node ends in "
        "`GroupWrapper.isend_state_dict`, which calls `.cuda()` for each tensor; so the same sends "
        "and receives were made here without a GPU"
    ),
    (
        "the node's processes are all killed at once, and its connections closed. noticed: the "
        "survivor's step has failed; processes: its torchrun starts a rank again, once the "
        "rendezvous has given up on the lost node, which takes three keep-alives "
        f"(`keep_alive_interval={KEEP_ALIVE_SECONDS}`; 5 s is torchrun's default); {_PHASE_NOTE}"
    ),
    _PAGE_CACHE_NOTE,
)
Noted = dict[str, float]
"""Seconds of each phase."""


def run(settings: Settings) -> Section:
    job = f"{RANKS} ranks, {SMALL.name}, {SMALL.state_bytes >> 20} MiB of state"
    parts = [
        attempt("restart", f"a rank is killed: {job}", partial(_ranks, settings)),
        attempt("restart", f"a node is lost: {job}", partial(_nodes, settings)),
    ]
    return Section(TITLE, parts)


def _ranks(settings: Settings) -> Part:
    def lived(road: str) -> Noted:
        with scratch(settings.tmpfs) as directory:
            return _lost_rank(road, directory)

    lives = _lives(settings, ROADS, lived)
    rows = [_share(MEMORY, PHASES, lives), _share(SAME_PROCESS, PHASES, lives)]
    return Part(rows, NOTES, tables=[_table(PHASES, lives)])


def _nodes(settings: Settings) -> Part:
    phases = (NOTICED, *PHASES)

    def lived(road: str) -> Noted:
        with mounted_tmpfs(4 * GIB, huge="never") as directory:
            return _lost_node(road, directory, settings.huge)

    lives = _lives(settings, [road for road in ROADS if road != SAME_PROCESS], lived)
    return Part([_share(MEMORY, phases, lives)], NODE_NOTES, tables=[_table(phases, lives)])


def _lives(
    settings: Settings, roads: Sequence[str], lived: Callable[[str], Noted]
) -> dict[str, list[Noted]]:
    """Play a life on each road that can be taken here, in turn, again and again."""
    possible = [road for road in roads if road not in NEEDS or find_spec(NEEDS[road])]
    lives: dict[str, list[Noted]] = {road: [] for road in possible}
    for _ in range(settings.restarts):
        for road in possible:
            lives[road].append(lived(road))
    return lives


# -- what is found ---------------------------------------------------------------------------------


def _table(phases: Sequence[str], lives: Mapping[str, Sequence[Noted]]) -> Table:
    lines: list[Sequence[Cell]] = [
        (phase, *(Figure.of(_of(lives[road], phase)) for road in lives)) for phase in phases
    ]
    whole = [Figure.of(_of(lives[road], *phases)) for road in lives]
    return Table(("phase", *lives), [*lines, ("all", *whole)])


def _of(lives: Sequence[Noted], *phases: str) -> Sample:
    return Sample(tuple(sum(life[phase] for phase in phases) for life in lives))


def _share(road: str, phases: Sequence[str], lives: Mapping[str, Sequence[Noted]]) -> Row:
    own, whole = _of(lives[road], *OURS), _of(lives[road], *phases)
    share = own.median / whole.median
    return Row(
        f"{road}: importing it and loading, of the whole",
        dcp_mem=f"{share:.1%} ({Figure.of(own).short} of {Figure.of(whole).short})",
        target=f"≤ {MOST_SHARE:.0%}",
        met=share <= MOST_SHARE,
    )


def _phases(directory: Path) -> Noted:
    """Return the seconds of each phase after the kill, from what the ranks have noted."""
    lost, survivor = _noted(directory, VICTIM, 0), _noted(directory, 1 - VICTIM, 0)
    # Where torchrun was quicker, it has ended the survivor before its step could fail.
    before = survivor.get(NOTICED, lost[KILLED])
    found = {NOTICED: before - lost[KILLED]}
    by_rank = [_noted(directory, rank, 1) for rank in range(RANKS)]
    for phase in PHASES:
        after = max(noted[phase] for noted in by_rank)
        found[phase], before = after - before, after
    return found


def _noted(directory: Path, rank: int, life: int) -> dict[str, float]:
    lines = path_of(directory, rank, life).read_text().splitlines()
    return dict(map(json.loads, lines))


# -- a rank is lost --------------------------------------------------------------------------------


def _lost_rank(road: str, directory: Path) -> Noted:
    """Run a training of which a rank is killed; return the seconds of each phase after that."""
    life = Life(road=road, loss=RANK, directory=directory, memory=directory / "memory", steps=STEPS)
    options = ("--standalone", "--local-addr=localhost", f"--nproc-per-node={RANKS}")
    log = directory / "log"
    with _started(_torchrun(options, life), "lo", log) as process:
        _await(lambda: process.poll() is not None, road, log)
        if process.returncode:
            raise _failed(f"{road}: torchrun ended with {process.returncode}", log)
    found = _phases(directory)
    # torchrun sees the end of a rank's process before a survivor's step fails, or soon after.
    found[PHASES[0]] += found.pop(NOTICED)
    return found


# -- a node is lost --------------------------------------------------------------------------------


def _lost_node(road: str, directory: Path, huge: str) -> Noted:
    """Run a training of which a node is lost; return the seconds of each phase after that."""
    life = Life(
        road=road, loss=NODE, directory=directory, memory=NODE_MEMORY / "bench", steps=STEPS
    )
    with nodes(RANKS + 1, memory_bytes=2 * GIB, huge=huge, besides=4 * GIB) as made:
        first, victim, spare = made.cluster.nodes
        logs = {one.address: directory / f"log-{one.address}" for one in (first, victim, spare)}
        with (
            _on_node(first, first, life, logs) as kept,
            _on_node(victim, first, life, logs),
        ):
            begun = [path_of(directory, rank, 0) for rank in range(RANKS)]
            _await(lambda: all(path.exists() for path in begun), road, *logs.values())
            with _on_node(spare, first, life, logs) as joined:
                waiting = time.monotonic()
                _await((directory / LOST).exists, road, *logs.values())
                time.sleep(max(0.0, waiting + WAITING - time.monotonic()))
                Stamps(directory, VICTIM, 0).note(KILLED)
                victim.lose()
                _await(lambda: _have_ended(kept, joined), road, *logs.values())
                if kept.returncode or joined.returncode:
                    ends = f"{kept.returncode} and {joined.returncode}"
                    raise _failed(f"{road}: torchrun ended with {ends}", *logs.values())
    return _phases(directory)


def _have_ended(*processes: subprocess.Popen[bytes]) -> bool:
    return all(process.poll() is not None for process in processes)


@contextmanager
def _on_node(
    node: Node, first: Node, life: Life, logs: Mapping[str, Path]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run torchrun on a node; the rendezvous is on the first one."""
    configuration = f"is_host={int(node is first)},keep_alive_interval={KEEP_ALIVE_SECONDS}"
    options = (
        *(f"--nnodes={RANKS}", "--nproc-per-node=1", f"--local-addr={node.address}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:{PORT}", "--rdzv-id=restart"),
        f"--rdzv-conf={configuration}",
    )
    command = node.namespaces.inside(_torchrun(options, life))
    with _started(command, INTERFACE, logs[node.address]) as process:
        yield process


# -- torchrun --------------------------------------------------------------------------------------


def _torchrun(options: Sequence[str], life: Life) -> list[str]:
    return [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options),
        *("--max-restarts=1", "--monitor-interval=0.1", "-m", "benchmarks.harness.restarted"),
        *life.arguments,
    ]


@contextmanager
def _started(
    command: Sequence[str], interface: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command; it is killed at the end, if it still runs."""
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        # As on users' machines: modules are compiled once, when they are first imported.
        "PYTHONDONTWRITEBYTECODE": "",
        # Else restarted ranks find the addresses of before the restart (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _await(condition: Callable[[], bool], road: str, *logs: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise _failed(f"{road}: it took more than {PATIENCE:.0f} s", *logs)
        time.sleep(0.02)


def _failed(why: str, *logs: Path) -> MeasurementFailed:
    texts = [log.read_text(errors="replace")[-4000:] for log in logs if log.exists()]
    return MeasurementFailed("\n".join([*texts, why]))
