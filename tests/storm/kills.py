"""Kills: lives of a job of one to three ranks, each ended at random, all options switched on.

Asserted after each life: what is restored is no older than the newest save that was told to be
complete or, where the node's memory was lost, the newest that was told to be durable; it is one
save's state, whole; nobody hangs; nothing fails unless somebody was killed; a SIGTERM that the
manager awaits leaves the newest save durable; every `.metadata` on storage is whole. An older
checkpoint is restored only out of a crash loop.
"""

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import dcp_mem
from tests.storm.endings import End, Ending, chosen_ending, kill_agents
from tests.storm.lives import MANAGED, ROADS, Life, live
from tests.storm.promises import Promises
from tests.storm.storm import Play, Storm, Tally
from tests.support.checkpoints.jobs import Job, load_as_torch
from tests.support.private import private_directory
from tests.support.processes.forks import RankDeath, forked, forking
from tests.support.storage.soundness import committed

_SAVES = 40
_FEW_SAVES = 8
_ENDED_SECONDS = 90.0
_LOOKS = 5
_STOCK_LOADS = 4
_HOUR = 3600.0
_KILLERS = (signal.SIGKILL, signal.SIGTERM)


class Kills(Storm):
    """Each series is a job; each round one life of it."""

    rounds_in_series = 20

    @contextlib.contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """A job with storage, or with memory alone."""
        with private_directory("storm") as directory:
            for name in ("memory", "notes"):
                (directory / name).mkdir(mode=0o700)
            url = str(directory / "storage") if chance.random() < 0.9 else None
            job = _Lives(Job(url, str(directory / "memory")), directory / "notes", self.tally)
            with self.keeping(directory):
                yield job.play
                job.end(chance)


