"""From memory to storage and back: what is saved gets there by itself, whole, and in spite of failures."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from tests.forks import forked, forked_ranks
from tests.jobs import Job, Loaded, load, load_anew, make_state, save
from tests.servers import StorageRoot

pytestmark = pytest.mark.timeout(120)


def _save_and_wait(job: Job, *numbers: int, **options: Any) -> None:
    with job.writer(**options) as writer:
        for number in numbers:
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)


def _load_with_torch(url: str, options: dict[str, Any]) -> int:
    return load(FsspecReader(url, **options))


def _save_with_torch(url: str, options: dict[str, Any], number: int) -> None:
    dcp.save(make_state(number), storage_writer=FsspecWriter(url, **options))


def _job(root: StorageRoot, memory_root: Path) -> Job:
    return Job(f"{root.url}/run", str(memory_root), root.storage_options)


def test_a_saved_checkpoint_outlives_the_memory_and_torch_reads_it_too(
    storage_root: StorageRoot, memory_root: Path
) -> None:
    job = _job(storage_root, memory_root)
    forked(_save_and_wait, job, 1, 2)
    shutil.rmtree(job.directory)
    loaded = forked(load_anew, job)
    assert (loaded.number, loaded.report.checkpoint_id, loaded.report.source) == (2, "step-2", "storage")
    assert forked(load_anew, job, "step-1").number == 1
    assert forked(_load_with_torch, f"{job.url}/step-2", job.storage_options) == 2


def test_what_several_ranks_saved_outlives_the_memory(storage_root: StorageRoot, memory_root: Path) -> None:
    job = _job(storage_root, memory_root)
    forked_ranks(_save_and_wait, 2, job, 1, 2)
    shutil.rmtree(job.directory)
    assert [loaded.number for loaded in forked_ranks(load_anew, 2, job)] == [2, 2]
    assert forked(load_anew, job).number == 2
    assert forked_ranks(_load_with_torch, 2, f"{job.url}/step-2", job.storage_options) == [2, 2]


def test_what_torch_wrote_is_loaded_by_name_and_as_the_newest(storage_root: StorageRoot, memory_root: Path) -> None:
    job = _job(storage_root, memory_root)
    for number in (1, 2):
        forked(_save_with_torch, f"{job.url}/step-{number}", job.storage_options, number)
    assert forked(load_anew, job).number == 2
    assert forked(load_anew, job, "step-1").number == 1
    assert [loaded.number for loaded in forked_ranks(load_anew, 2, job)] == [2, 2]
