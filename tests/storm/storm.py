"""What a storm is: rounds that follow from a seed, a count of what happened, replayed failures."""

import contextlib
import io
import shutil
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from torch.distributed.checkpoint.api import CheckpointException

_SAID_SECONDS = 20.0
_OUTPUT_CHARACTERS = 20_000

Tally = Counter[str]
"""What happened, and how often."""

Play = Callable[[Random], str]
"""Plays one round by its chance; returns what it was about, for people."""


class Storm(ABC):
    """One kind of storm.

    Rounds are played in series: rounds of one series may depend on those before them, and a round
    that fails ends its series.

    Args:
        tally: Counts what happens.
        kept: Where `keep` copies what a failed round has left; None copies nothing.
    """

    rounds_in_series = 1

    def __init__(self, tally: Tally, kept: Path | None = None) -> None:
        self.tally = tally
        self._kept = kept

    @abstractmethod
    def series(self, chance: Random) -> AbstractContextManager[Play]:
        """Prepare what the rounds of a series share; what ends it may fail as a round does."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Prepare what all series share, such as a server."""
        yield

    @contextlib.contextmanager
    def keeping(self, *directories: Path) -> Iterator[None]:
        """Copy these, where asked to, if what follows fails."""
        try:
            yield
        except BaseException:
            for number, directory in enumerate(directories):
                if self._kept is not None and directory.exists():
                    place = self._kept / f"{time.time():.0f}-{number}-{directory.name}"
                    shutil.copytree(
                        directory,
                        place,
                        symlinks=True,
                        ignore_dangling_symlinks=True,
                        ignore=shutil.ignore_patterns("socket"),
                    )
                    print(f"  kept: {place}")
            raise


@dataclass(frozen=True)
class Failure:
    """A round that failed, and the arguments that replay it."""

    number: int
    replay: str
    reason: str = field(repr=False)


def run(
    storm: Storm,
    kind: str,
    *,
    seed: int,
    start: int,
    rounds: int,
    seconds: float = float("inf"),
    is_loud: bool = False,
) -> list[Failure]:
    """Play rounds, and say how it goes.

    Args:
        storm: Of that kind.
        kind: Name of the kind.
        seed: Together with a round's number it fixes what is tried in that round.
        start: Number of the first round; a series is played from its beginning.
        rounds: How many.
        seconds: After which no further series is begun.
        is_loud: Show what the processes of each round say, not only of those that fail.

    Returns:
        The rounds that failed.
    """
    size = storm.rounds_in_series
    first, stop = start - start % size, start + rounds
    said = started = time.monotonic()
    failures: list[Failure] = []
    played = 0
    with storm.running():
        for begin in range(first, stop, size):
            if time.monotonic() - started > seconds:
                break
            number, about, output = begin, "", io.StringIO()
            try:
                with (
                    contextlib.redirect_stdout(sys.stdout if is_loud else output),
                    storm.series(Random(f"{kind} {seed} series {begin // size}")) as play,
                ):
                    for number in range(begin, min(begin + size, stop)):
                        played += 1
                        output.seek(0)
                        output.truncate()
                        about = play(Random(f"{kind} {seed} round {number}"))
                        if time.monotonic() - said > _SAID_SECONDS:
                            said = time.monotonic()
                            _say_progress(played, stop - first, said - started, failures, about)
            except (Exception, CheckpointException):
                arguments = f"--seed {seed} --start {begin} --rounds {number - begin + 1}"
                replay = f"python -m tests.storm {kind} {arguments}"
                said_by_round = output.getvalue()[-_OUTPUT_CHARACTERS:]
                reason = f"{said_by_round}\n{traceback.format_exc()}"
                failures.append(Failure(number, replay, reason))
                _say_failure(failures[-1])
    _say_summary(kind, seed, played, time.monotonic() - started, storm.tally, failures)
    return failures


def _say_progress(
    played: int, rounds: int, seconds: float, failures: list[Failure], about: str
) -> None:
    print(
        f"{played}/{rounds} rounds, {seconds:.0f} s, {len(failures)} failed; last: {about}",
        file=sys.__stdout__,
        flush=True,
    )


def _say_failure(failure: Failure) -> None:
    print(f"FAILED round {failure.number}; replay with\n  {failure.replay}\n{failure.reason}")
    print("-" * 80, flush=True)


def _say_summary(
    kind: str,
    seed: int,
    played: int,
    seconds: float,
    tally: Tally,
    failures: list[Failure],
) -> None:
    print(f"\n{kind}: {played} rounds in {seconds:.0f} s, seed {seed}, {len(failures)} failures")
    width = max(map(len, tally), default=0)
    for what, count in sorted(tally.items()):
        print(f"  {what:<{width}}  {count}")
    for failure in failures:
        print(f"  round {failure.number} failed: {failure.replay}")
    print(flush=True)
