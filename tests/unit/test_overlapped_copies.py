"""What overlapped copies take over, and the batches in which they make them."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcp_mem
from dcp_mem.memory import copying
from dcp_mem.memory.copying import addresses_of, copy_many_here
from dcp_mem.saving import overlap
from dcp_mem.saving.overlap import StagingCopies


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    batch=st.integers(1, 20),
)
def test_batches_make_each_copy_once_and_in_order(sizes: list[int], batch: int) -> None:
    nbytes = np.array(sizes, np.int64)
    sources = np.cumsum(nbytes) - nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_BATCH", batch)
        copied: list[int] = []
        for columns in overlap._batches(np.stack([1_000 + sources, sources, nbytes])):
            assert columns[2].sum() < 2 * batch
            assert columns[2].max() <= batch
            for destination, source, count in columns.T.tolist():
                assert destination == source + 1_000
                copied += range(source, source + count)
    assert copied == list(range(sum(sizes)))


def test_a_piece_is_found_in_the_tensor_that_begins_there_and_has_all_of_it() -> None:
    memory = torch.zeros(100)
    tensors = [memory[10:20], memory[10:60], memory[10:12], torch.zeros(0), memory[70:]]
    base = memory.data_ptr()

    def tensor_of(first: int, count: int) -> torch.Tensor | None:
        (number,) = overlap._found(tensors, np.array([base + 4 * first]), np.array([4 * count]))
        return None if number < 0 else tensors[number]

    assert tensor_of(10, 50) is tensors[1]
    assert tensor_of(10, 3) is tensors[1]
    assert tensor_of(70, 30) is tensors[4]
    assert tensor_of(10, 51) is None
    assert tensor_of(10, 0) is None
    assert tensor_of(11, 2) is None
    assert tensor_of(-5, 2) is None
    assert tensor_of(120, 2) is None


def test_among_no_tensors_nothing_is_found() -> None:
    assert overlap._found([], np.array([5, 0]), np.array([4, 0])).tolist() == [-1, -1]


@pytest.mark.parametrize("may_use_the_kernel", [True, False])
@pytest.mark.parametrize("count", [0, 3, 511, 3_000])
def test_pieces_of_any_number_are_copied_in_this_thread(
    count: int, may_use_the_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_may_copy_by_the_kernel", lambda: may_use_the_kernel)
    nbytes = np.arange(1, count + 1, dtype=np.int64) % 90 + 1
    starts = np.cumsum(nbytes) - nbytes
    source = np.random.default_rng(0).integers(0, 255, max(1, nbytes.sum()), np.uint8)
    target = np.zeros_like(source)
    copy_many_here(target.ctypes.data + starts, source.ctypes.data + starts, nbytes)
    assert (target == source).all() or count == 0


def test_addresses_of_devices_may_have_the_highest_bit_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = torch.zeros(2)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: (1 << 63) + 16)
    assert overlap._found([known], addresses_of([known]), np.array([8])).tolist() == [0]


def _one_copy() -> tuple[StagingCopies, torch.Tensor]:
    parameter, target = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    optimizer = torch.optim.SGD([parameter])
    copies = StagingCopies(dcp_mem.Overlap(optimizer))
    columns = np.array([[target.data_ptr()], [parameter.data_ptr()], [12]])
    assert copies.take(*columns).tolist() == [False]
    return copies, target


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_work_that_was_queued_when_its_save_was_given_up_copies_nothing(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []

    class Threads:
        def submit(self, act: Any) -> None:
            queued.append(act)
            if is_interrupted:
                raise KeyboardInterrupt

    monkeypatch.setattr(overlap, "_copiers", Threads())
    copies, target = _one_copy()
    with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
        copies.begin()
    given_back: list[bool] = []
    copies.cancel(lambda: given_back.append(True))  # waits for nothing: nobody may ever come
    queued[0]()
    assert given_back == [True]
    assert target.sum() == 0
    overlap.wait_for_copies()


def test_a_forked_child_waits_for_no_copies_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Threads:
        def submit(self, act: Any) -> None:
            pass

    monkeypatch.setattr(overlap, "_copiers", Threads())
    copies, _ = _one_copy()
    copies.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of pytest's plugins
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        with contextlib.suppress(BaseException):
            copies.optimizers[0].step()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    copies.cancel(lambda: None)


def test_what_is_not_validated_is_not_kept_beyond_its_copies() -> None:
    copies, target = _one_copy()
    assert copies._planned is None
    copies.begin()
    copies.finish()
    assert target.sum() == 3
    assert not copies._copies.read
