"""Collective attempts: what each error becomes. Several ranks: test_nobody_waits, test_drop_in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import RankFailed
from dcp_mem.comm import Ranks, SingleRank
from dcp_mem.comm.agreement import (
    _MOST_FAILURES,
    Failures,
    attempt,
    attempt_or_leave,
    described,
    from_all_ranks,
    joined,
    on_all_ranks,
    on_rank_0,
    raise_together,
)
from dcp_mem.common.value_class import value_class
from tests.support.processes.forks import raised_by


class Unpicklable(Exception):
    """Neither it nor what it carries can be pickled, and its text can't be had."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _fail(error: BaseException) -> NoReturn:
    raise error


# -- one rank ------------------------------------------------------------------------------------


def test_one_rank_alone_gets_its_results() -> None:
    alone = SingleRank()
    assert on_all_ranks(alone, "counting", lambda: 1) == 1
    assert on_rank_0(alone, "counting", lambda: 2) == 2
    assert from_all_ranks(alone, "counting", lambda: 3, lambda values: [*values, 4]) == [3, 4]


@pytest.mark.parametrize("value", [None, (), 0, False])
def test_results_that_are_nothing_much_are_results(value: object) -> None:
    assert on_all_ranks(SingleRank(), "", lambda: value) == value
    assert on_rank_0(SingleRank(), "", lambda: value) == value
    assert from_all_ranks(SingleRank(), "", lambda: value, lambda values: values[0]) == value


def test_the_own_error_is_raised_as_it_is() -> None:
    error = KeyError("a")
    error.__cause__ = cause = OSError("disk")
    for act in (
        lambda: on_all_ranks(SingleRank(), "", lambda: _fail(error)),
        lambda: from_all_ranks(SingleRank(), "", lambda: _fail(error), len),
    ):
        assert raised_by(act) is error
        assert error.__cause__ is cause


def test_an_error_of_rank_0_alone_has_the_same_type_everywhere() -> None:
    error = KeyError("a")
    raised = raised_by(lambda: on_rank_0(SingleRank(), "looking", lambda: _fail(error)))
    assert isinstance(raised, RankFailed)
    assert (raised.what, raised.failures) == ("looking", ((0, "KeyError: 'a'"),))
    assert raised.__cause__ is error


def test_a_decision_that_fails_is_raised() -> None:
    raised = raised_by(
        lambda: from_all_ranks(
            SingleRank(), "deciding", lambda: 1, lambda values: _fail(ValueError(str(values)))
        )
    )
    assert isinstance(raised, RankFailed)
    assert raised.failures == ((0, "ValueError: [1]"),)


def test_an_error_that_names_no_rank_is_an_error() -> None:
    """RankFailed without failures must not look like success."""
    raised = raised_by(lambda: on_rank_0(SingleRank(), "", lambda: _fail(RankFailed("x", []))))
    assert isinstance(raised, RankFailed)
    assert raised.failures == ((0, "RankFailed: x failed: "),)


def test_the_ranks_that_an_inner_error_names_are_named() -> None:
    inner = RankFailed("inner", [(3, "OSError: disk")])
    raised = raised_by(lambda: on_rank_0(SingleRank(), "outer", lambda: _fail(inner)))
    assert isinstance(raised, RankFailed)
    assert (raised.what, raised.failures) == ("outer", ((3, "OSError: disk"),))


def test_an_error_without_a_text_is_described_by_its_type() -> None:
    assert described(Unpicklable()) == "Unpicklable"
    assert attempt(lambda: _fail(Unpicklable())).failures(2) == ((2, "Unpicklable"),)


_failures = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b"])), max_size=12).map(
    lambda found: tuple(sorted(found)[:_MOST_FAILURES])
)


@given(_failures, _failures, _failures)
def test_failures_are_joined_alike_in_any_order(
    first: Failures, second: Failures, third: Failures
) -> None:
    joint = joined(joined(first, second), third)
    assert joint == joined(third, joined(second, first)) == joined(joined(third, first), second)
    assert joint == tuple(sorted(first + second + third)[:_MOST_FAILURES])
    assert bool(joint) == bool(first or second or third)


def test_nothing_is_raised_where_nothing_failed() -> None:
    raise_together("", ())
    with pytest.raises(OSError, match="own"):
        raise_together("", ((1, "another"),), OSError("own"))
    with pytest.raises(RankFailed, match="rank 1: another"):
        raise_together("", ((1, "another"),))


@value_class(kw_only=True)
class _Noting(SingleRank):
    left: list[str] = field(default_factory=list)

    def leave(self, why: str) -> None:
        self.left.append(why)


def _total(values: Sequence[int]) -> int:
    return sum(values)


_ACTS: dict[str, Callable[[Ranks, Callable[[], int]], object]] = {
    "on_all_ranks": lambda ranks, act: on_all_ranks(ranks, "trying", act),
    "on_rank_0": lambda ranks, act: on_rank_0(ranks, "trying", act),
    "from_all_ranks": lambda ranks, act: from_all_ranks(ranks, "trying", act, _total),
    "decide": lambda ranks, act: from_all_ranks(ranks, "trying", lambda: 1, lambda _: act()),
}


@pytest.mark.parametrize("name", _ACTS)
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3)])
def test_an_interrupted_rank_leaves_the_others(name: str, error: BaseException) -> None:
    ranks = _Noting()
    with pytest.raises(type(error)) as caught:
        _ACTS[name](ranks, lambda: _fail(error))
    assert caught.value is error
    assert ranks.left == [f"{type(error).__name__}: {error}"]


def test_an_error_that_is_kept_leaves_nobody() -> None:
    ranks = _Noting()
    assert isinstance(attempt_or_leave(ranks, lambda: _fail(OSError("disk"))).error, OSError)
    assert ranks.left == []
