"""How often to save: the decision held against the model that it comes from, on plain numbers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dcp_mem import ConfigError
from dcp_mem.policy.frequency import Auto, advice, auto, parse_seconds, steps_between

COSTS = st.floats(1e-3, 1e5)
MTBFS = st.floats(1.0, 1e8)


def _expected_time(interval: float, cost: float, mtbf: float) -> float:
    """Of one second of training, by Daly's model of failures that come at random."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


def _least_expected_time(cost: float, mtbf: float) -> float:
    """Find the least time by golden section: it has one minimum, at an interval below the MTBF."""
    low, high = 0.0, 1.01 * mtbf
    for _ in range(200):
        left, right = high - (high - low) * 0.618034, low + (high - low) * 0.618034
        if _expected_time(left, cost, mtbf) < _expected_time(right, cost, mtbf):
            high = right
        else:
            low = left
    return _expected_time((low + high) / 2, cost, mtbf)


def test_the_interval_of_a_known_case_is_the_papers() -> None:
    found = advice(300.0, 6 * 3600.0)
    assert found.young_seconds == pytest.approx(3600.0)
    x = math.sqrt(300 / 43200)
    assert found.interval_seconds == pytest.approx(3600 * (1 + x / 3 + x * x / 9) - 300)


@given(COSTS, MTBFS)
def test_no_other_interval_takes_much_less_time(cost: float, mtbf: float) -> None:
    assume(cost < 100 * mtbf)  # beyond, the model's times are no numbers any more
    interval = advice(cost, mtbf).interval_seconds
    assert _expected_time(interval, cost, mtbf) <= 1.01 * _least_expected_time(cost, mtbf)


@given(COSTS, COSTS, MTBFS)
def test_the_dearer_a_save_the_longer_the_interval(cost: float, other: float, mtbf: float) -> None:
    cheap, dear = sorted((cost, other))
    assert advice(cheap, mtbf).interval_seconds <= advice(dear, mtbf).interval_seconds * (1 + 1e-9)


@given(COSTS, MTBFS, MTBFS)
def test_the_rarer_failures_are_the_longer_the_interval(
    cost: float, mtbf: float, other: float
) -> None:
    often, rarely = sorted((mtbf, other))
    # Between these, one formula replaces the other, and the estimate steps down.
    assume(cost < 2 * often or cost >= 2 * rarely)
    assert advice(cost, often).interval_seconds <= advice(cost, rarely).interval_seconds * (
        1 + 1e-9
    )


@given(COSTS, MTBFS, COSTS, COSTS)
def test_storage_gets_no_more_than_there_is_and_it_can_take(
    cost: float, mtbf: float, flush: float, recovery: float
) -> None:
    found = advice(cost, mtbf, flush_seconds=flush, recovery_seconds=recovery)
    assert found.persist_seconds == max(found.interval_seconds, flush)
    assert 0 < found.saving <= found.overhead <= 1
    assert found.overhead == min(1, found.saving + found.rework)


def test_the_overhead_is_what_saves_take_and_what_failures_cost() -> None:
    found = advice(2.0, 10_000.0, recovery_seconds=50.0)
    cycle = found.interval_seconds + 2.0
    assert found.overhead == pytest.approx(2.0 / cycle + (cycle / 2 + 50.0) / 10_000.0)


def test_saves_that_cost_nothing_are_made_all_the_time() -> None:
    found = advice(0.0, 3600.0)
    assert (found.interval_seconds, found.young_seconds, found.overhead) == (0.0, 0.0, 0.0)
    assert advice(0, 3600, flush_seconds=9).persist_seconds == 9.0
    assert advice(0, 3600, recovery_seconds=36).overhead == pytest.approx(0.01)
    assert steps_between(Auto(3600.0), 0.0, 1.0) == 1


def test_where_a_save_costs_more_than_failures_leave_the_interval_is_the_mtbf() -> None:
    assert advice(2000.0, 1000.0).interval_seconds == 1000.0
    assert advice(1e9, 1000.0).interval_seconds == 1000.0
    assert advice(1e9, 1000.0).overhead == 1.0
    assert advice(1999.0, 1000.0).interval_seconds == pytest.approx(1000 * 8 / 9, rel=1e-3)


def test_the_advice_is_a_sentence_with_figures() -> None:
    assert str(advice(0.02, 43200.0)) == (
        "save every 41.6 s: 0.048 % of the time goes to saves,"
        " 0.048 % to recoveries and work done twice (MTBF 12 h)"
    )
    assert str(advice(300.0, 86400.0)).startswith("save every 1.94 h: 4.1 % of the time")
    assert str(advice(0, 90)).startswith("save every 0 s: 0 % of the time goes to saves, 0 % ")
    assert "100 % to recoveries" in str(advice(90, 1))
    assert "(MTBF 2,000 d)" in str(advice(1, 2000 * 86400))


@pytest.mark.parametrize(
    ("mtbf", "seconds"),
    [
        ("12h", 43200.0),
        ("30min", 1800.0),
        ("1.5 d", 129600.0),
        ("90s", 90.0),
        (" 2 H ", 7200.0),
        (90, 90.0),
        (0.5, 0.5),
    ],
)
def test_an_mtbf_is_seconds_or_a_text(mtbf: float | str, seconds: float) -> None:
    assert auto(mtbf) == Auto(seconds, at_least_steps=1)
    assert parse_seconds(mtbf, "mtbf") == seconds


def test_steps_between_saves_take_as_long_as_the_interval() -> None:
    interval = advice(0.5, 43200.0).interval_seconds
    assert steps_between(auto("12h"), 0.5, 0.7) == round(interval / 0.7)
    assert steps_between(auto("12h"), 0.5, 2 * interval) == 1
    assert steps_between(auto("12h", at_least_steps=500), 0.5, 0.7) == 500


@given(st.floats(0, 1e5), st.floats(1e-4, 1e5), MTBFS, st.integers(1, 100))
def test_there_is_always_a_number_of_steps(
    cost: float, step: float, mtbf: float, at_least: int
) -> None:
    assert steps_between(Auto(mtbf, at_least), cost, step) >= at_least


_NO_SECONDS: list[Any] = [math.nan, math.inf, -math.inf, -1.0, True, "1", None]
_NO_STEPS: list[Any] = [0, -1, 1.0, True, "2"]
_NO_MTBF: list[Any] = [0, -1, True, None, math.nan, math.inf]
_NO_TEXT: list[Any] = ["", "12", "h", "12 parsecs", "-3h", "0h", "1e3s", "9" * 400 + "h"]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        *((partial(advice, bad, 3600.0), "blocking_seconds") for bad in _NO_SECONDS),
        *((partial(advice, 1.0, bad), "mtbf_seconds") for bad in _NO_SECONDS),
        (partial(advice, 1.0, 0), r"mtbf_seconds=0.*above 0"),
        *((partial(advice, 1, 9, flush_seconds=bad), "flush_seconds") for bad in _NO_SECONDS),
        *((partial(advice, 1, 9, recovery_seconds=bad), "recovery_sec") for bad in _NO_SECONDS),
        *((partial(auto, bad), "mtbf=") for bad in [*_NO_MTBF, *_NO_TEXT]),
        *((partial(auto, "12h", at_least_steps=bad), "at_least_steps=") for bad in _NO_STEPS),
        *(
            (partial(steps_between, Auto(3600.0), 1.0, bad), "step_seconds")
            for bad in (0, -1.0, math.nan, math.inf)
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(act: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        act()
