"""What of a copy isn't sent: chunks of whole blocks, and stretches of them that a receiver has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_mem.format.checksums import BlockChecksums, Blocks, blocks_of
from dcp_mem.format.manifest import ItemTable
from dcp_mem.replicating import earlier
from dcp_mem.replicating.earlier import EarlierCopy, Told, cuts_of, reduced

_CHUNK, _SHORT = 100, 8
ITEMS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=30)
"""For each item, what lies before it, and its length."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "CHUNK", _CHUNK)
    monkeypatch.setattr(earlier, "_SHORT", _SHORT)


def _blocks(items: Sequence[tuple[int, int]]) -> tuple[Blocks, int]:
    """The blocks of items, and the bytes of the segment; an empty item has a place of its own."""
    ends = np.cumsum([before + max(nbytes, 1) for before, nbytes in items])
    lengths = np.array([nbytes for _, nbytes in items])
    offsets = ends - np.maximum(lengths, 1)
    return blocks_of(offsets, lengths), int(offsets[-1] + lengths[-1])


def _table(blocks: Blocks, data: bytes) -> ItemTable:
    checksums = BlockChecksums(blocks)
    checksums.add(0, memoryview(data))
    nowhere = np.zeros(len(blocks.offsets), "<i8")
    return ItemTable(
        offsets=blocks.offsets,
        lengths=blocks.lengths,
        payload_offsets=nowhere,
        payload_nbytes=nowhere,
        crc32c=checksums.result(),
    )


@given(ITEMS)
def test_chunks_cover_a_segment_and_cut_no_block(items: list[tuple[int, int]]) -> None:
    blocks, nbytes = _blocks(items)
    cuts = cuts_of(blocks, nbytes)
    assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
    assert [cut.first for cut in cuts[1:]] == [cut.last for cut in cuts[:-1]]
    if nbytes:
        assert (cuts[0].start, cuts[0].first) == (0, 0)
        assert (cuts[-1].stop, cuts[-1].last) == (nbytes, len(blocks.offsets))
    for cut in cuts:
        assert 0 < cut.stop - cut.start <= _CHUNK
        here = slice(cut.first, cut.last)
        assert (blocks.offsets[here] >= cut.start).all()
        assert (blocks.offsets[here] + blocks.lengths[here] <= cut.stop).all()


def test_a_long_gap_between_items_is_cut() -> None:
    cuts = cuts_of(blocks_of(np.array([0, 350]), np.array([10, 20])), 370)
    assert [(cut.start, cut.stop, cut.last - cut.first) for cut in cuts] == [
        (0, 100, 1),
        (100, 200, 0),
        (200, 300, 0),
        (300, 370, 1),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ITEMS, st.data())
def test_what_is_sent_and_what_the_receiver_has_make_the_chunk(
    tmp_path: Path, items: list[tuple[int, int]], draws: st.DataObject
) -> None:
    blocks, nbytes = _blocks(items)
    generator = np.random.default_rng(nbytes)
    had = generator.integers(0, 256, nbytes).astype(np.uint8)
    data, changed = had.copy(), np.zeros(len(blocks.offsets), bool)
    for block in draws.draw(st.sets(st.integers(0, len(changed) - 1))):
        start, length = blocks.offsets[block], blocks.lengths[block]
        data[start : start + length] ^= 255
        changed[block] = length > 0
    copy, sent = _earlier(tmp_path, blocks, had), 0
    crcs = _table(blocks, data.tobytes()).crc32c
    for cut in cuts_of(blocks, nbytes):
        if not cut.note_nbytes:
            continue
        new, place = data[cut.start : cut.stop].data, bytearray(cut.stop - cut.start)
        has = copy.told.has(cut, crcs[cut.first : cut.last])
        assert has.tolist() == (~changed[cut.first : cut.last]).tolist()
        note, pieces = reduced(blocks, cut, new, has)
        assert len(note) == cut.note_nbytes
        refilled = copy.refill(cut, memoryview(place), note)
        assert refilled.is_right
        for target, piece in zip(refilled.pieces, pieces, strict=True):
            target[:] = piece
        assert place == new
        sent += sum(map(len, pieces))
    copy.close()
    # With each changed block goes what lies behind it, and short stretches beside it.
    assert sent <= blocks.lengths[changed].sum() + changed.sum() * 3 * (_SHORT + 10)


def _earlier(directory: Path, blocks: Blocks, data: np.ndarray) -> EarlierCopy:
    path = directory / "earlier"
    path.write_bytes(data.tobytes())
    return EarlierCopy(os.open(path, os.O_RDONLY), _table(blocks, data.tobytes()), blocks)


def test_bytes_with_the_same_checksum_and_another_hash_are_sent_again(tmp_path: Path) -> None:
    blocks, nbytes = _blocks([(0, 50)])
    had = np.arange(nbytes, dtype=np.uint8)
    copy = _earlier(tmp_path, blocks, had)
    (cut,) = cuts_of(blocks, nbytes)
    # As if both had the same CRC32C.
    note, pieces = reduced(blocks, cut, (had + 1).astype(np.uint8).data, np.array([True]))
    assert pieces == []
    assert not copy.refill(cut, memoryview(bytearray(nbytes)), note).is_right
    copy.close()


def test_a_receiver_without_an_earlier_copy_has_nothing() -> None:
    assert not Told(3).is_any
    assert not Told(0).is_any
    assert Told(3).message == bytes(15)


def test_only_items_at_the_same_places_are_had() -> None:
    known = blocks_of(np.array([0, 64, 128]), np.array([64, 64, 10]))
    grown = blocks_of(np.array([0, 64, 128, 192]), np.array([64, 64, 20, 5]))
    told = Told(4)
    told.tell(grown, known, np.array([7, 8, 9], "<u4"))
    (cut,) = cuts_of(grown, 100)
    has = told.has(cut, np.array([7, 80, 9, 0], "<u4"))
    assert has.tolist() == [True, False, False, False]
