"""The replay behind docs/failures.md: its arithmetic, on cases that a reader can check."""

import re

import pytest

from benchmarks.cases.scaling import failures, model
from benchmarks.cases.scaling.failures import Failure, Kind, Spent, Strategy, Tier
from dcp_mem import advice
from tests.support import REPOSITORY

HOUR = 3600.0
MEMORY = Tier(interval=90.0, lag=5.0, load={Kind.PROCESS: 1.0, Kind.NODE: 2.0})
STORAGE = Tier(interval=270.0, lag=40.0, load={Kind.PAIR: 30.0})
SAVES = Strategy(name="saves", blocks=10.0, tiers=(MEMORY, STORAGE))


def _replayed(*ends: Failure, seconds: float = 1000.0, restart: float = 0.0) -> Spent:
    return failures.replay(ends, SAVES, seconds, restart)


def test_without_failures_only_saves_cost() -> None:
    assert _replayed() == Spent(useful=900.0, saving=100.0)


def test_work_since_the_last_usable_checkpoint_is_done_again() -> None:
    assert _replayed(Failure(250.0, Kind.NODE), seconds=252.0) == Spent(
        useful=180.0, saving=20.0, rework=50.0, recovery=2.0
    )


def test_a_checkpoint_whose_copies_are_still_under_way_is_not_loaded() -> None:
    assert _replayed(Failure(203.0, Kind.NODE), seconds=205.0).rework == 103.0
    assert _replayed(Failure(205.0, Kind.NODE), seconds=207.0).rework == 5.0


def test_a_lost_pair_of_nodes_goes_back_to_storage() -> None:
    assert _replayed(Failure(650.0, Kind.PAIR), seconds=680.0) == Spent(
        useful=540.0, saving=60.0, rework=50.0, recovery=30.0
    )
    assert _replayed(Failure(630.0, Kind.PAIR), seconds=660.0).rework == 330.0


def test_a_failure_in_a_recovery_begins_it_anew() -> None:
    spent = _replayed(
        Failure(100.0, Kind.NODE), Failure(110.0, Kind.NODE), seconds=172.0, restart=60.0
    )
    assert spent.recovery == 72.0
    assert spent.total == 172.0


@pytest.mark.parametrize("seconds", [101.0, 500.0, 1000.0, 12345.0])
def test_every_second_is_spent_on_one_thing(seconds: float) -> None:
    drawn = failures.drawn(150.0, seconds, 1)
    assert _replayed(*drawn, seconds=seconds, restart=20.0).total == pytest.approx(seconds)


def test_a_seed_draws_the_same_failures_with_the_published_mean() -> None:
    drawn = failures.drawn(100.0, 1e6, 5)
    assert drawn == failures.drawn(100.0, 1e6, 5) != failures.drawn(100.0, 1e6, 6)
    assert len(drawn) == pytest.approx(10_000, rel=0.03)
    bursts = failures.drawn(100.0, 1e6, 5, shape=0.7)
    assert len(bursts) == pytest.approx(10_000, rel=0.05)
    kinds = [failure.kind for failure in drawn]
    assert kinds.count(Kind.PROCESS) / len(kinds) == pytest.approx(0.22, abs=0.02)
    assert kinds.count(Kind.PAIR) / len(kinds) == pytest.approx(0.01, abs=0.004)


def test_a_replay_costs_what_advice_expects() -> None:
    """Of one save's interval, by Daly, with failures that are independent of each other."""
    told = advice(10.0, 2 * HOUR, recovery_seconds=30.0)
    every = Tier(interval=told.interval_seconds, lag=0.0, load=dict.fromkeys(Kind, 30.0))
    strategy = Strategy(name="", blocks=10.0, tiers=(every,))
    seconds = 5000 * HOUR
    spent = failures.replay(failures.drawn(2 * HOUR, seconds, 7), strategy, seconds, 0.0)
    assert 1 - spent.ratio == pytest.approx(told.overhead, rel=0.08)


def test_the_page_shows_what_the_replay_finds() -> None:
    page = (REPOSITORY / "docs" / "failures.md").read_text()
    rate, fast = failures.RATES[0], next(iter(failures.STORAGE.values()))
    ways = failures.strategies(rate.cluster, rate.mtbf, fast)
    figures = [f"{100 * failures.spent(rate, way).ratio:.2f} %" for way in ways]
    rows = re.findall(r"^\| Llama 3, 16,384 GPUs \| fast \| (.*) \|$", page, re.MULTILINE)
    assert rows[0].split(" | ") == figures
    assert float(figures[-1].split()[0]) >= 99.0


def test_ours_is_charged_for_its_decisions_and_plans() -> None:
    """Peers' planning is left out, in their favour."""
    small, large = (
        failures.ours(model.Cluster(gpus, gpus * 1e8), HOUR, 1e9) for gpus in (1024, 16384)
    )
    assert large.blocks > small.blocks + 0.03
    assert large.tiers[0].load[Kind.PROCESS] > 1.0
