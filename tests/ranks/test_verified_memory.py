"""What lies in memory is verified, from moments after the checkpoint is complete."""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from dcp_mem import every_n_saves
from dcp_mem.comm.agreement import Failures
from dcp_mem.flushing import parts as flush_parts
from dcp_mem.format.checksums import blocks_of, checksum
from dcp_mem.format.manifest import ItemTable, NodeManifest
from dcp_mem.memory import checksumming
from dcp_mem.memory.checked_reads import CheckedReader
from dcp_mem.operations.flush import flush_now, promote
from dcp_mem.options import settings
from dcp_mem.replicating.worker import Worker
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import Job, Loaded, agents, load_anew, save, wait_until
from tests.support.processes.forks import forked, forked_ranks, in_process, raised_by
from tests.support.seeds import SEED

pytestmark = pytest.mark.timeout(120)


def _segments(job: Job, name: str) -> list[Path]:
    return sorted((job.directory / name).glob("__*.distcp"))


def _has_checksums(job: Job, name: str) -> bool:
    directory = job.directory / name / ".dcp_mem"
    return len(list(directory.glob("checksums-*.json"))) == len(_segments(job, name))


def _save_two(job: Job, persist: object = True) -> None:
    """Save step-1 and step-2, and wait until both have checksums."""
    with job.writer(persist=persist) as writer:
        for number in (1, 2):
            save(writer, number)
        for number in (1, 2):
            wait_until(lambda name=f"step-{number}": _has_checksums(job, name), "checksums")  # type: ignore[misc]


def _save_in_a_row(job: Job, on_nonfinite: str) -> list[str]:
    """Return the last checkpoints that had checksums while saves followed each other."""
    with patch.object(checksumming, "_REST", 1e9):
        writer = job.writer(persist=False, keep_memory=9, on_nonfinite=on_nonfinite)
        save(writer, 0)
        wait_until(lambda: _has_checksums(job, "step-0"), "checksums")
        for number in range(1, 4):
            save(writer, number)
            time.sleep(0.05)
        if on_nonfinite != "ignore":
            wait_until(lambda: _has_checksums(job, "step-3"), "checksums")
        time.sleep(0.3)
        summed = [name for name in _NAMES if _has_checksums(job, name)]
        writer.close()
    return summed


_NAMES = [f"step-{number}" for number in range(4)]


@pytest.mark.parametrize("on_nonfinite", ["ignore", "warn"])
def test_checksums_rest_while_saves_follow_each_other_unless_values_are_looked_at(
    memory_root: Path, on_nonfinite: str
) -> None:
    job = Job(None, str(memory_root))
    summed = forked(_save_in_a_row, job, on_nonfinite)
    assert summed == (_NAMES[:1] if on_nonfinite == "ignore" else _NAMES)
    # What is left when the writer is closed gets its own before that returns.
    assert all(_has_checksums(job, name) for name in _NAMES)


