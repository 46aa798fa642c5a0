"""Runs of integers come back as they were, and equal ones are stored once."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.format.shared_runs import RunPool, read_runs

INTEGERS = st.integers(-(1 << 61), 1 << 61)
PROGRESSIONS = st.builds(
    lambda first, step, length: [first + step * index for index in range(length)],
    st.integers(-(1 << 40), 1 << 40),
    st.integers(-(1 << 40), 1 << 40),
    st.integers(0, 50),
)


@given(st.lists(PROGRESSIONS | st.lists(INTEGERS, max_size=9), max_size=9))
def test_runs_come_back_and_equal_ones_are_one(
    written: Sequence[Sequence[int]],
) -> None:
    pool = RunPool()
    ends = np.cumsum([0, *map(len, written)])
    numbers = pool.add_rows(np.array([*chain.from_iterable(written)], np.int64), ends)
    assert len(set(numbers.tolist())) == len(set(map(tuple, written)))
    runs = pool.runs()
    assert [runs.run(number).tolist() for number in numbers.tolist()] == list(map(list, written))
    for number, run in zip(numbers.tolist(), written, strict=True):
        assert runs.at(np.full(len(run), number), np.arange(len(run))).tolist() == run


def test_a_progression_takes_no_room_whatever_its_length() -> None:
    pool = RunPool()
    one, other = pool.add(np.stack([np.arange(0, 3000, 3), np.full(1000, 7)])).tolist()
    assert pool.add(np.arange(1000)[None] * 3).tolist() == [one]
    assert other not in pool.add(np.full((1, 999), 7)).tolist()
    assert not len(pool.runs().values)
    pool.add(np.array([[1, 2, 4]]))
    assert pool.runs().values.tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("run", "values"),
    [
        ([-1, 0, -3], [1, 2, 4]),
        ([2, 0, -3], [1, 2, 4]),
        ([0, 0, -4], [1, 2, 4]),
        ([0, 0, -(1 << 63)], [1, 2, 4]),
        ([0, 0], []),
        ([0, 0, -3], [[1, 2, 4]]),
    ],
    ids=str,
)
def test_runs_that_reach_out_of_what_is_listed_are_refused(run: object, values: object) -> None:
    runs, listed = np.array(run, np.int64)[:, None], np.array(values, np.int64)
    with pytest.raises(ValueError, match="runs"):
        read_runs({"runs": runs, "runs_values": listed}, "runs")
