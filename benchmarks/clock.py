"""How long things take, and which part of that is whose."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.samples import Sample

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
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the seconds of a save or load went.

    `data` is the storage's `write_data` or `read_data`, `other` the rest of its methods; what
    remains of `whole` is torch's: plans, collectives, results.
    """

    whole: float
    data: float
    other: float

    @property
    def planning(self) -> float:
        return self.whole - self.data - self.other


class Clock:
    """Seconds spent in methods of an object, those that move data apart from the others."""

    def __init__(self, target: object, methods: Iterable[str], data_method: str) -> None:
        self._data_method = data_method
        self._seconds: dict[str, float] = {}
        for method in methods:
            setattr(target, method, self._timed(method, getattr(target, method)))

    def phases(self, whole: float) -> Phases:
        """What was spent since the last call, `whole` being all of it."""
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
