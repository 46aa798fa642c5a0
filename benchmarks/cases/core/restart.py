"""From a kill to the first training step after it: what people wait for, phase by phase.

A small FSDP2 training runs under torchrun; one rank is killed after a save. Each phase counts until
the slowest rank has ended it. In the last column no process ends: a rank has failed and says so,
and the groups are made again, as managers of in-process restarts do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.harness.processes import MeasurementFailed
from benchmarks.harness.restarted import (
    KILLED,
    MEMORY,
    META,
    PHASES,
    ROADS,
    SAME_PROCESS,
    TORCH,
    VICTIM,
    path_of,
)
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import scratch
from benchmarks.harness.tables import Cell, Figure, Part, Row, Section, Table, attempt
from benchmarks.harness.training import SMALL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness.settings import Settings

TITLE = "From a kill to the first step"
RANKS, STEPS = 2, 3
PATIENCE = 180.0
MOST_SHARE = 0.05
"""Of the whole, that importing dcp_mem and loading may take."""
OURS = ("the library's import", "load")

NOTES = (
    f"{TORCH}, {META}: checkpoints lie on the same tmpfs, which is quicker than any disk",
    (
        "phases: processes: the kill is noticed, torchrun ends the other rank and starts both; "
        "model: it is made and sharded; load: the newest checkpoint, verified by dcp_mem; step: "
        "the first one, which allocates what later ones have"
    ),
    "a page cache that is warm; imports from a cold disk take several times as long",
)
Life = dict[str, float]
"""Seconds of each phase."""


def run(settings: Settings) -> Section:
    title = f"{RANKS} ranks, {SMALL.name}, {SMALL.state_bytes >> 20} MiB of state"
    return Section(TITLE, [attempt("restart", title, partial(_part, settings))])


def _part(settings: Settings) -> Part:
    roads = [road for road in ROADS if road != META or find_spec("torch_checkpointing")]
    lives: dict[str, list[Life]] = {road: [] for road in roads}
    for _ in range(settings.restarts):
        for road in roads:
            with scratch(settings.tmpfs) as directory:
                lives[road].append(_life(road, directory))
    whole = {road: Sample(tuple(sum(one.values()) for one in lives[road])) for road in roads}
    rows = [_share(MEMORY, lives), _share(SAME_PROCESS, lives)]
    return Part(rows, NOTES, tables=[_table(lives, whole)])


def _table(lives: Mapping[str, Sequence[Life]], whole: Mapping[str, Sample]) -> Table:
    lines: list[Sequence[Cell]] = [
        (phase, *(Figure.of(_of(lives[road], phase)) for road in lives)) for phase in PHASES
    ]
    return Table(("phase", *lives), [*lines, ("all", *(Figure.of(whole[road]) for road in lives))])


def _of(lives: Sequence[Life], *phases: str) -> Sample:
    return Sample(tuple(sum(life[phase] for phase in phases) for life in lives))


def _share(road: str, lives: Mapping[str, Sequence[Life]]) -> Row:
    own, whole = _of(lives[road], *OURS), _of(lives[road], *PHASES)
    share = own.median / whole.median
    return Row(
        f"{road}: importing it and loading, of the whole",
        dcp_mem=f"{share:.1%} ({Figure.of(own).short} of {Figure.of(whole).short})",
        target=f"≤ {MOST_SHARE:.0%}",
        met=share <= MOST_SHARE,
    )


def _life(road: str, directory: Path) -> Life:
    """Run a training that is killed once; return the seconds of each phase after the kill."""
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr=localhost", f"--nproc-per-node={RANKS}", "--max-restarts=1"),
        *("--monitor-interval=0.1", "-m", "benchmarks.harness.restarted"),
        *(road, str(directory), str(STEPS)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else restarted ranks find the addresses of before the restart (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    log = directory / "log"
    with log.open("wb") as output:
        try:
            ended = subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            ended = -1
    if ended:
        raise MeasurementFailed(f"{log.read_text()[-4000:]}\n{road}: torchrun ended with {ended}")
    before = _noted(directory, VICTIM, 0)[KILLED]
    found = {}
    by_rank = [_noted(directory, rank, 1) for rank in range(RANKS)]
    for phase in PHASES:
        after = max(noted[phase] for noted in by_rank)
        found[phase], before = after - before, after
    return found


def _noted(directory: Path, rank: int, life: int) -> dict[str, float]:
    lines = path_of(directory, rank, life).read_text().splitlines()
    return dict(map(json.loads, lines))
