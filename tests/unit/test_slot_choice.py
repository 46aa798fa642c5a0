"""Which free slots claims take, by how much those grow, and what is given back for them."""

from dcp_mem.policy.slots import (
    FreeSlot,
    SlotNeed,
    file_size_for,
    growth,
    preferred,
)

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
