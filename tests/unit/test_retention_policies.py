"""Retention policies, from plain values."""

import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import ConfigError
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.order import SaveNumber
from dcp_mem.policy.retention import (
    Retention,
    any_of,
    keep_best,
    keep_every,
    keep_for,
    keep_last,
    leaving,
    retention,
)


def _there(*losses: float | None) -> list[CheckpointFacts]:
    """Checkpoints of steps 0, 10, 20, …"""
    return [
        CheckpointFacts(
            key=f"step-{number * 10}",
            created=float(number),
            step=number * 10,
            metrics={} if loss is None else {"loss": loss},
        )
        for number, loss in enumerate(losses)
    ]


def _steps(policy: Retention, there: list[CheckpointFacts]) -> list[int]:
    return sorted(
        one.step for one in there if one.key in policy.chosen(there) and one.step is not None
    )


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (keep_last(2), [30, 40]),
        (keep_last(9), [0, 10, 20, 30, 40]),
        (keep_every(20), [0, 20, 40]),
        (keep_every(7), [0]),
        (keep_best("loss"), [10]),
        (keep_best("loss", 2), [10, 40]),
        (keep_best("loss", mode="max"), [20]),
        (keep_best("accuracy"), []),
        (any_of(keep_last(1), keep_every(20)), [0, 20, 40]),
        (
            any_of(keep_last(1), any_of(keep_best("loss"), keep_best("loss", mode="max"))),
            [10, 20, 40],
        ),
    ],
)
def test_a_policy_chooses(policy: Retention, steps: list[int]) -> None:
    there = _there(None, 0.1, 0.9, math.nan, 0.1)
    there[4] = CheckpointFacts(key="step-40", created=4.0, step=40, metrics={"loss": 0.2})
    assert _steps(policy, there) == steps
    assert _steps(policy, there[::-1]) == steps
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_the_newer_of_two_equals_is_better() -> None:
    assert _steps(keep_best("loss"), _there(0.5, 0.5, 0.7)) == [10]


def test_infinite_figures_are_figures() -> None:
    assert _steps(keep_best("loss", 3), _there(math.inf, 1.0, -math.inf, math.nan)) == [0, 10, 20]


def test_without_steps_nothing_is_kept_every_so_many() -> None:
    there = [CheckpointFacts(key="a", created=1.0), CheckpointFacts(key="b", created=2.0)]
    assert leaving(keep_every(1), there) == there[:1]  # but for the newest


def _dated(*dates: tuple[str, float]) -> list[CheckpointFacts]:
    """Checkpoints of steps 0, 10, 20, …, by the writer and its date in hours."""
    return [
        CheckpointFacts(
            key=f"step-{number * 10}",
            created=hours * 3600,
            number=SaveNumber(1, number),
            step=number * 10,
            writer=writer,
        )
        for number, (writer, hours) in enumerate(dates)
    ]


_DAYS = _dated(("a", 1), ("a", 13), ("a", 25), ("a", 37), ("a", 48), ("a", 49))


@pytest.mark.parametrize(
    ("policy", "there", "steps"),
    [
        (keep_for("24h"), _DAYS, [30, 40, 50]),
        (keep_for(24 * 3600 + 1), _DAYS, [20, 30, 40, 50]),
        (keep_every("1d"), _DAYS, [0, 20, 40]),
        (any_of(keep_for("1h"), keep_every("1d")), _DAYS, [0, 20, 40, 50]),
        (any_of(keep_last(2), keep_for("1min")), _DAYS, [40, 50]),
        # b's clock is a year ahead of a's, or behind it: only b's hours count since then.
        (keep_for("24h"), _dated(("a", 1), ("a", 9), ("b", 9000), ("b", 9023)), [10, 20, 30]),
        (keep_for("24h"), _dated(("a", 9001), ("a", 9010), ("b", 1), ("b", 16)), [10, 20, 30]),
        (keep_for("24h"), _dated(("a", 1), ("b", 9000), ("a", 26)), [10, 20]),
        (keep_every("1d"), _dated(("a", 1), ("a", 2), ("b", 1), ("b", 2)), [0, 20]),
        (keep_for("1h"), _dated(("a", 9), ("a", 5)), [0, 10]),  # a's clock was set back
    ],
)
def test_dates_of_one_writer_count(
    policy: Retention, there: list[CheckpointFacts], steps: list[int]
) -> None:
    assert _steps(policy, there) == steps
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        (keep_last(3), 3),
        (keep_for("1h"), None),
        (keep_every("1h"), None),
        (keep_every(3), None),
        (any_of(keep_last(2), keep_best("loss", 2)), 4),
        (any_of(keep_last(2), keep_every(9)), None),
    ],
)
def test_how_many_stay_at_most(policy: Retention, most: int | None) -> None:
    assert policy.most == most


