"""Pages of slots exist before anything is stored, or an error is raised instead of a SIGBUS."""

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dcp_mem import MemoryBudgetExceeded
from dcp_mem.memory import slot as slot_module
from dcp_mem.memory.recycling import retire
from dcp_mem.memory.slot import Mapping, Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.memory.views import mapped
from dcp_mem.policy.slots import HUGE
from tests.support.storage.file_systems import mounted_tmpfs

_MIB = 1 << 20


@pytest.fixture
def descriptor(memory_root: Path) -> Iterator[int]:
    descriptor = os.open(memory_root / "file", os.O_CREAT | os.O_RDWR, 0o600)
    yield descriptor
    os.close(descriptor)


def present(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


@pytest.fixture(params=["huge pages", "plain pages", "an old kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This kernel, and it as an older one would be: advice that it doesn't know is EINVAL."""
    unknown = 9999
    if request.param != "huge pages":
        monkeypatch.setattr(slot_module, "_COLLAPSE", unknown)
    if request.param == "an old kernel":
        monkeypatch.setattr(slot_module, "_POPULATE_WRITE", unknown)
    return str(request.param)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("nbytes", [4096, HUGE, 9 * _MIB + 4096, 130 * _MIB])
def test_every_page_is_there_and_what_the_file_held_stays(descriptor: int, nbytes: int) -> None:
    os.ftruncate(descriptor, nbytes)
    held = os.urandom(4096)
    places = sorted({0, nbytes // 2 // 4096 * 4096, nbytes - 4096})
    for place in places:
        os.pwrite(descriptor, held, place)
    mapped = Mapping(descriptor, nbytes)
    assert mapped.address % HUGE == 0
    assert mapped.populate()
    assert present(descriptor) >= nbytes
    for place in places:
        assert bytes(mapped.buffer[place : place + 4096]) == held
    assert os.pread(descriptor, 4096, nbytes // 4 // 4096 * 4096) in (bytes(4096), held)
    mapped.buffer[nbytes - 1] = 7
    assert os.pread(descriptor, 1, nbytes - 1) == b"\7"


@pytest.mark.usefixtures("kernel")
def test_full_tmpfs_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "16m") as directory:
        descriptor = os.open(directory / "file", os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(descriptor, 32 * _MIB)
        with pytest.raises(OSError, match="No space left"):
            Mapping(descriptor, 32 * _MIB).populate()
        os.close(descriptor)


@pytest.mark.usefixtures("kernel")
def test_slot_that_cant_grow_keeps_what_it_had(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "16m") as directory:
        pool = SlotPool(str(directory))
        slot = pool.claim(6 * _MIB, "")
        slot.write_at(5 * _MIB, b"held")
        with pytest.raises(MemoryBudgetExceeded, match="full"):
            slot.map(32 * _MIB, 32 * _MIB)
        assert slot.capacity == 6 * _MIB == os.fstat(slot.descriptor).st_size
        slot.map(6 * _MIB, 0)
        assert slot.mapping is not None
        assert bytes(slot.mapping.buffer[5 * _MIB : 5 * _MIB + 4]) == b"held"
        pool.close()
        assert os.listdir(directory) == []


def test_prefaulting_stops_when_it_is_no_longer_wanted_and_loses_nothing(memory_root: Path) -> None:
    pool, answers = SlotPool(str(memory_root)), iter([True, True, False, False])
    prepared: list[Slot] = []
    pool.prefault(1, 192 * _MIB, prepared.append, lambda: next(answers))
    assert prepared == []
    assert [one.present for one in pool.free()] == [4 * _MIB]
    slot = pool.claim(192 * _MIB, "")
    assert present(slot.descriptor) == slot.capacity == 192 * _MIB
    assert pool.free_count() == 0
    pool.close()


def test_a_slot_that_cannot_be_made_ready_is_given_back(memory_root: Path) -> None:
    pool = SlotPool(str(memory_root))

    def prepare(slot: Slot) -> None:
        raise OSError("no frames")

    with pytest.raises(OSError, match="no frames"):
        pool.prefault(1, _MIB, prepare, lambda: True)
    assert os.listdir(memory_root) == []
    assert not pool._open


@pytest.mark.parametrize("nbytes", [1000, 5 * _MIB + 1000, 64 * _MIB - 1, 64 * _MIB + 1])
def test_a_slot_takes_hardly_more_than_its_bytes_and_no_store_into_it_faults(
    memory_root: Path, nbytes: int, kernel: str
) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.claim(nbytes, "")
    assert nbytes <= slot.capacity == present(slot.descriptor) < nbytes + (64 << 10)
    for value in (1, 2):  # staged anew in the slot of an earlier save
        assert slot.mapping is not None
        data = np.frombuffer(memoryview(slot.mapping.buffer).cast("B"), np.uint8)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        data[:] = value
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        assert faults < 10 or (value == 1 and kernel == "an old kernel")
        pool.share(slot)
        assert pool.claim(nbytes, "") is slot
    assert present(slot.descriptor) == slot.capacity
    del data
    pool.close()


def test_slot_that_was_cut_off_behind_our_back_is_mapped_anew(memory_root: Path) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.claim(4 * _MIB, "frames")
    slot.frames = "frames"
    pool.share(slot)
    os.truncate(slot.path, 4096)
    again = pool.claim(4 * _MIB, "frames")
    assert again is slot
    assert again.frames == ""
    assert again.mapping is not None
    again.mapping.buffer[4 * _MIB - 1] = 1
    pool.close()


def test_view_outlives_the_mapping(descriptor: int) -> None:
    os.ftruncate(descriptor, HUGE)
    mapped = Mapping(descriptor, HUGE)
    mapped.populate()
    address, view = mapped.address, memoryview(mapped.buffer)
    del mapped
    gc.collect()
    assert is_mapped(address)
    assert view.tobytes() == bytes(HUGE)
    del view
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def maps_of(descriptor: int) -> int:
    """How many mappings of the file this process has."""
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return sum(line.endswith(path) for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_part_stays_mapped_for_as_long_as_anybody_sees_it(descriptor: int) -> None:
    os.pwrite(descriptor, b"1234" * 1024, 0)
    part = mapped(descriptor, 0, 4096)
    piece = part[:4]
    part.release()
    gc.collect()
    assert bytes(piece) == b"1234"
    assert maps_of(descriptor) == 1
    del piece, part
    assert maps_of(descriptor) == 0


# -- slots that are segments of several checkpoints ------------------------------------------------


def _sealed(pool: SlotPool, path: Path) -> tuple[Slot, int]:
    slot = pool.claim(1 << 20, "")
    pool.seal(slot, str(path))
    pool.share(slot)
    return slot, slot.claims


def test_a_slot_with_another_name_is_never_claimed(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    pool = SlotPool(str(tmp_path / "slots"))
    slot, claims = _sealed(pool, tmp_path / "one")
    assert pool.link(slot, claims, str(tmp_path / "two"))
    retire(str(tmp_path / "one"), str(tmp_path / "slots"))
    assert not list((tmp_path / "slots").iterdir())
    # Retired by a process that had looked just before the link was made:
    os.link(tmp_path / "two", tmp_path / "slots" / "late.slot")
    assert [one.present for one in pool.free()] == []
    assert pool.claim(1 << 20, "") is not slot
    retire(str(tmp_path / "two"), str(tmp_path / "slots"))
    assert pool.claim(1 << 20, "") is slot  # its last name was that of a free slot


def test_a_slot_that_was_claimed_again_is_not_linked(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    pool = SlotPool(str(tmp_path / "slots"))
    slot, claims = _sealed(pool, tmp_path / "one")
    retire(str(tmp_path / "one"), str(tmp_path / "slots"))
    end_hold = pool.hold(slot, claims)
    assert end_hold is not None
    other = pool.claim(1 << 20, "")
    assert other is not slot
    end_hold()
    assert pool.claim(1 << 20, "") is slot
    assert not pool.hold(slot, claims)
    assert not pool.link(slot, claims, str(tmp_path / "two"))
    assert not (tmp_path / "two").exists()


def test_a_segment_that_is_evicted_while_it_is_taken_back_is_a_free_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slots").mkdir()
    pool = SlotPool(str(tmp_path / "slots"))
    slot, _ = _sealed(pool, tmp_path / "one")
    rename = os.rename

    def evicted_first(source: str, target: str) -> None:
        monkeypatch.undo()
        retire(source, str(tmp_path / "slots"))  # by another process, just before
        rename(source, target)

    monkeypatch.setattr(os, "rename", evicted_first)
    pool.take_back(lambda path: False)
    assert pool.claim(1 << 20, "") is slot
