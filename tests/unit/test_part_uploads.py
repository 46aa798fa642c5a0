"""Segments on their way in parts: what one part's failure means for the others."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_mem import StorageUnavailable
from dcp_mem.common.values import Segment
from dcp_mem.flushing.metering import Meter, Throttle
from dcp_mem.flushing.upload import SegmentUpload, upload_all
from dcp_mem.format.manifest import ItemTable
from dcp_mem.storage.posix import PosixStorage
from dcp_mem.storage.posix_upload import PosixUpload

NBYTES = 4096


def _outgoing(directory: Path, count: int) -> list[SegmentUpload]:
    """So many segments of one part each."""
    found = []
    for rank in range(count):
        file = f"__{rank}_0-01234567.distcp"
        (directory / file).write_bytes(bytes([rank]) * NBYTES)
        one = np.array([[0], [NBYTES], [0], [NBYTES]], "<i8")
        table = ItemTable(one, np.zeros(0, "<u4"))
        found.append(
            SegmentUpload(
                segment=Segment(
                    rank=rank, node="node", file=file, nbytes=NBYTES, layout="", tail=()
                ),
                table=table,
                key=f"step-1/{file}",
                is_stored=False,
            )
        )
    return found


def _upload(
    directory: Path, storage: PosixStorage, outgoing: Sequence[SegmentUpload], throttle: Throttle
) -> None:
    upload_all(str(directory), outgoing, storage, Meter(), throttle)


def test_a_segment_whose_part_was_held_back_when_another_failed_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a directory it would get its name, and its size, without its bytes."""
    memory, root = tmp_path / "memory", tmp_path / "storage"
    memory.mkdir()
    held_back = threading.Event()

    class Slow(Throttle):
        def wait(self, nbytes: int, stop: threading.Event) -> None:
            if not turn.acquire(blocking=False):
                held_back.set()
                assert stop.wait(30)

    turn = threading.Semaphore(1)

    def fail(*_: Any) -> bool:
        assert held_back.wait(30)
        raise StorageUnavailable(str(root), "it is down")

    monkeypatch.setattr(PosixUpload, "put_part", fail)
    with pytest.raises(StorageUnavailable, match="it is down"):
        _upload(memory, PosixStorage(str(root)), _outgoing(memory, 2), Slow(None))
    assert list((root / "step-1").iterdir()) == []


def test_parts_behind_one_that_failed_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while an earlier one is still under way: who waits for them hears of that one first."""
    memory, root = tmp_path / "memory", tmp_path / "storage"
    memory.mkdir()
    tried: list[str] = []
    failed = threading.Event()

    def put_part(upload: PosixUpload, *_: Any) -> bool:
        tried.append(upload._path)
        if len(tried) > 1:
            failed.set()
            raise StorageUnavailable(str(root), "it is down")
        assert failed.wait(30)
        time.sleep(0.5)  # in which all the others would be tried
        return True

    monkeypatch.setattr(PosixUpload, "put_part", put_part)
    monkeypatch.setattr("dcp_mem.flushing.upload.parts_at_once", lambda: 2)
    with pytest.raises(StorageUnavailable, match="it is down"):
        _upload(memory, PosixStorage(str(root)), _outgoing(memory, 20), Throttle(None))
    assert len(tried) == 2
