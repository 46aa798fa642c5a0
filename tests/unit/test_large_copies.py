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
    by_loop,
    is_quicker,
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
    """A clock that each way moves on by a time of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def way(self, name: str, seconds: Callable[[int], float]) -> Way:
        def copy(destination: int, source: int, nbytes: int) -> None:
            self.now += seconds(self.calls.count(name))
            self.calls.append(name)

        return copy


@pytest.mark.parametrize(
    ("usual", "other", "chosen"),
    [
        (1.0, 0.9, "other"),
        (1.0, 1.1, "usual"),
        (1.0, 0.99, "usual"),  # no clear gain
    ],
)
def test_the_quicker_way_makes_all_copies_once_both_were_tried(
    usual: float, other: float, chosen: str
) -> None:
    clock = _Clock()
    # Every third copy is held up, whichever way it goes.
    copies = LargeCopies(
        clock.way("usual", lambda number: usual + 9 * (number % 3 == 0)),
        clock.way("other", lambda number: other + 9 * (number % 3 == 1)),
        clock,
    )
    for _ in range(2 * _TRIES):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls == ["usual", "other"] * _TRIES
    for _ in range(5):
        copies.copy(0, 0, LEAST_NBYTES)
    assert clock.calls[2 * _TRIES :] == [chosen] * 5


def test_pieces_of_other_sizes_are_compared_by_byte() -> None:
    assert is_quicker([0.1, 0.2, 0.3], [0.3, 0.21, 0.1])
    assert not is_quicker([0.2], [0.2])


def test_a_way_that_fails_is_tried_again_and_its_error_is_raised() -> None:
    def failing(destination: int, source: int, nbytes: int) -> None:
        raise MemoryError

    copies = LargeCopies(failing, memmove)
    for _ in range(2):
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
    assert copying._large_copies._chosen in (memmove, by_loop)
