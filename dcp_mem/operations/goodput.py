"""The effective training time ratio of a job, from its saves and loads: arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def lost_seconds(saves: Iterable[Span], resumes: Iterable[Span]) -> float:
    """Return the seconds in which no training was done whose result is kept.

    Each span is (begin, end): of a save, while it held training up; of a resume, from the save of
    the checkpoint that was loaded to the end of the load. Spans that overlap count once.
    """
    lost, until = 0.0, float("-inf")
    for begin, end in sorted([*saves, *resumes]):
        lost += max(0.0, end - max(begin, until))
        until = max(until, end)
    return lost


def goodput(lost: float, seconds: float) -> float:
    """Return the share of a job's seconds that weren't lost; 0.0 where nothing is known."""
    return max(0.0, 1 - lost / seconds) if seconds > 0 else 0.0
