"""Slots that one process fills and another one seals: `SlotPool.send` and `receive`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_mem.memory.locks import is_leased, share
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool

NBYTES = 1 << 16


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The directories of slots and of a checkpoint."""
    slots, checkpoint = tmp_path / ".slots", tmp_path / "step-1"
    slots.mkdir()
    checkpoint.mkdir()
    return slots, checkpoint


def _filled(pool: SlotPool) -> Slot:
    slot = pool.claim(NBYTES, "frames")
    slot.write_at(0, b"content")
    return slot


def _names(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


def test_who_receives_a_slot_seals_it_and_who_sent_it_claims_it_again(
    places: tuple[Path, Path],
) -> None:
    slots, checkpoint = places
    sender, receiver = SlotPool(str(slots)), SlotPool(str(slots))
    slot = _filled(sender)
    path = sender.send(slot)
    assert sender.send(slot) == path  # once more is the same
    assert sender.free_count() == receiver.free_count() == 0
    received = receiver.receive(path)
    segment = checkpoint / "__0_0.distcp"
    receiver.seal(received, str(segment))
    receiver.share(received)
    receiver.let_go(received)
    sender.abandon(slot)
    assert segment.read_bytes()[:7] == b"content"
    assert sender.free_count() == receiver.free_count() == 0
    segment.rename(slots / "again.slot")
    assert receiver.free_count() == 0  # the sender holds it
    again = sender.claim(NBYTES, "frames")
    assert again is slot


def test_nobody_claims_a_sent_slot_while_either_of_the_two_holds_it(
    places: tuple[Path, Path],
) -> None:
    slots, _ = places
    sender, receiver, third = (SlotPool(str(slots)) for _ in range(3))
    slot = _filled(sender)
    received = receiver.receive(sender.send(slot))
    for _ in range(2):
        assert third.claim(NBYTES, "frames").inode != slot.inode
        slot.close()  # as when the process that sent it has been killed
    receiver.let_go(received)
    assert slot.inode in [one.inode for one in third.free()]
    assert ".sent" not in _names(slots)


@pytest.mark.parametrize("is_received", [False, True])
def test_a_sent_slot_that_nobody_seals_is_free_for_its_process_again(
    places: tuple[Path, Path], is_received: bool
) -> None:
    slots, _ = places
    sender, receiver = SlotPool(str(slots)), SlotPool(str(slots))
    slot = _filled(sender)
    path = sender.send(slot)
    if is_received:
        receiver.abandon(receiver.receive(path))
    sender.abandon(slot)
    assert _names(slots) == [".slot"]
    with pytest.raises(FileNotFoundError):
        receiver.receive(path)
    assert sender.claim(NBYTES, "frames") is slot


def test_a_slot_that_is_taken_back_in_the_middle_cannot_be_sealed(
    places: tuple[Path, Path],
) -> None:
    slots, checkpoint = places
    sender, receiver = SlotPool(str(slots)), SlotPool(str(slots))
    slot = _filled(sender)
    received = receiver.receive(sender.send(slot))
    sender.abandon(slot)
    with pytest.raises(FileNotFoundError):
        receiver.seal(received, str(checkpoint / "__0_0.distcp"))
    assert sender.free_count() == 0  # it is still held there
    receiver.abandon(received)
    assert sender.free_count() == 1


def test_a_pool_that_closes_leaves_what_another_process_is_about_to_seal(
    places: tuple[Path, Path],
) -> None:
    slots, checkpoint = places
    sender, receiver = SlotPool(str(slots)), SlotPool(str(slots))
    received = receiver.receive(sender.send(_filled(sender)))
    not_yet = sender.send(_filled(sender))
    sender.close()
    segment = checkpoint / "__0_0.distcp"
    receiver.seal(received, str(segment))
    receiver.share(received)
    assert is_leased(str(segment))  # until the checkpoint is complete: nobody sweeps it away
    assert segment.read_bytes()[:7] == b"content"
    with pytest.raises(FileNotFoundError):
        receiver.receive(not_yet)
    descriptor = received.descriptor
    receiver.let_go(received)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_free_slots_that_are_left_to_another_process_are_not_held(
    places: tuple[Path, Path],
) -> None:
    slots, checkpoint = places
    pool, other = SlotPool(str(slots)), SlotPool(str(slots))
    sealed, read = pool.claim(NBYTES, ""), pool.claim(NBYTES, "")
    pool.seal(sealed, str(checkpoint / "__0_0.distcp"))
    for slot in (sealed, read):
        pool.share(slot)
    reader = os.open(read.path, os.O_RDONLY)
    share(reader)
    assert other.free_count() == 0
    pool.leave_free()
    assert other.free_count() == 0  # one is a segment, and one is read
    os.close(reader)
    pool.prefault(3, NBYTES, lambda slot: None, lambda: True)
    assert pool.free_count() == 3
    assert other.free_count() == 2
    (checkpoint / "__0_0.distcp").rename(slots / "again.slot")
    pool.leave_free()
    assert other.free_count() == 4
    assert other.claim(NBYTES, "").inode != pool.claim(NBYTES, "").inode


def test_a_segment_that_no_checkpoint_lists_is_taken_back_by_who_sealed_it(
    places: tuple[Path, Path],
) -> None:
    slots, checkpoint = places
    sender, receiver = SlotPool(str(slots)), SlotPool(str(slots))
    slot = _filled(sender)
    received = receiver.receive(sender.send(slot))
    receiver.seal(received, str(checkpoint / "__0_0.distcp"))
    receiver.share(received)
    sender.abandon(slot)
    receiver.take_back(lambda path: False)  # as the next save does, after one that failed
    assert not list(checkpoint.iterdir())
    assert sender.claim(NBYTES, "") is slot


@pytest.mark.parametrize("way", ["settle", "close"])
def test_a_slot_that_was_given_up_cannot_be_sent(places: tuple[Path, Path], way: str) -> None:
    slots, _ = places
    sender, other = SlotPool(str(slots)), SlotPool(str(slots))
    slot = _filled(sender)
    getattr(sender, way)()
    claimed = other.claim(NBYTES, "")
    with pytest.raises(FileNotFoundError):
        sender.send(slot)
    assert Path(claimed.path).exists()
    assert _names(slots) == [".slot"]
