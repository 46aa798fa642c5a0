"""How many bytes a restore fetches from storage when every rank needs the whole checkpoint."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from benchmarks.harness.processes import in_fresh_processes
from benchmarks.harness.scratch import need, scratch
from benchmarks.harness.settings import MIB
from benchmarks.harness.storage.counting import counting
from benchmarks.harness.storage.targets import AZURE, Target, running_server
from benchmarks.harness.tables import AMOUNT, Part, Row, Section, attempt, compared
from dcp_mem import MemoryStorageReader, MemoryStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.harness.processes import Rank
    from benchmarks.harness.settings import Settings
    from benchmarks.harness.storage.counting import Counter

TITLE = "Restore of a checkpoint that both of two ranks need whole"
SERVER = "moto"
RANKS = 2
TENSORS = 16
NAME = "step-1"
JOB = "bench"
ALLOWED = 1.05
"""Times the checkpoint's size: 1.0 is payload; metadata, manifests and headers come on top."""


@dataclass(frozen=True, slots=True)
class Spec:
    nbytes: int
    memory: Path
    url: str
    storage_options: Mapping[str, Any] = field(repr=False)

    def state(self, value: float) -> dict[str, Any]:
        """Return a state that is the same on every rank."""
        elements = self.nbytes // TENSORS // 4
        return {
            f"layer.{index}": torch.full((elements,), value + index) for index in range(TENSORS)
        }


def run(settings: Settings) -> Section:
    nbytes = (128 if settings.quick else 512) * MIB
    title = f"{nbytes // MIB} MiB replicated over {RANKS} ranks, {SERVER}"
    return Section(TITLE, [attempt("replicated", title, partial(_part, settings, nbytes))])


def _part(settings: Settings, nbytes: int) -> Part:
    need(settings.tmpfs, nbytes * 12)
    with (
        scratch(settings.tmpfs) as directory,
        running_server(SERVER) as target,
        counting(target.address) as counter,
    ):
        spec = Spec(nbytes, directory / "saved", target.url, target.storage_options)
        in_fresh_processes(_save, spec, ranks=RANKS)
        far = replace(spec, memory=directory / "empty", storage_options=_through(target, counter))
        fetched = _fetched(counter, _load, far) / nbytes
        peer = _fetched(counter, _load_with_torch, far) / nbytes
    row = Row(
        "bytes fetched / checkpoint size; peer: torch's FsspecReader",
        floor="1.00",
        dcp_mem=f"{fetched:.2f}",
        ratio=f"{fetched:.2f}",
        target=f"≤ {ALLOWED:.2f}",
        met=fetched <= ALLOWED,
        peer=f"{peer:.2f}",
        versus_peer=compared(fetched, peer, AMOUNT),
    )
    return Part([row], ["counted between clients and server, response headers included"])


def _fetched(counter: Counter, load: Callable[[Rank, Spec], None], spec: Spec) -> int:
    before = counter.fetched
    in_fresh_processes(load, spec, ranks=RANKS)
    return counter.fetched - before


def _through(target: Target, counter: Counter) -> Mapping[str, Any]:
    if target.kind == AZURE:
        text = target.connection_string.replace(target.endpoint, counter.endpoint)
        return {**target.storage_options, "connection_string": text}
    return {**target.storage_options, "endpoint_url": counter.endpoint}


def _save(rank: Rank, spec: Spec) -> None:
    writer = MemoryStorageWriter(
        spec.url, memory_root=spec.memory, job=JOB, storage_options=spec.storage_options
    )
    with closing(writer):
        dcp.save(spec.state(1.0), checkpoint_id=NAME, storage_writer=writer)
        rank.barrier()
        writer.wait()


def _load(_: Rank, spec: Spec) -> None:
    state = spec.state(-100.0)
    reader = MemoryStorageReader(
        spec.url, memory_root=spec.memory, job=JOB, storage_options=spec.storage_options
    )
    with reader:
        dcp.load(state, storage_reader=reader)
    _check(spec, state)


def _load_with_torch(_: Rank, spec: Spec) -> None:
    state = spec.state(-100.0)
    options = dict(spec.storage_options)
    dcp.load(state, storage_reader=FsspecReader(f"{spec.url}/{NAME}", **options))
    _check(spec, state)


def _check(spec: Spec, state: Mapping[str, Any]) -> None:
    for name, tensor in spec.state(1.0).items():
        if not torch.equal(state[name], tensor):
            raise AssertionError(f"{name} was not restored")
