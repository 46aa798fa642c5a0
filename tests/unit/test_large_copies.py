"""Large pieces of memory: both ways copy every byte, and the quicker one is found out and kept."""

import threading
from collections.abc import Callable

import pytest
import torch

from dcp_mem.memory import copying
from dcp_mem.memory.large_copies import (
    _TRIES,
    LEAST_NBYTES,
    LargeCopies,
    Way,
    _Trial,
    by_loop,
    memmove,
)


@pytest.mark.parametrize("way", [memmove, by_loop])
@pytest.mark.parametrize("nbytes", [0, 1, 15, 4097, LEAST_NBYTES, (3 << 20) + 7])
@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 3), (13, 13)])
def test_each_way_copies_every_byte_and_nothing_beside_them(
    way: Way, nbytes: int, shift: tuple[int, int]
) -> None:
    source = torch.randint(0, 255, (nbytes + 32,), dtype=torch.uint8)
    target = torch.randint(0, 255, (nbytes + 32,), dtype=torch.uint8)
    expected = target.clone()
    into, at = shift
    expected[into : into + nbytes] = source[at : at + nbytes]
    way(target.data_ptr() + into, source.data_ptr() + at, nbytes)
    assert torch.equal(target, expected)


class _Clock:
    """A clock that each way to copy moves on by a time of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def way(self, name: str, seconds: Callable[[int, int], float]) -> Way:
        """Return a way whose copies take seconds by their number and length."""

        def copy(destination: int, source: int, nbytes: int) -> None:
            self.now += seconds(self.calls.count(name), nbytes)
            self.calls.append(name)

        return copy


def _held_up(seconds: float, nth: int) -> Callable[[int, int], float]:
    """Return times of pieces of which every third is held up."""
    return lambda number, nbytes: seconds + 9 * (number % 3 == nth)


@pytest.mark.parametrize(("first", "second", "chosen"), [(1.0, 0.9, "b"), (0.9, 1.0, "a")])
def test_the_quicker_way_copies_all_once_both_were_tried(
    first: float, second: float, chosen: str
) -> None:
    clock = _Clock()
    copies = LargeCopies(
        (clock.way("a", _held_up(first, 0)), clock.way("b", _held_up(second, 1))), clock
    )
    for _ in range(2 * _TRIES):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls == ["b", "a"] * _TRIES
    for _ in range(5):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls[2 * _TRIES :] == [chosen] * 5


def test_ways_that_take_nearly_as_long_go_on_taking_turns_until_one_is_clearly_quicker() -> None:
    clock, later = _Clock(), 0.99

    copies = LargeCopies((clock.way("a", lambda *_: 1.0), clock.way("b", lambda *_: later)), clock)
    for _ in range(4 * _TRIES):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls == ["b", "a"] * 2 * _TRIES
    later = 0.8  # what was copied first was in memory that nobody had touched, say
    for _ in range(2 * _TRIES + 3):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls[-3:] == ["b"] * 3


def test_each_size_has_the_way_that_is_quicker_for_it() -> None:
    clock, large = _Clock(), 64 * LEAST_NBYTES
    copies = LargeCopies(
        (
            clock.way("a", lambda _, nbytes: nbytes * (0.5 if nbytes == large else 1.0)),
            clock.way("b", lambda _, nbytes: nbytes * 0.8),
        ),
        clock,
    )
    for _ in range(2 * _TRIES):  # in turns, as a state's tensors may come
        copies.copy(0, 0, LEAST_NBYTES)
        copies.copy(0, 0, large)
    del clock.calls[:]
    for nbytes in (LEAST_NBYTES, large, LEAST_NBYTES + 8):
        copies.copy(0, 0, nbytes)
    assert clock.calls == ["b", "a", "b"]


def test_pieces_of_a_size_are_compared_by_byte() -> None:
    clock = _Clock()
    copies = LargeCopies(
        (
            clock.way("a", lambda _, nbytes: nbytes * 1.0),
            clock.way("b", lambda _, nbytes: nbytes * 0.9),
        ),
        clock,
    )
    for number in range(2 * _TRIES):  # "b" has the longer ones
        copies.copy(0, 0, LEAST_NBYTES * (3 if number % 2 == 0 else 2) // 2)
    del clock.calls[:]
    copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls == ["b"]


def test_a_way_that_fails_raises_and_is_not_counted() -> None:
    def failing(destination: int, source: int, nbytes: int) -> None:
        raise MemoryError

    copies = LargeCopies((failing, failing))
    for _ in range(3 * _TRIES):
        with pytest.raises(MemoryError):
            copies.copy(0, 0, LEAST_NBYTES)


def test_several_threads_copy_while_the_way_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_large_copies", LargeCopies())
    sources = [torch.full((2 << 20,), one, dtype=torch.uint8) for one in range(48)]
    targets = [torch.zeros_like(source) for source in sources]

    def copy(start: int) -> None:
        for target, source in zip(targets[start::4], sources[start::4], strict=True):
            copying.copy_here([(target.data_ptr(), source.data_ptr(), source.nbytes)])

    threads = [threading.Thread(target=copy, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, targets, sources))
    assert all(way in (memmove, by_loop) for way in copying._large_copies._chosen.values())


def test_a_comparison_that_another_thread_ends_in_the_middle_is_not_of_empty_lists() -> None:
    trial = _Trial()

    class _AsAnotherThreadEndsIt(list[float]):
        def __len__(self) -> int:
            trial._took = [], []
            return super().__len__()

    took = [1.0] * _TRIES
    trial._took = _AsAnotherThreadEndsIt(took), _AsAnotherThreadEndsIt(took)
    assert trial.end(0, 1.0) is None
