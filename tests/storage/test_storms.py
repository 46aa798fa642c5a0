"""Storms run, a round or two of each kind, so that they don't rot; `python -m tests.storm` is them.

That of lost nodes is in `tests/nodes/test_storm.py`.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random

import pytest

from tests.storm.damages import Damages
from tests.storm.flushes import Flushes
from tests.storm.kills import Kills
from tests.storm.storm import Play, Storm, run
from tests.storm.writers import Writers
from tests.support.seeds import SEED
from tests.support.storage.servers import S3Server

_LIVES = int(os.environ.get("DCP_MEM_SOAK", "6"))


def _run(storm: Storm, kind: str, rounds: int, seed: int = 1) -> None:
    failures = run(storm, kind, seed=seed, start=0, rounds=rounds)
    assert not failures, "\n".join(failure.reason for failure in failures)


def test_a_storm_of_damages_runs() -> None:
    _run(Damages(Counter()), "damages", 1)


@pytest.mark.random
@pytest.mark.timeout(600)
def test_a_job_that_is_killed_life_after_life_never_loses_or_mixes_a_checkpoint() -> None:
    """The moment at which a signal arrives doesn't follow from the seed."""
    _run(Kills(Counter()), "kills", _LIVES, seed=SEED)


@pytest.mark.variant
def test_a_storm_of_writers_runs() -> None:
    storm = Writers(Counter())
    storm.wanted = {}
    _run(storm, "writers", 1)


@pytest.mark.variant
def test_a_storm_of_flushes_runs(moto: S3Server) -> None:
    def running() -> AbstractContextManager[S3Server]:
        return nullcontext(moto)

    storm = Flushes(Counter())
    storm.wanted = {"moto": running}
    _run(storm, "flushes", 1)
    assert storm.tally["saves"]


def test_a_failing_round_says_how_it_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    failures = run(_Failing(Counter()), "failing", seed=7, start=5, rounds=3)
    assert [one.number for one in failures] == [4, 6]
    assert failures[1].replay == "python -m tests.storm failing --seed 7 --start 6 --rounds 1"
    said = capsys.readouterr().out
    assert "FAILED round 4; replay with" in said
    assert "what the round has said\n" in said
    assert "failing: 2 rounds in 0 s, seed 7, 2 failures" in said


class _Failing(Storm):
    """Each series of two rounds fails in its first one."""

    rounds_in_series = 2

    @contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """Nothing."""
        yield self._play

    def _play(self, chance: Random) -> str:
        print("what the round has said")
        raise AssertionError
