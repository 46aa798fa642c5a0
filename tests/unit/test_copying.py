"""Moves of bytes: shares cover them exactly, copies and reads are right, threads end on errors."""

import ctypes
import os
import tempfile
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.memory import copying
from dcp_mem.memory.copying import Move, shares


def _bytes_of(moves: list[Move]) -> list[tuple[int, int]]:
    return [(to + i, start + i) for to, start, nbytes in moves for i in range(nbytes)]


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 9))
def test_shares_are_all_the_bytes_once_and_nearly_equal(lengths: list[int], count: int) -> None:
    moves, position = [], 0
    for nbytes in lengths:
        moves.append((1000 + position * 2, 5000 + position * 3, nbytes))
        position += nbytes
    parts = shares(moves, count)
    assert [pair for part in parts for pair in _bytes_of(part)] == _bytes_of(moves)
    sizes = [sum(nbytes for _, _, nbytes in part) for part in parts]
    assert len(parts) <= count
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("way", ["_memmove", "_by_loop"])
@pytest.mark.parametrize("nbytes", [1 << 20, (3 << 20) + 7])
@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 3), (13, 13)])
def test_each_way_to_copy_large_pieces_copies_every_byte_and_nothing_beside_them(
    way: str, nbytes: int, shift: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_copy_large", getattr(copying, way))
    source = torch.randint(0, 255, (nbytes + 32,), dtype=torch.uint8)
    target = torch.randint(0, 255, (nbytes + 32,), dtype=torch.uint8)
    expected = target.clone()
    into, at = shift
    expected[into : into + nbytes] = source[at : at + nbytes]
    copying.copy_here([(target.data_ptr() + into, source.data_ptr() + at, nbytes)])
    assert torch.equal(target, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_copies_and_reads_move_every_byte(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sources = [
        torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        for nbytes in (1, 5 << 20, 0, 77, 3 << 20)
    ]
    targets = [torch.zeros_like(source) for source in sources]
    copying.copy(
        [
            (to.data_ptr(), start.data_ptr(), start.nbytes)
            for to, start in zip(targets, sources, strict=True)
        ]
    )
    assert all(map(torch.equal, targets, sources))
    with tempfile.TemporaryFile() as stream:
        offsets = []
        for source in sources:
            offsets.append(stream.tell())
            stream.write(source.numpy().tobytes())
        stream.flush()
        back = [torch.zeros_like(source) for source in sources]
        copying.read(
            stream.fileno(),
            [
                (to.data_ptr(), at, to.nbytes)
                for to, at in zip(back, offsets, strict=True)
                if to.nbytes
            ],
        )
    assert all(map(torch.equal, back, sources))


@pytest.mark.parametrize("by", ["the kernel", "hand", "the kernel, which does a part"])
@pytest.mark.parametrize("threads", [1, 2])
def test_many_small_pieces_are_copied_and_nothing_beside_them(
    by: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    batches: list[int] = []
    kernel = copying._is_copied_by_the_kernel

    def copied(targets: copying.Columns, sources: copying.Columns) -> bool:
        batches.append(len(targets))
        is_broken_off = by == "the kernel, which does a part"
        count = len(targets) // 2 if is_broken_off else len(targets)
        return kernel(targets[:count], sources[:count]) and not is_broken_off

    monkeypatch.setattr(copying, "_may_copy_by_the_kernel", lambda: by != "hand")
    monkeypatch.setattr(copying, "_is_copied_by_the_kernel", copied)
    nbytes = np.tile(np.array([3000, 0, 1, 8191, 4096], np.int64), 500)
    offsets = np.cumsum(nbytes + 5) - nbytes
    source = torch.randint(1, 255, (int(offsets[-1] + nbytes[-1]),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    copying.copy_many(target.data_ptr() + offsets, source.data_ptr() + offsets, nbytes)
    is_piece = torch.zeros_like(source, dtype=torch.bool)
    for offset, length in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        is_piece[offset : offset + length] = True
    assert torch.equal(target, torch.where(is_piece, source, 0))
    assert sum(batches) == (0 if threads == 1 or by == "hand" else len(nbytes))


def test_linux_copies_within_this_process() -> None:
    assert copying._may_copy_by_the_kernel()


def test_a_read_past_the_end_raises_and_leaves_no_thread_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    target = ctypes.create_string_buffer(8 << 20)
    with tempfile.TemporaryFile() as stream:
        os.truncate(stream.fileno(), 5 << 20)
        with pytest.raises(EOFError, match="bytes short"):
            copying.read(stream.fileno(), [(ctypes.addressof(target), 0, 8 << 20)])


@pytest.mark.parametrize("failing", ["caller", "helper"])
def test_an_error_in_shared_work_is_raised_once_no_thread_is_at_work(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    both, done = threading.Barrier(2), []

    def act(piece: int) -> None:
        both.wait(60)  # each thread has one piece
        if (threading.current_thread() is threading.main_thread()) == (failing == "caller"):
            raise KeyError(piece)
        done.append(piece)

    with pytest.raises(KeyError):
        copying.work_off(range(2), act)
    assert len(done) == 1


@pytest.mark.parametrize("nbytes", [1, 4097, 1 << 20, (3 << 20) + 7])
def test_pieces_of_any_size_are_copied_and_nothing_beside_them(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(1, 256, nbytes + 32, np.uint8)
    target = np.zeros_like(source)
    copying.copy_here([(target.ctypes.data + 16, source.ctypes.data + 8, nbytes)])
    assert np.array_equal(target[16 : 16 + nbytes], source[8 : 8 + nbytes])
    assert not target[:16].any()
    assert not target[16 + nbytes :].any()
