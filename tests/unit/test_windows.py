"""The windows of loads: one that is in use stays, and one that a kill has left goes."""

import os
from pathlib import Path

import pytest

from dcp_mem import MemoryBudgetExceeded
from dcp_mem.common import faults
from dcp_mem.memory import locks, window
from dcp_mem.memory.window import make_window, remove_window, room_for_window
from tests.support.storage.file_systems import mounted_tmpfs

_NBYTES = 1 << 20


def test_a_window_is_removed_by_another_load_only_once_its_maker_has_ended(
    memory_root: Path,
) -> None:
    root = str(memory_root)
    live, dead = (make_window(root, token, _NBYTES) for token in ("live", "dead"))
    room_for_window(root)
    assert len(os.listdir(root)) == 2
    os.close(dead)  # as a kill does
    room_for_window(root)
    assert os.listdir(root) == [".restoring-live"]
    remove_window(root, "live", live)
    assert os.listdir(root) == []


def test_a_window_that_is_taken_for_a_dead_one_before_its_lease_is_made_again(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, seen = str(memory_root), list[list[str]]()

    def share(descriptor: int) -> bool:
        if not seen:
            room_for_window(root)
            seen.append(os.listdir(root))
        return locks.share(descriptor)

    monkeypatch.setattr(window, "share", share)
    descriptor = make_window(root, "live", _NBYTES)
    room_for_window(root)
    assert seen == [[]]
    assert os.stat(memory_root / ".restoring-live").st_ino == os.fstat(descriptor).st_ino
    remove_window(root, "live", descriptor)


def test_a_file_that_another_load_has_removed_meanwhile_is_not_looked_for_at_its_path(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, made, take = str(memory_root), list[int](), locks.try_lease
    os.close(make_window(root, "one", _NBYTES))

    def try_lease(descriptor: int, *, exclusive: bool) -> bool:
        if exclusive and not made:
            os.unlink(memory_root / ".restoring-one")
            made.append(make_window(root, "one", _NBYTES))
        return take(descriptor, exclusive=exclusive)

    monkeypatch.setattr(locks, "try_lease", try_lease)
    room_for_window(root)
    assert os.listdir(root) == [".restoring-one"]
    remove_window(root, "one", made[0])


def test_a_window_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "4m") as directory:
        with pytest.raises(MemoryBudgetExceeded, match="no room for a window"):
            make_window(str(directory), "large", 16 * _NBYTES)
        assert os.listdir(directory) == []
        faults.arm("load.window:raise:1")
        try:
            with pytest.raises(faults.FaultInjected):
                make_window(str(directory), "small", _NBYTES)
        finally:
            faults.arm("")
        assert os.listdir(directory) == []