class _Lives:
    """The lives of one job, and what it was promised so far."""

    def __init__(self, job: Job, notes: Path, tally: Tally) -> None:
        self._job, self._notes, self._tally = job, notes, tally
        self._promises = Promises()
        self._count = 0

    def play(self, chance: Random) -> str:
        """One life, its end, and what is left of it."""
        ranks = chance.choice([1, 2, 2, 2, 2, 2, 3])
        ending = chosen_ending(chance, ranks, has_storage=self._job.url is not None)
        about = self._live(chance, ranks, ending)
        if chance.random() < (0.02 if self._job.url is None else 0.1):
            self._lose_memory()
        if chance.random() < 0.4:
            self._look_at_storage()
        return about

    def end(self, chance: Random) -> None:
        """One more life, which closes; then load what is on storage with torch's own reader."""
        self._live(chance, 1, Ending(End.CLOSED, 0, 0.0, 0, {}))
        stored = self._look_at_storage()
        for name in sorted(stored)[-_STOCK_LOADS:]:
            number = forked(load_as_torch, Path(str(self._job.url), name))
            assert number in self._promises.numbers_of(name), (name, number)
            self._tally["loads by torch's own reader"] += 1

    def _live(self, chance: Random, ranks: int, ending: Ending) -> str:
        self._count += 1
        life = self._chosen_life(chance, ending)
        about = f"life {self._count}: {ranks} ranks, {life.road}, {ending}"
        print(f"{about}\n{life}\n{ending!r}\n{self._promises}")
        environment = {
            "DCP_MEM_TIMEOUT": "10",
            "DCP_MEM_FAULTS": ending.agent_armed,
            "TORCHELASTIC_RUN_ID": f"life{self._count}",
        }
        with forking(live, ranks if ranks > 1 else None, life, env=environment) as running:
            preempted = ending.play(life, running, ranks)
            ends = running.ended(_ENDED_SECONDS)
        self._judge_ends(ends)
        self._tally += self._promises.take_in(life, ranks)
        if all(isinstance(end, RankDeath) and end.signal is signal.SIGTERM for end in ends):
            self._promises.durable = max(self._promises.durable, preempted)
        self._tally[f"lives: {ending.how.value}"] += 1
        self._tally[f"lives by {life.road}"] += 1
        return f"{about}; restored {self._promises.resumed[-1]}"

    def _judge_ends(self, ends: Sequence[str | RankDeath]) -> None:
        """Ranks are killed, or end by themselves since another one was killed."""
        dead = [end for end in ends if isinstance(end, RankDeath)]
        for end in dead:
            assert end.signal in _KILLERS or any(one.signal in _KILLERS for one in dead), end
            how = "failed since another was killed" if end.signal is None else end.signal.name
            self._tally[f"ranks: {how}"] += 1
        differing = [end for end in ends if isinstance(end, str) and end]
        assert not differing, differing

    def _lose_memory(self) -> None:
        kill_agents(self._job.memory)
        shutil.rmtree(self._job.directory, ignore_errors=True)
        self._promises.lose_memory()
        self._tally["node's memory lost"] += 1

    def _look_at_storage(self) -> Mapping[str, object]:
        """What is committed, all of it whole; an agent may be at work meanwhile."""
        if self._job.url is None or not Path(self._job.url).exists():
            return {}
        for look in range(_LOOKS):
            with contextlib.suppress(AssertionError, dcp_mem.DcpMemError):
                return committed(self._job.url, {})
            time.sleep(0.1 * look)
        return committed(self._job.url, {})

    # -- what is chosen ----------------------------------------------------------------------------

    def _chosen_life(self, chance: Random, ending: Ending) -> Life:
        road = chance.choice(MANAGED if ending.how is End.TERMINATED else ROADS)
        overwrite = chance.random() < 0.8
        saves = chance.randrange(2, _FEW_SAVES) if ending.how is End.CLOSED else _SAVES
        options = self._chosen_options(chance, ending)
        life = Life(
            number=self._count,
            job=self._job,
            progress=str(self._notes / str(self._count)),
            road=road,
            saves=saves,
            options={**options, "overwrite": overwrite},
            manager=self._chosen_manager(chance, ending) if road in MANAGED else {},
            armed=ending.armed,
            skew=chance.choice([0.0, 0.0, _HOUR, -_HOUR, 5.0]),
            own_steps=not overwrite,
            closes=ending.how is End.CLOSED,
        )
        Path(life.progress).mkdir()
        return _poisoned(life) if saves > 2 and chance.random() < 0.3 else life

    def _chosen_options(self, chance: Random, ending: Ending) -> dict[str, Any]:
        options: dict[str, Any] = {
            "keep_memory": chance.choice([1, 2, 2, 3]),
            "on_nonfinite": chance.choice(["ignore", "warn", "reject", "reject"]),
            "replicas": chance.choice([0, 1]),
            "frozen": chance.choice([None, "base"]),
            "agent": chance.choice(["process", "process", "thread"]),
            "on_slow_storage": chance.choice(["newest", "all"]),
        }
        if ending.how is End.AGENT_POINT:  # each agent is killed there: "all" would wait for ever
            options.update(agent="process", on_slow_storage="newest")
        if self._job.url is not None:
            seldom = [dcp_mem.every_n_saves(3), dcp_mem.every_seconds(0.1)]
            options["persist"] = chance.choice([True, True, *seldom])
            some = dcp_mem.any_of(dcp_mem.keep_last(2), dcp_mem.keep_every(10))
            options["keep_storage"] = chance.choice([None, None, 1, 2, some])
        return options

    def _chosen_manager(self, chance: Random, ending: Ending) -> dict[str, Any]:
        return {
            "on_crash_loop": chance.choice(["ignore", "warn", "fall_back", "fall_back"]),
            "crash_loop_steps": chance.choice([2, 5]),
            "compare_replicas": chance.choice([None, 2]),
            "preemption": "SIGTERM" if ending.how is End.TERMINATED else (),
        }


def _poisoned(life: Life) -> Life:
    """The life with NaN in its second save, if that is then rejected and takes no good one along.

    What is evicted before a newer checkpoint turns out to be bad is gone.
    """
    options = life.options
    is_safe = options["keep_memory"] > 1 and options.get("keep_storage") is None
    if options["on_nonfinite"] != "reject" or not is_safe:
        return life
    return replace(life, poisoned=life.save_number(2))