_candidates = st.lists(
    st.builds(
        CheckpointFacts,
        key=st.sampled_from("abcdefgh"),
        created=st.sampled_from([1.0, 2.0, 3.0]),
        step=st.none() | st.integers(0, 40),
        metrics=st.dictionaries(st.sampled_from(["loss", "score"]), st.floats()),
        writer=st.sampled_from("xy"),
    ),
    unique_by=lambda one: one.key,
)
_policies = st.recursive(
    st.builds(keep_last, st.integers(1, 4))
    | st.builds(keep_every, st.integers(1, 9) | st.sampled_from(["1s", "2s"]))
    | st.builds(keep_for, st.sampled_from(["1s", "1.5s", "9s"]))
    | st.builds(
        lambda metric, n, mode: keep_best(metric, n, mode=mode),
        st.sampled_from(["loss", "score"]),
        st.integers(1, 3),
        st.sampled_from(["min", "max"]),
    ),
    lambda one: st.lists(one, min_size=1, max_size=3).map(lambda some: any_of(*some)),
    max_leaves=4,
)


@given(_policies, _candidates, st.sets(st.sampled_from("abcdefgh")))
def test_the_newest_and_what_is_needed_never_leave(
    policy: Retention, there: list[CheckpointFacts], needed: set[str]
) -> None:
    gone = leaving(policy, there, needed)
    assert not {one.key for one in gone} & (needed | policy.chosen(there))
    if there:
        assert max(there, key=lambda one: (one.created, one.key)) not in gone
    if policy.most is not None:
        assert len(policy.chosen(there)) <= policy.most


@given(_policies, _candidates)
def test_what_stays_stays_when_the_rest_is_gone(
    policy: Retention, there: list[CheckpointFacts]
) -> None:
    gone = leaving(policy, there)
    left = [one for one in there if one not in gone]
    assert leaving(policy, left) == []


_histories = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 30)), max_size=30
)


@given(_histories, st.integers(1, 60), st.integers(-500, 500))
def test_nothing_leaves_before_its_time_whatever_clocks_show(
    saves: list[tuple[str, int, int]], hours: int, apart: int
) -> None:
    """Saves of two nodes in turn, some rejected: `apart` is how far their clocks differ."""
    now, there, real = 0, list[CheckpointFacts](), dict[str, int]()
    for number, (writer, rejected, passed) in enumerate(saves):
        now += passed
        key = f"step-{number}"
        real[key] = now
        shown = now + (apart if writer == "b" else 0)
        there.append(
            CheckpointFacts(
                key=key,
                created=shown * 3600.0,
                number=SaveNumber(1, number),
                writer=writer,
                rejected=rejected == 3,
            )
        )
        gone = leaving(any_of(keep_for(hours * 3600), keep_every("7d")), there)
        there = [one for one in there if one not in gone]
        assert all(now - real[one.key] >= hours for one in gone)
        days = {(one.writer, one.created // (7 * 86400)) for one in gone}
        assert days <= {(one.writer, one.created // (7 * 86400)) for one in there}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_on_one_node_nothing_stays_after_its_time(passed: list[int], hours: int) -> None:
    moments = list(itertools.accumulate(passed))
    there = _dated(*(("a", moment) for moment in moments))
    kept = [moment for moment in moments if moments[-1] - moment < hours]
    assert _steps(keep_for(hours * 3600), there) == [moments.index(moment) * 10 for moment in kept]


@given(st.lists(_policies, min_size=1, max_size=3), _candidates)
def test_the_order_of_policies_is_nothing(
    policies: list[Retention], there: list[CheckpointFacts]
) -> None:
    assert len({any_of(*some).chosen(there) for some in itertools.permutations(policies)}) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: keep_last(0),
        lambda: keep_last(True),
        lambda: keep_every(-1),
        lambda: keep_every("1 fortnight"),
        lambda: keep_for("0h"),
        lambda: keep_for(-1),
        lambda: keep_best("", 1),
        lambda: keep_best("loss", 0),
        lambda: keep_best("loss", mode="least"),  # type: ignore[arg-type]
        any_of,
        lambda: any_of("keep_last"),  # type: ignore[arg-type]
        lambda: retention(None, "keep_memory"),
        lambda: retention(0, "keep_memory"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"give|choose"):
        make()


def test_a_number_keeps_the_last() -> None:
    assert retention(3, "keep") == keep_last(3)
