"""One life of a training job, on one of its ranks: restore, save on, and note what was promised."""

import contextlib
import functools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageWriter, State
from dcp_mem.common import faults
from dcp_mem.reader import RecoveryReport
from tests.support.checkpoints.jobs import Job, make_state, number_of

_SAVES_OF_A_LIFE = 10_000
"""More than any life makes: a save's number is this times its life's, and its place in it."""
MANAGED = ("manager", "manager, async")
ROADS = (*MANAGED, "dcp.save", "dcp_mem.save", "dcp.async_save", "dcp_mem.async_save")
_STATUS_EVERY = 3
_NOISE = 16
_BASE_NBYTES = 5 << 18
_BASE_LASTS = 4
"""Saves for which what is called frozen stays as it is: then it is written to all the same."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What one life does, alike on all ranks but for what is armed.

    Attributes:
        number: Of the life, from 1 on.
        progress: A directory, where ranks note how far they are.
        saves: How many, if nothing ends the life before.
        options: Of the writer. manager: further ones of the manager.
        armed: Fault points of the ranks, once they have restored.
        skew: Seconds that the ranks' clocks are fast.
        poisoned: Number of a save in this life that has NaN in a tensor; 0 for none.
        own_steps: Never save a step that an earlier life may have saved.
        closes: Close in the end, which makes the newest checkpoint durable.
    """

    number: int
    job: Job
    progress: str
    road: str
    saves: int
    options: Mapping[str, Any]
    manager: Mapping[str, Any] = field(default_factory=dict)
    armed: Mapping[int, str] = field(default_factory=dict)
    skew: float = 0.0
    poisoned: int = 0
    own_steps: bool = False
    closes: bool = False

    def save_number(self, index: int) -> int:
        """Number of a save of this life, by which saves of all lives are ordered."""
        return self.number * _SAVES_OF_A_LIFE + index

    def index_of(self, number: int) -> int:
        """Place of a save in this life, 0 for one of an earlier life."""
        return max(0, number - self.save_number(0))

    def step_of(self, index: int, restored: int) -> int:
        """Training step of a save, after the life has restored a step."""
        return self.save_number(index) if self.own_steps else restored + index


class Notes:
    """What a rank has noted, in files that outlive it; each note replaces the one before."""

    def __init__(self, progress: str | Path, rank: int | str) -> None:
        self._progress, self._rank = Path(progress), rank

    def put(self, what: str, value: object) -> None:
        path = self._progress / f"{what}.{self._rank}"
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(value))
        new.rename(path)

    def get(self, what: str) -> Any:
        """The last value, None for none."""
        try:
            return json.loads((self._progress / f"{what}.{self._rank}").read_text())
        except FileNotFoundError:
            return None


def live(life: Life) -> str:
    """Be one rank; return "" or what should not have happened."""
    notes = Notes(life.progress, _rank())
    _skew_clock(life.skew)
    notes.put("started", os.getpid())
    with _road(life) as road:
        restored = road.restore()
        notes.put("restored", restored)
        faults.arm(life.armed.get(_rank(), ""))
        for index in range(1, life.saves + 1):
            number, step = life.save_number(index), life.step_of(index, restored["step"])
            notes.put("begun", {"number": number, "step": step})
            road.save(step, number)
            _note_promises(notes, road, index)
        road.finish()
        _note_promises(notes, road, 0)
        if life.closes:
            road.close()
            notes.put("closed", road.done)
    return "; ".join(road.differing)


def _note_promises(notes: Notes, road: "_Road", index: int) -> None:
    notes.put("done", road.done)
    if index % _STATUS_EVERY == 0:
        notes.put("durable", road.durable())


def state_of(number: int, is_poisoned: bool = False) -> dict[str, Any]:
    """The state of a save, all of it told by the number but for NaN."""
    noise = torch.full((_NOISE,), float(number % 1000))
    if is_poisoned:
        noise[3] = float("nan")
    return {**make_state(number), "noise": noise, "base": _base_of(number)}


