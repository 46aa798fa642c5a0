"""Loads of many small entries: what a load does grows with their number, and no faster."""

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import State
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked, forked_ranks

FEW, MANY = 200, 1000
MOST_CALLS_PER_TENSOR = 6
Make = Callable[[int, int], dict[str, Any]]


def _tensors(entries: int, value: int) -> dict[str, Any]:
    return {f"t{number}": torch.full((3,), value * number) for number in range(entries)}


def _objects(entries: int, value: int) -> dict[str, Any]:
    return {f"o{number}": ("x", value * number) for number in range(entries)}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _save(jobs: Sequence[Job], make: Make) -> None:
    job = jobs[_rank()]
    with job.writer() as writer:
        for entries in (FEW, MANY):
            dcp_mem.save(make(entries, 1), checkpoint_id=f"{entries}", storage_writer=writer)
            writer.wait(f"{entries}", State.COMPLETE if job.url is None else State.DURABLE)


def _calls_of_loads(jobs: Sequence[Job], make: Make) -> list[int]:
    """The calls of Python functions that loads of few and of many entries make on this rank."""
    with jobs[_rank()].reader() as reader:
        return [_calls_of_load(reader, make, entries) for entries in (FEW, FEW, MANY)][1:]


def _calls_of_load(reader: dcp_mem.MemoryStorageReader, make: Make, entries: int) -> int:
    state, calls = make(entries, 0), count()

    def note(_: object, event: str, __: object) -> None:
        if event == "call":
            next(calls)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        dcp_mem.load(state, checkpoint_id=f"{entries}", storage_reader=reader)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    expected = make(entries, 1)
    assert all(
        torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value
        for name, value in expected.items()
    )
    return next(calls)


@pytest.mark.parametrize("make", [_tensors, _objects])
@pytest.mark.parametrize(
    ("storage", "saving", "loading"),
    [
        (False, "a", "a"),
        (True, "a", "b"),
        (True, "aa", "bb"),
        (False, "ab", "ba"),
    ],
    ids=["from its own memory", "from storage", "two ranks from storage", "from a peer"],
)
def test_a_load_of_five_times_as_many_entries_does_at_most_five_times_as_much(
    storage: bool, saving: str, loading: str, make: Make, tmp_path: Path, memory_root: Path
) -> None:
    url = str(tmp_path / "storage") if storage else None
    savers, loaders = (
        [Job(url, str(memory_root / node)) for node in nodes] for nodes in (saving, loading)
    )
    if len(loaders) == 1:
        forked(_save, savers, make)
        ranks = [forked(_calls_of_loads, loaders, make)]
    else:
        forked_ranks(_save, len(savers), savers, make)
        ranks = forked_ranks(_calls_of_loads, len(loaders), loaders, make)
    for few, many in ranks:
        assert many <= MANY / FEW * few, f"{few} calls for {FEW} entries, {many} for {MANY}"
        if make is _tensors:  # they are read as columns, wherever they come from
            assert (many - few) / (MANY - FEW) < MOST_CALLS_PER_TENSOR
