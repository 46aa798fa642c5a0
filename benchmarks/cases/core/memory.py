"""What saving costs in memory: tmpfs, the trainer, the agent.

Mapped pages of tmpfs count as resident in every process that maps them. They are the checkpoints,
and are counted once, as tmpfs in use. Processes are judged by their own memory.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import torch_peers
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.procfs import agents, resident, tmpfs_bytes, watching
from benchmarks.harness.repeated import Saves
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.states import Workload, trained
from benchmarks.harness.tables import Part, Row, Section, attempt, size

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.procfs import Resident
    from benchmarks.harness.settings import Settings
    from benchmarks.harness.states import State

TITLE = "Memory"
TINY = Workload(1 * MIB, 4)
TRAINER_SHARE = 0.01
MANIFESTS = 0.01
"""Share that manifests, and slots that end on a huge page, may add to torch's own files."""
AGENT_LIMIT = 200 * MIB
TIMEOUT = 420.0
IMPORT_BASELINE = """
import dcp_mem.flushing.agent, fsspec.implementations.local
for line in open("/proc/self/status"):
    if line.startswith(("RssAnon", "RssFile")):
        print(line.split()[1])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    workload: Workload
    keep: int
    saves: int
    memory: Path
    disk: Path


@dataclass(frozen=True, slots=True)
class Agent:
    """The agent's memory in bytes.

    Attributes:
        looks: How often it was looked at.
        own: At most, without mapped tmpfs.
        shared: Mapped tmpfs, at most.
    """

    looks: int
    own: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes.

    Attributes:
        stock: What torch's writer makes of the state.
        tmpfs_peak: The most that was in use after a save.
        tmpfs: What was in use at the end.
    """

    state: int
    stock: int
    tmpfs_peak: int
    tmpfs: int
    before: Resident
    after_first: Resident
    after: Resident
    peak_anonymous: int
    agent: Agent


def run(settings: Settings) -> Section:
    parts = []
    for workload, keep, saves in _plan(settings):
        title = f"{workload.name}, keep={keep}, {saves} saves"
        measure = partial(_part, settings, workload, keep, saves)
        parts.append(attempt("memory", title, measure))
    return Section(TITLE, parts)


def _plan(settings: Settings) -> list[tuple[Workload, int, int]]:
    if settings.quick:
        return [(Workload(1 * GIB, 64), 2, 5)]
    return [
        (Workload(1 * GIB, 64), 2, 10),
        (Workload(1 * GIB, 20_000), 2, 6),
        (Workload(4 * GIB, 64), 1, 4),
    ]


def _part(settings: Settings, workload: Workload, keep: int, saves: int) -> Part:
    # The state and the slots; one more for what the disk's page cache can't give back at once.
    need(settings.tmpfs, workload.total_bytes * (keep + 3))
    with scratch(settings.tmpfs) as memory, scratch(settings.disk) as disk:
        spec = Spec(workload=workload, keep=keep, saves=saves, memory=memory, disk=disk)
        m = in_fresh_processes(_measure, spec, timeout=TIMEOUT)[0]
    return Part([_tmpfs_row(keep, m), _trainer_row(m), _agent_row(m)], _notes(m))


def _measure(rank: Rank, spec: Spec) -> Measured:
    state = trained(spec.workload, rank)
    stock = _stock_bytes(state, spec.memory / "stock")
    _save_something_tiny(rank, spec)
    gc.collect()
    root = spec.memory / "memory"
    before = resident()
    in_use, after_first = [], before
    with (
        watching(partial(agents, root)) as agent,
        watching(lambda: [os.getpid()]) as trainer,
        closing(Saves(state, memory=root, path=spec.disk / "dcp_mem", keep=spec.keep)) as saves,
    ):
        for number in range(spec.saves):
            saves.save()
            in_use.append(tmpfs_bytes(root))
            after_first = resident() if number == 0 else after_first
        saves.writer.wait()
        gc.collect()
        after = resident()
        in_use.append(tmpfs_bytes(root))
    return Measured(
        state=state.local_bytes,
        stock=stock,
        tmpfs_peak=max(in_use),
        tmpfs=in_use[-1],
        before=before,
        after_first=after_first,
        after=after,
        peak_anonymous=trainer.anonymous,
        agent=Agent(agent.looks, max(0, agent.own - _import_baseline()), agent.shared),
    )


def _stock_bytes(state: State, directory: Path) -> int:
    """Bytes that torch's writer makes of `state`: payload, a frame per tensor, metadata."""
    torch_peers.save(state, directory)
    stock = tmpfs_bytes(directory)
    shutil.rmtree(directory)
    return stock


def _save_something_tiny(rank: Rank, spec: Spec) -> None:
    """Import all that a save imports, which is no cost of a state."""
    tiny = trained(TINY, rank)
    with closing(Saves(tiny, memory=spec.memory / "tiny", path=spec.disk / "tiny")) as saves:
        saves.save()
        saves.writer.wait()


def _import_baseline() -> int:
    """Memory of a process that has only imported the agent."""
    command = [sys.executable, "-c", IMPORT_BASELINE]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(int(line) for line in done.stdout.split()) * 1024


def _tmpfs_row(keep: int, m: Measured) -> Row:
    limit = (keep + 1) * m.stock * (1 + MANIFESTS)
    return Row(
        "tmpfs in use, peak",
        dcp_mem=size(m.tmpfs_peak),
        ratio=f"{m.tmpfs_peak / m.state:.3f} × state",
        target=f"≤ {size(limit)}: {keep + 1} (keep + 1) × torch's files + {MANIFESTS:.0%}",
        met=m.tmpfs_peak <= limit,
        peer=f"{size(m.stock)} per checkpoint",
    )


def _trainer_row(m: Measured) -> Row:
    growth = m.peak_anonymous - m.before.anonymous
    limit = TRAINER_SHARE * m.state
    return Row(
        "trainer's own memory, peak growth",
        dcp_mem=size(growth),
        ratio=f"{growth / m.state:.2%} of the state",
        target=f"≤ {size(limit)}: {TRAINER_SHARE:.0%} of the state",
        met=growth <= limit,
    )


def _agent_row(m: Measured) -> Row:
    name = "agent's own memory above its imports, peak"
    if not m.agent.looks:
        return Row(name, dcp_mem="failed: no agent was seen", met=False, failed=True)
    return Row(
        name,
        dcp_mem=size(m.agent.own),
        target=f"≤ {size(AGENT_LIMIT)}",
        met=m.agent.own <= AGENT_LIMIT,
    )


def _notes(m: Measured) -> list[str]:
    overhead = m.stock / m.state - 1
    first = m.after_first.anonymous - m.before.anonymous
    later = m.after.anonymous - m.after_first.anonymous
    tmpfs = (
        f"tmpfs at the end {size(m.tmpfs)}; frames and metadata are {overhead:.2%} of the payload "
        "in torch's own files"
    )
    trainer = (
        f"trainer, anonymous memory: {size(m.before.anonymous)} before, {size(first)} more after "
        f"the first save, {size(later)} more by the end; resident with mapped tmpfs: "
        f"{size(m.before.total)} before, {size(m.after.total)} at the end"
    )
    agent = f"agent: {m.agent.looks} looks, mapped tmpfs at most {size(m.agent.shared)}"
    return [tmpfs, trainer, agent]