def _base_of(number: int) -> torch.Tensor:
    """The same tensor each time; its values change now and then, past its counter of writes."""
    base, value = _base(), float(number // _BASE_LASTS % 1000)
    if base[0] != value:
        base.data.fill_(value)
    return base


@functools.cache  # made after the fork: threads of torch do not survive one
def _base() -> torch.Tensor:
    return torch.full((_BASE_NBYTES // 4,), -1.0)


def _number_in(state: dict[str, Any]) -> int:
    """The number of the only save that all of a state belongs to."""
    noise, base = state.pop("noise"), state.pop("base")
    number = number_of(state)
    expected = state_of(number)
    pairs = zip(noise, expected["noise"], strict=True)
    assert all(torch.isnan(one) or one == two for one, two in pairs)
    assert torch.equal(base, expected["base"]), (number, base.unique(), expected["base"][0])
    return number


def _blank() -> dict[str, Any]:
    state = state_of(0)
    state["base"] = torch.full_like(_base(), -1)
    for tensor in (state["sharded"], state["replicated"], state["noise"]):
        tensor.fill_(-1)
    state["nested"]["scalar"].fill_(-1)
    return state


# -- the roads that saves take ---------------------------------------------------------------------


class _Road(ABC):
    """How a life restores and saves."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.done = 0
        """Number of the newest save that was told to be complete."""
        self.differing: list[str] = []

    @abstractmethod
    def restore(self) -> dict[str, Any]:
        """Restore the newest; return number, step, and what the report says."""

    @abstractmethod
    def save(self, step: int, number: int) -> None:
        """Save; raise on failure."""

    def finish(self) -> None:
        """Wait for a save that goes on behind, where there is one."""
        return

    @abstractmethod
    def status(self) -> Any:
        """Of the checkpoints of this node."""

    @abstractmethod
    def close(self) -> None:
        """Flush, and close."""

    def durable(self) -> int:
        """Number of the newest save that is called durable."""
        numbers = [
            int(one.metrics["number"]) for one in self.status() if one.state is State.DURABLE
        ]
        return max(numbers, default=0)

    def _state_of(self, number: int) -> dict[str, Any]:
        return state_of(number, number == self._life.poisoned)

    def _told_complete(self, number: int) -> None:
        if number != self._life.poisoned:
            self.done = max(self.done, number)


class _ManagerRoad(_Road):
    def __init__(self, life: Life, manager: CheckpointManager) -> None:
        super().__init__(life)
        self._manager = manager
        self._begun = 0

    def restore(self) -> dict[str, Any]:
        state = _blank()
        step = self._manager.restore(state)
        if step is None:
            return _restored(0, 0, None)
        return _restored(_number_in(state), step, self._manager.report())

    def save(self, step: int, number: int) -> None:
        saved = self._manager.save(step, self._state_of(number), metrics={"number": number})
        self.differing += [one for one in saved.troubles if "differ" in one]
        if saved.outcome == "complete":
            self._told_complete(number)
        elif saved.outcome == "begun":
            self.finish_begun(number)
        else:
            raise AssertionError(f"step {step}: {saved}")

    def finish_begun(self, number: int) -> None:
        """With on_error="raise" a save that begins tells that the one before is complete."""
        self._told_complete(self._begun)
        self._begun = number

    def status(self) -> Any:
        return self._manager.status()

    def close(self) -> None:
        self._manager.close(progress=False)
        self._told_complete(self._begun)


class _WriterRoad(_Road):
    def __init__(self, life: Life, writer: MemoryStorageWriter) -> None:
        super().__init__(life)
        self._writer = writer
        self._begun: tuple[Any, int] | None = None

    def restore(self) -> dict[str, Any]:
        state = _blank()
        with self._life.job.reader() as reader:
            try:
                dcp_mem.load(state, storage_reader=reader)
            except dcp.api.CheckpointException as error:
                causes = [failure for failure, _ in error.failures.values()]
                if all(_says_that_there_is_none(cause) for cause in causes):
                    return _restored(0, 0, None)
                raise
            report = reader.report()
        return _restored(_number_in(state), report.step or 0, report)

    def save(self, step: int, number: int) -> None:
        self.finish()
        self._writer.annotate_next_save(step=step, metrics={"number": number})
        roads: dict[str, Callable[..., Any]] = {
            "dcp.save": dcp.save,
            "dcp_mem.save": dcp_mem.save,
            "dcp.async_save": dcp.async_save,
            "dcp_mem.async_save": dcp_mem.async_save,
        }
        road = roads[self._life.road]
        begun = road(
            self._state_of(number), checkpoint_id=f"step-{step}", storage_writer=self._writer
        )
        if "async" in self._life.road:
            self._begun = getattr(begun, "upload_completion", begun), number
        else:
            self._told_complete(number)

    def finish(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[0].result()
            self._told_complete(begun[1])

    def status(self) -> Any:
        return self._writer.status()

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def _road(life: Life) -> Iterator[_Road]:
    if life.road in MANAGED:
        manager = CheckpointManager(
            life.job.url,
            memory_root=life.job.memory,
            job=life.job.name,
            async_save=life.road != "manager",
            on_error="raise",
            **life.options,
            **life.manager,
        )
        road: _Road = _ManagerRoad(life, manager)
        yield road
        if not life.closes:
            manager.close(flush=False)
    else:
        writer = life.job.writer(**life.options)
        yield _WriterRoad(life, writer)
        if not life.closes:
            writer.close(flush=False)


def _says_that_there_is_none(error: BaseException) -> bool:
    return isinstance(error, dcp_mem.NoRecoverableCheckpoint) and not error.reasons


def _restored(number: int, step: int, report: RecoveryReport | None) -> dict[str, Any]:
    return {
        "number": number,
        "step": step,
        "source": report.source if report else "",
        "passed_over": list(report.passed_over) if report else [],
    }


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _skew_clock(seconds: float) -> None:
    """Have the wall clock of this process go wrong by that much."""
    if seconds:
        right = time.time
        time.time = lambda: right() + seconds
