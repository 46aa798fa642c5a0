"""Runs of integers come back as they were, and equal ones are stored once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.format.shared_runs import RunPool, Runs

INTEGERS = st.integers(-(1 << 61), 1 << 61)
PROGRESSIONS = st.builds(
    lambda first, step, length: [first + step * index for index in range(length)],
    st.integers(-(1 << 40), 1 << 40),
    st.integers(-(1 << 40), 1 << 40),
    st.integers(1, 50),
)


@given(st.lists(PROGRESSIONS | st.lists(INTEGERS, min_size=1, max_size=9), max_size=9), st.data())
def test_runs_come_back_and_equal_ones_are_one(
    written: Sequence[Sequence[int]], data: st.DataObject
) -> None:
    pool = RunPool()
    numbers = [pool.add(np.array(run, np.int64)) for run in written]
    assert len(set(numbers)) == len(set(map(tuple, written)))
    runs = Runs(pool.columns("some"), "some")
    assert runs.lengths[numbers].tolist() == list(map(len, written))
    wanted = data.draw(st.lists(st.sampled_from(range(len(written))))) if written else []
    expected = [value for one in wanted for value in written[one]]
    assert runs.joined(np.array([numbers[one] for one in wanted], np.int64)).tolist() == expected


def test_a_progression_takes_no_room_whatever_its_length() -> None:
    pool = RunPool()
    assert pool.add(np.arange(0, 3000, 3)) == pool.add(np.arange(1000) * 3)
    assert pool.add(np.full(1000, 7)) != pool.add(np.full(999, 7))
    assert len(pool.columns("x")["x_values"]) == 0
    pool.add(np.array([1, 2, 4]))
    assert pool.columns("x")["x_values"].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("length", 0),
        ("length", -1),
        ("first", -1),
        ("first", 2),
        ("length", 4),
        ("length", 1 << 62),
        ("is_listed", [1, 1]),
        ("step", [[0]]),
    ],
    ids=str,
)
def test_runs_that_reach_out_of_what_is_listed_are_refused(column: str, value: object) -> None:
    pool = RunPool()
    pool.add(np.array([1, 2, 4]))
    columns = pool.columns("x")
    Runs(columns, "x")
    with pytest.raises(ValueError, match="runs"):
        Runs({**columns, f"x_{column}": np.array(value, np.int64, ndmin=1)}, "x")
