"""Which free slots claims take, by how much those grow, and what is given back for them."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_mem.common import files
from dcp_mem.common.files import allocated_bytes
from dcp_mem.memory.recycling import drop_free_slots
from dcp_mem.memory.slots import SlotPool
from dcp_mem.policy.slots import (
    HUGE,
    FreeSlot,
    SlotNeed,
    capacity_for,
    file_size_for,
    growth,
    preferred,
)
from tests.support.storage.file_systems import mounted_tmpfs

MIB = 1 << 20


def _slot(inode: int, mib: int, frames: str = "", *, is_held: bool = True) -> FreeSlot:
    return FreeSlot(
        name=f"{inode}.slot",
        inode=inode,
        capacity=mib * MIB,
        present=mib * MIB,
        is_held=is_held,
        frames=frames,
    )


def test_a_slot_with_the_frames_comes_first_then_one_that_is_open_then_the_nearest_in_size() -> (
    None
):
    slots = [
        _slot(1, 4, is_held=False),
        _slot(2, 8, "others"),
        _slot(3, 6, "others"),
        _slot(4, 2, "others"),
        _slot(5, 2, "frames"),
    ]
    order = preferred(SlotNeed(4 * MIB, "frames"), slots)
    assert [one.inode for one in order] == [5, 3, 2, 4, 1]


def test_a_claim_grows_by_what_its_slot_lacks() -> None:
    need = SlotNeed(5 * MIB, "frames")
    assert growth([need], []) == 6 * MIB
    assert growth([need], [_slot(1, 6)]) == 0
    assert growth([need], [_slot(1, 10)]) == 0
    assert growth([need], [_slot(1, 10), _slot(2, 2, "frames")]) == 4 * MIB
    assert growth([need, need], [_slot(1, 6)]) == 6 * MIB
    assert growth([], [_slot(1, 6)]) == 0


def test_a_slot_that_is_large_enough_does_not_grow_although_it_is_no_whole_huge_page() -> None:
    nbytes = 5 * MIB + 1000
    whole = file_size_for(nbytes)
    assert nbytes <= whole < nbytes + (64 << 10)
    taken = FreeSlot(name="", inode=1, capacity=whole, present=whole)
    assert growth([SlotNeed(nbytes)], [taken]) == 0
    assert growth([SlotNeed(whole + 1)], [taken]) == 6 * MIB - whole


def test_all_of_a_slot_is_populated_that_isnt_yet() -> None:
    sparse = FreeSlot(name="", inode=1, capacity=10 * MIB, present=2 * MIB)
    assert growth([SlotNeed(4 * MIB)], [sparse]) == 8 * MIB
    far_too_large = FreeSlot(name="", inode=1, capacity=200 * MIB, present=2 * MIB)
    assert growth([SlotNeed(4 * MIB)], [far_too_large]) == 2 * MIB


_SIZES = st.integers(1, 5 * MIB)
_FRAMES = st.sampled_from(["", "a", "b"])


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is left empty each time
)
@given(
    st.lists(st.tuples(_SIZES, _FRAMES), max_size=4),
    st.lists(st.tuples(_SIZES, _FRAMES), min_size=1, max_size=3),
)
def test_claims_grow_slots_as_foretold_and_no_others_take_memory_once_these_are_given_back(
    memory_root: Path, held: list[tuple[int, str]], claimed: list[tuple[int, str]]
) -> None:
    pool = SlotPool(str(memory_root))
    needs = [SlotNeed(nbytes, frames) for nbytes, frames in claimed]
    try:
        for slot, frames in [(pool.claim(nbytes, ""), frames) for nbytes, frames in held]:
            slot.frames = frames
            pool.share(slot)
        before = allocated_bytes(str(memory_root))
        assert before == sum(file_size_for(nbytes) for nbytes, _ in held)
        foretold = growth(needs, pool.free())
        taken = [pool.claim(need.nbytes, need.frames) for need in needs]
        spared = before + foretold - allocated_bytes(str(memory_root))
        assert 0 <= spared < HUGE * len(needs)
        for slot in taken:
            pool.share(slot)

        pool.keep_only(needs)
        after = allocated_bytes(str(memory_root)) + growth(needs, pool.free())
        assert after <= sum(capacity_for(need.nbytes) for need in needs)
        taken = [pool.claim(need.nbytes, need.frames) for need in needs]
        assert allocated_bytes(str(memory_root)) <= after
        for slot in taken:
            pool.share(slot)
    finally:
        pool.close()
    assert os.listdir(memory_root) == []


def test_slots_of_a_dead_process_are_given_back_or_taken(memory_root: Path) -> None:
    dead = SlotPool(str(memory_root))
    for slot in [dead.claim(4 * MIB, "") for _ in range(3)]:
        dead.share(slot)
    dead.close(keep_free=True)
    pool = SlotPool(str(memory_root))
    pool.keep_only([SlotNeed(3 * MIB)])
    assert [(one.present, one.is_held) for one in pool.free()] == [(3 * MIB, True)]
    assert pool.claim(4 * MIB, "").capacity == 4 * MIB
    assert len(os.listdir(memory_root)) == 1
    pool.close()


def test_a_slot_that_another_process_reads_is_left_alone(memory_root: Path) -> None:
    mine, other = SlotPool(str(memory_root)), SlotPool(str(memory_root))
    slot = mine.claim(4 * MIB, "")
    mine.share(slot)
    reader = os.open(slot.path, os.O_RDONLY)
    try:
        os.pwrite(slot.descriptor, b"read", 0)
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert mine.free() == other.free() == []  # no claim could take it
        mine.keep_only([])
        other.keep_only([])
        assert os.pread(reader, 4, 0) == b"read"
        assert os.fstat(reader).st_nlink == 1
    finally:
        os.close(reader)
    assert [one.is_held for one in mine.free()] == [True]
    mine.keep_only([])
    assert os.listdir(memory_root) == []


def test_memory_that_is_set_aside_counts_before_it_is_there(memory_root: Path) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.take(5 * MIB, "")
    slot.set_aside(5 * MIB, 5 * MIB)
    assert os.stat(slot.path).st_blocks == 0
    assert allocated_bytes(str(memory_root)) == 3 * HUGE
    pool.share(slot)
    pool.keep_only([SlotNeed(MIB)])
    assert allocated_bytes(str(memory_root)) + growth([SlotNeed(MIB)], pool.free()) == HUGE
    pool.close()


@pytest.mark.parametrize(("source", "target"), [(".slots", "step-1"), ("step-1", ".slots")])
def test_memory_counts_where_it_is_sealed_or_retired_meanwhile(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    walk = os.walk
    for name in (source, target):
        (memory_root / name).mkdir(0o700)
    os.close(files.create(str(memory_root / source / "file")))
    os.truncate(memory_root / source / "file", MIB)

    def walk_and_rename(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(path):
            yield found
            if found[0] == str(memory_root / "step-1"):
                os.rename(memory_root / source / "file", memory_root / target / "file")

    monkeypatch.setattr(os, "walk", walk_and_rename)
    assert allocated_bytes(str(memory_root)) == MIB


def test_what_is_mapped_already_sets_nothing_aside(memory_root: Path) -> None:
    pool = SlotPool(str(memory_root))
    slot = pool.claim(5 * MIB, "")
    slot.set_aside(5 * MIB, 6 * MIB)
    assert slot.is_populated
    assert allocated_bytes(str(memory_root)) == 5 * MIB
    slot.set_aside(6 * MIB, 7 * MIB)
    assert allocated_bytes(str(memory_root)) == 8 * MIB
    slot.map(6 * MIB, 7 * MIB)
    assert allocated_bytes(str(memory_root)) == 7 * MIB
    pool.share(slot)
    pool.close()


def _given_up(pool: SlotPool) -> None:
    pool.close(keep_free=True)
    drop_free_slots(pool._directory)


@pytest.mark.parametrize(
    "give_back",
    [
        lambda pool: pool.keep_only([]),
        lambda pool: pool.drop_larger(MIB),
        lambda pool: pool.close(),
        _given_up,
    ],
    ids=["for a save", "large ones", "at the end", "by an operator"],
)
def test_memory_of_deleted_slots_is_back_although_somebody_still_has_them_open(
    memory_root: Path, give_back: Callable[[SlotPool], None]
) -> None:
    with mounted_tmpfs(memory_root / "small", "32m") as small:
        pool = SlotPool(str(small))
        slot = pool.claim(4 * MIB, "")
        os.pwrite(slot.descriptor, b"summed up", 0)
        pool.share(slot)
        with open(slot.path, "rb", 0) as summed_up:  # without a lease, as checksums are made
            give_back(pool)
            assert os.listdir(small) == []
            assert files.free_bytes(str(small)) == 32 * MIB
            assert summed_up.read(9) == bytes(9)


def test_a_slot_that_has_become_a_segment_too_keeps_its_bytes(memory_root: Path) -> None:
    """A process was killed after it had given a slot one more name, as a segment's."""
    slots, segment = memory_root / ".slots", memory_root / "segment"
    slots.mkdir()
    pool = SlotPool(str(slots))
    slot = pool.claim(4 * MIB, "")
    os.pwrite(slot.descriptor, b"segment", 0)
    pool.share(slot)
    os.link(slot.path, segment)
    pool.close()
    slots.rmdir()  # it is empty
    assert segment.read_bytes()[:7] == b"segment"
    segment.unlink()