@in_process
def test_after_a_rest_the_checksums_that_are_left_are_made(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    with (
        patch.object(checksumming, "_REST", 50),
        job.writer(persist=False, keep_memory=3) as writer,
    ):
        for number in range(3):
            save(writer, number)
        for name in ("step-2", "step-1"):  # the newest first, and the others after a rest each
            wait_until(lambda name=name: _has_checksums(job, name), "checksums")  # type: ignore[misc]


def _flip_payload(segment: Path) -> None:
    """Flip a bit of the largest tensor."""
    path = segment.parent / ".dcp_mem" / f"checksums-{segment.stem}.json"
    table = NodeManifest.from_json(path.read_bytes()).tables[segment.name]
    largest = int(table.payload_nbytes.argmax())
    flip(segment, int(table.payload_offsets[largest] + table.payload_nbytes[largest] // 2))


def _load(job: Job, verify: bool = True) -> Loaded | Exception:
    loaded: list[Loaded] = []
    return raised_by(lambda: loaded.append(load_anew(job, verify=verify))) or loaded[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flip_in_memory_is_found_once_there_are_checksums(memory_root: Path, ranks: int) -> None:
    job = Job(None, str(memory_root))
    forked_ranks(_save_two, ranks, job)
    random_ = random.Random(7)
    for segment in _segments(job, "step-2"):
        tables = NodeManifest.from_json(
            (segment.parent / ".dcp_mem" / f"checksums-{segment.stem}.json").read_bytes()
        ).tables
        table, whole = tables[segment.name], segment.read_bytes()
        for offset, nbytes in zip(table.offsets.tolist(), table.lengths.tolist(), strict=True):
            flip(segment, offset + random_.randrange(nbytes))
            for loaded in forked_ranks(_load, ranks, job):
                assert isinstance(loaded, Loaded), loaded
                assert loaded.number == 1
                assert any("CRC32C" in line for line in loaded.report.passed_over)
            segment.write_bytes(whole)
    for loaded in forked_ranks(_load, ranks, job):
        assert isinstance(loaded, Loaded), loaded
        assert (loaded.number, loaded.report.passed_over) == (2, ())


def test_without_verification_a_flip_in_memory_is_loaded(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    forked(_save_two, job)
    (segment,) = _segments(job, "step-2")
    _flip_payload(segment)
    error = forked(_load, job, False)
    assert isinstance(error, Exception) or error.number != 2, error
    loaded = forked(_load, job)
    assert isinstance(loaded, Loaded)
    assert loaded.number == 1


def test_the_agent_makes_checksums_of_all_that_is_saved(memory_root: Path, tmp_path: Path) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked(_save_two, job, every_n_saves(2))
    wait_until(lambda: not agents(memory_root), "the agent's end")


def _flush(job: Job) -> str:
    chosen = settings(job.url, memory_root=job.memory, job=job.name)
    promote(chosen, 1)
    (flushed,) = flush_now(chosen, is_promoted=True, timeout=60)
    return flushed.error


def test_a_flush_puts_nothing_that_has_changed_since_it_was_saved(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked(_save_two, job, False)
    (segment,) = _segments(job, "step-2")
    _flip_payload(segment)
    assert "changed since it was saved" in forked(_flush, job)
    assert not list((tmp_path / "storage" / "step-2").rglob(".metadata"))
    assert not list((tmp_path / "storage" / "step-2").rglob("node-*.json"))


def _save_as_it_changes(job: Job) -> str:
    """Flip a bit once there are checksums, which the flush that has begun doesn't know of yet."""
    table_of, flipped = flush_parts._table, list[Path]()

    def table_before(*args: Any) -> ItemTable:
        if not flipped:
            wait_until(lambda: _has_checksums(job, "step-1"), "checksums")
            flipped.extend(_segments(job, "step-1"))
            _flip_payload(flipped[0])
        table = table_of(*args)
        return replace(table, crc32c=table.crc32c[:0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush_parts, "_table", table_before)
        with job.writer(agent="thread") as writer:
            save(writer, 1)
            error = raised_by(lambda: writer.wait(timeout=60))
            writer.close(flush=False)
    return str(error)


def test_a_flush_under_way_doesn_t_bless_what_changes_before_it_is_read(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    assert "have changed since they were saved" in forked(_save_as_it_changes, job)
    assert not list((tmp_path / "storage" / "step-1").rglob(".metadata"))


# -- reads ----------------------------------------------------------------------------------------


def _items(lengths: Sequence[int], gap: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum([length + gap for length in lengths])
    return ends - [length + gap for length in lengths], np.array(lengths, np.int64)


@pytest.mark.parametrize("number", range(12))
def test_checked_reads_bring_the_bytes_and_find_each_flip(tmp_path: Path, number: int) -> None:
    """Parts of any items, small and large, overlapping or not; or whole items, as saved."""
    random_ = random.Random(SEED + number)
    sizes = [
        0,
        1,
        700,
        5000,
        150_000,
        200_000,
        600_000,
        1 << 20,
        (1 << 20) + 5,
        3_000_000,
        6_000_000,
    ]
    offsets, lengths = _items(random_.choices(sizes, k=14), gap=random_.choice([0, 13, 64, 9000]))
    data = np.random.default_rng(number).integers(
        0, 256, int(offsets[-1] + lengths[-1]) + 9, np.uint8
    )
    path = tmp_path / "segment"
    blocks = blocks_of(offsets, lengths)
    known = np.array(
        [
            checksum(data[low : low + size].data)
            for low, size in zip(blocks.offsets, blocks.lengths, strict=True)
        ],
        "<u4",
    )
    parts = []
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        for _ in range(random_.randrange(3) if number % 2 else 0):
            start = random_.randrange(length + 1)
            parts.append((offset + start, random_.randrange(length - start + 1)))
        if random_.randrange(2) or not number % 2:
            parts.append((offset, length))
    parts.sort()
    targets = [np.zeros(nbytes, np.uint8) for _, nbytes in parts]
    columns = [
        np.array([target.ctypes.data for target in targets], np.int64),
        np.array([offset for offset, _ in parts], np.int64),
        np.array([nbytes for _, nbytes in parts], np.int64),
    ]

    def read() -> tuple[int, int] | None:
        path.write_bytes(data.tobytes())
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return CheckedReader(descriptor, blocks, known).read(*columns)
        finally:
            os.close(descriptor)

    assert read() is None
    for target, (offset, nbytes) in zip(targets, parts, strict=True):
        assert np.array_equal(target, data[offset : offset + nbytes])
    for offset, nbytes in random_.sample([part for part in parts if part[1]], 3):
        position = offset + random_.randrange(nbytes)
        data[position] ^= 4
        damaged = read()
        assert damaged is not None
        low = int(blocks.offsets[damaged[0]])
        assert low <= position < low + int(blocks.lengths[damaged[0]])
        data[position] ^= 4


# -- replication ----------------------------------------------------------------------------------


def _copy_what_has_changed(job: Job) -> str:
    """Save on two nodes; rank 0's segment changes once it has checksums, before it is copied."""
    here = replace(job, memory=f"{job.memory}/node{dist.get_rank()}")
    run = Worker.run

    def change_and_run(worker: Worker) -> Failures:
        wait_until(lambda: _has_checksums(here, "step-1"), "checksums")
        if dist.get_rank() == 0:
            (segment,) = _segments(here, "step-1")
            _flip_payload(segment)
        return run(worker)

    with pytest.MonkeyPatch.context() as patch, here.writer(replicas=1) as writer:
        patch.setattr(Worker, "run", change_and_run)
        save(writer, 1)
        error = raised_by(lambda: writer.wait(state="replicated", timeout=60))
    return str(error)


def test_what_has_changed_since_it_was_saved_is_not_copied(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    errors = forked_ranks(_copy_what_has_changed, 2, job)
    assert all("have changed since they were saved" in error for error in errors), errors
    copies = list((memory_root / "node1").rglob("__0_0-*.distcp"))
    assert not copies, copies
