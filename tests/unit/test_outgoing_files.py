"""Files that are sent: their checksums are those of their bytes, wherever those lie."""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from dcp_mem import DcpMemError
from dcp_mem.format.checksums import BlockChecksums, Crcs, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.memory.mapping import Mapping
from dcp_mem.memory.recycling import retire
from dcp_mem.memory.slot import Slot
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating.send import OutgoingFile, of_slot
from dcp_mem.replicating.task import SMALL_CHUNK

_NBYTES, _MAPPED_NBYTES = 12 << 20, 2 << 20


@pytest.fixture
def slot() -> Iterator[Slot]:
    """A slot whose mapping is shorter than the segment in it."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as stream:
        stream.write(np.random.default_rng(7).bytes(_NBYTES))
        stream.flush()
        descriptor = stream.fileno()
        yield Slot(
            path=stream.name,
            descriptor=descriptor,
            capacity=_NBYTES,
            inode=os.fstat(descriptor).st_ino,
            mapping=Mapping(descriptor, _MAPPED_NBYTES),
        )


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as resources:
        yield resources


def _table() -> ItemTable:
    offsets = np.array([0, 1 << 20, 7 << 20], "<i8")
    lengths = np.array([1 << 20, 5 << 20, 5 << 20], "<i8")
    return ItemTable(
        offsets=offsets,
        lengths=lengths,
        payload_offsets=offsets,
        payload_nbytes=lengths,
        crc32c=np.zeros(0, "<u4"),
    )


def _crcs_of(slot: Slot) -> Crcs:
    table = _table()
    checksums = BlockChecksums(blocks_of(table.offsets, table.lengths))
    checksums.add(0, memoryview(os.pread(slot.descriptor, _NBYTES, 0)))
    return checksums.result()


def test_checksums_beyond_a_slots_mapping_are_those_of_its_bytes_and_take_little_memory(
    slot: Slot, resources: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, largest, preadv = _crcs_of(slot), [0], os.preadv

    def in_parts(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read as Linux does: no more than so many bytes at once."""
        largest.append(sum(map(len, buffers)))
        return preadv(descriptor, [memoryview(buffers[0])[: 300 << 10]], offset)

    monkeypatch.setattr(os, "preadv", in_parts)
    found = of_slot(slot, slot.path, _NBYTES, _table(), resources).table().crc32c
    assert np.array_equal(found, expected)
    assert 0 < max(largest) <= SMALL_CHUNK


def test_a_slot_that_ends_before_its_segment_is_an_error(slot: Slot, resources: ExitStack) -> None:
    os.truncate(slot.descriptor, _NBYTES - 1)
    with pytest.raises(EOFError, match="bytes short"):
        of_slot(slot, slot.path, _NBYTES, _table(), resources).table()


@pytest.fixture
def pool(memory_root: Path) -> Iterator[SlotPool]:
    pool = SlotPool(str(memory_root))
    yield pool
    pool.close()


def _sealed(pool: SlotPool, path: Path) -> Slot:
    slot = pool.claim(_NBYTES, "")
    pool.seal(slot, str(path))
    pool.share(slot)
    return slot


def test_a_slot_is_not_claimed_again_while_it_is_sent(pool: SlotPool, memory_root: Path) -> None:
    path = memory_root / "segment"
    slot = _sealed(pool, path)
    with ExitStack() as sending:
        of_slot(slot, str(path), _NBYTES, _table(), sending)
        retire(str(path), str(memory_root))  # the checkpoint leaves memory
        assert pool.free() == []
        assert pool.claim(_NBYTES, "") is not slot
    assert pool.claim(_NBYTES, "") is slot


def test_a_slot_that_was_claimed_again_is_not_sent(
    pool: SlotPool, resources: ExitStack, memory_root: Path
) -> None:
    path = memory_root / "segment"
    slot = _sealed(pool, path)
    retire(str(path), str(memory_root))
    with pytest.raises(FileNotFoundError):
        of_slot(slot, str(path), _NBYTES, _table(), resources)
    pool.claim(_NBYTES, "")
    path.touch(0o600)  # made anew, of a copy
    with pytest.raises(FileNotFoundError):
        of_slot(slot, str(path), _NBYTES, _table(), resources)


def test_a_thread_that_cannot_read_leaves_no_other_one_waiting_for_its_checksums() -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def read(start: int, stop: int) -> memoryview:
        waits.set()
        assert goes_on.wait(60)
        raise EOFError

    file, errors = OutgoingFile(_NBYTES, read, _table()), list[Exception]()

    def sum_up() -> None:
        try:
            file.table()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=sum_up, daemon=True) for _ in range(2)]
    threads[0].start()
    assert waits.wait(60)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert sorted(map(type, errors), key=str) == [EOFError, DcpMemError]
