"""What the hashes cost a flush that has nothing to reuse: full fine-tuning, where all changes.

CPU of a real agent, from the save until storage has the checkpoint and the agent is idle again:
with hashes (`reuse_stored=True`) and without, in turn. A run's first checkpoint is hashed, later
ones only where a part has the CRC32C that it had before. Hashes are user time; what a file system
or a network takes is system time, which differs much from one gigabyte to the next.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

import dcp_mem
from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.procfs import PROC, agents
from benchmarks.harness.samples import Sample
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import GIB, MIB
from benchmarks.harness.storage.targets import S3, running_server, running_sink
from benchmarks.harness.tables import CPU_PER_GB, Part, Section, attempt, beside_floor, within
from dcp_mem import MemoryStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings

TITLE = "Uploads with and without hashes"
CPU_LIMIT = 0.35
HASH_LIMIT = 1.03
TENSORS = 16
SETTLED_SECONDS = 0.5
"""For so long the agent must have used no CPU before it counts as idle."""
TIMEOUT = 400.0
GB = 1e9
NOTES = (
    "all of the agent's CPU counts, commit and retention included",
    "S3's sink drops bodies; its requests are unsigned",
    "moto's requests are signed: over plain http that takes a SHA-256 of each part",
)
SINK, DIRECTORY, MOTO = "S3's sink", "a directory on disk", "moto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a process measures."""

    nbytes: int
    memory: Path
    url: str
    repeats: int
    storage_options: Mapping[str, Any] = field(repr=False)


def run(settings: Settings) -> Section:
    nbytes = 256 * MIB if settings.quick else GIB
    parts = [
        attempt(
            "hashes", f"{nbytes / GIB:g} GiB to {where}", partial(_part, settings, where, nbytes)
        )
        for where in ((SINK,) if settings.quick else (SINK, DIRECTORY, MOTO))
    ]
    return Section(TITLE, parts)


def _part(settings: Settings, where: str, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes * 12)
    with scratch(settings.tmpfs) as memory, _target(settings, where) as (url, options):
        spec = Spec(
            nbytes=nbytes,
            memory=memory,
            url=url,
            repeats=settings.repeats,
            storage_options=options,
        )
        found = in_fresh_processes(_measure, spec, timeout=TIMEOUT)[0]
    rows = []
    is_judged = where == SINK
    for which in ("first", "later"):
        plain, hashed = found[f"{which}, plain"], found[f"{which}, hashed"]
        rows.append(
            within(f"CPU of a {which} checkpoint's flush", hashed.cpu, CPU_LIMIT, CPU_PER_GB)
            if is_judged
            else beside_floor(
                f"CPU of a {which} checkpoint's flush; floor: without hashes",
                plain.cpu,
                hashed.cpu,
                unit=CPU_PER_GB,
            )
        )
        rows.append(
            beside_floor(
                f"user time of a {which} checkpoint's flush; floor: without hashes",
                plain.user,
                hashed.user,
                unit=CPU_PER_GB,
                at_most=HASH_LIMIT if is_judged and which == "later" else None,
            )
        )
    return Part(rows, NOTES)


@contextmanager
def _target(settings: Settings, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with ExitStack() as stack:
        if where == DIRECTORY:
            yield str(stack.enter_context(scratch(settings.disk))), {}
            return
        if where == SINK:
            target = stack.enter_context(running_sink()).target(S3)
        else:
            target = stack.enter_context(running_server(where))
        yield target.url, target.storage_options


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU-seconds per GB: all of it, and the user's part."""

    cpu: Sample
    user: Sample


def _measure(rank: Rank, spec: Spec) -> dict[str, Cost]:
    users: dict[str, list[float]] = {}
    with ExitStack() as stack:
        flushes: dict[str, Callable[[], float]] = {}
        for name, reuse in (("plain", False), ("hashed", True)):
            first, later = (users.setdefault(f"{one}, {name}", []) for one in ("first", "later"))
            flushes[f"first, {name}"] = partial(_first, spec, name, reuse, count(), first)
            run = stack.enter_context(closing(_Flushes(spec, f"later-{name}", name, reuse)))
            flushes[f"later, {name}"] = partial(run.flush, later)
        found = rank.in_turn(flushes, repeats=spec.repeats, warm_ups=1)
    return {name: Cost(cpu, Sample(tuple(users[name][1:]))) for name, cpu in found.items()}


def _first(spec: Spec, name: str, reuse: bool, numbers: count[int], users: list[float]) -> float:
    """Flush the first checkpoint of a new run, by the agent that serves the other runs."""
    job = f"first-{name}-{next(numbers)}"
    with closing(_Flushes(spec, job, name, reuse)) as flushes:
        found = flushes.flush(users)
    shutil.rmtree(spec.memory / name / job)
    if not spec.storage_options:
        shutil.rmtree(f"{spec.url}/{job}")
    return found


class _Flushes:
    """Checkpoints of one run, in which everything changes each time."""

    def __init__(self, spec: Spec, job: str, name: str, reuse: bool) -> None:
        self._memory = spec.memory / name
        self._count, self._nbytes = 0, spec.nbytes
        self._state = {
            f"layer.{number}": torch.arange(spec.nbytes // 8 // TENSORS) * (2 * number + 3)
            for number in range(TENSORS)
        }
        self._writer = MemoryStorageWriter(
            f"{spec.url}/{job}",
            memory_root=self._memory,
            job=job,
            keep_memory=1,
            keep_storage=1,
            reuse_stored=reuse,
            storage_options=spec.storage_options,
        )

    def flush(self, users: list[float]) -> float:
        """Save; once the agent is idle, return its CPU-seconds per GB, and note the user's."""
        for tensor in self._state.values():
            tensor.add_(1)
        before, self._count = _settled(self._memory), self._count + 1
        name = f"step-{self._count}"
        dcp_mem.save(self._state, checkpoint_id=name, storage_writer=self._writer)
        self._writer.wait(name, timeout=TIMEOUT)
        after = _settled(self._memory)
        user, system = (
            (now - then) / (self._nbytes / GB) for now, then in zip(after, before, strict=True)
        )
        users.append(user)
        return user + system

    def close(self) -> None:
        self._writer.close()


def _settled(memory: Path) -> tuple[float, float]:
    """Return user and system seconds that a memory root's agent has used, once it is idle."""
    used, now = (-1.0, -1.0), _used(memory)
    while used != now:
        used = now
        time.sleep(SETTLED_SECONDS)
        now = _used(memory)
    return now


def _used(memory: Path) -> tuple[float, float]:
    user, system = 0.0, 0.0
    for pid in agents(memory):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        user += int(fields[11]) / os.sysconf("SC_CLK_TCK")
        system += int(fields[12]) / os.sysconf("SC_CLK_TCK")
    return user, system
