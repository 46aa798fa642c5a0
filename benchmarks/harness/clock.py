"""How long things take, and which part of it is spent in a storage's methods."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WRITER_METHODS = (
    "reset",
    "storage_meta",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)
READER_METHODS = (
    "reset",
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prepared(prepare: Callable[[], object], measure: Callable[[], float]) -> Callable[[], float]:
    """Return a measure that prepares first; the preparation's time doesn't count."""

    def both() -> float:
        prepare()
        return measure()

    return both


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the seconds of a save or load went.

    Attributes:
        whole: The call.
        data: The storage's `write_data` or `read_data`.
        other: The storage's other methods. The rest is torch's: plans, collectives, results.
    """

    whole: float
    data: float
    other: float

    @property
    def planning(self) -> float:
        return self.whole - self.data - self.other


class Clock:
    """Counts seconds in methods of an object, the method that moves data separately."""

    def __init__(self, target: object, methods: Iterable[str], data_method: str) -> None:
        self._data_method = data_method
        self._seconds: dict[str, float] = {}
        for method in methods:
            setattr(target, method, self._timed(method, getattr(target, method)))

    def phases(self, whole: float) -> Phases:
        """Return the phases of a save or load that took `whole`, and start again."""
        data = self._seconds.pop(self._data_method, 0.0)
        other = sum(self._seconds.values())
        self._seconds.clear()
        return Phases(whole, data, other)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # DCP looks at the parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = method(*args, **kwargs)
            if name == self._data_method:
                answer.wait()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            return answer

        return call


def wholes(phases: Sequence[Phases]) -> Sample:
    return Sample(tuple(phase.whole for phase in phases))


def datas(phases: Sequence[Phases]) -> Sample:
    return Sample(tuple(phase.data for phase in phases))


def others(phases: Sequence[Phases]) -> Sample:
    return Sample(tuple(phase.other for phase in phases))
