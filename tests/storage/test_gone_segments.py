"""Segments that leave storage during their flush, as `dcp-mem gc` may have it: nothing is torn."""

from pathlib import Path
from typing import Any

import pytest

from dcp_mem.common.values import Outcome
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.posix import PosixStorage
from tests.support.checkpoints.jobs import load_as_torch
from tests.support.processes.forks import forked
from tests.support.storage.ways import save_two_unflushed


def _lose_segment_before_node_manifest(patch: pytest.MonkeyPatch, stored: Path) -> None:
    """Have one segment go once it is uploaded, before its node says so."""
    put, segments = PosixStorage.put, list[Path]()

    def put_late(storage: PosixStorage, key: str, *rest: Any, **options: Any) -> None:
        if key.startswith(f"{stored.name}/.dcp_mem/node-") and not segments:
            segments.extend(stored.glob("*.distcp"))
            segments[0].unlink()
        put(storage, key, *rest, **options)

    patch.setattr(PosixStorage, "put", put_late)


@pytest.mark.parametrize("name", ["step-2", "step-1"])  # step-1 comes when step-2 is durable
def test_a_checkpoint_that_has_lost_a_segment_is_committed_once_it_is_whole(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    forked(save_two_unflushed, str(memory_root))
    memory, stored = JobMemory(str(memory_root), "job"), tmp_path / name

    def record() -> FlushRecord:
        (held,) = memory.find(name)
        return held.flush

    flusher = JobFlusher(
        str(memory_root),
        Registration(job="job", url=str(tmp_path), overwrite=True, reuse_stored=False),
    )
    _lose_segment_before_node_manifest(monkeypatch, stored)
    while not stored.exists():
        assert flusher.flush_next()
    assert not (stored / ".metadata").exists()
    assert record().outcome == ""
    while record().outcome == "":
        flusher.queue.retry()
        assert flusher.flush_next()
    assert record().outcome == Outcome.DURABLE
    assert forked(load_as_torch, stored) == int(name[-1])
