"""Writers: two to four runs at one root, each with a memory of its own, killed and stopped.

They save the same names. Asserted: every `.metadata` is whole, and is loaded whole; what a run has
called durable is there, unless a newer save has taken its name; the run with the newest generation,
if it lives, gets all that it saves to storage.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from dcp_mem import FlushFailed
from dcp_mem.common import faults
from dcp_mem.flushing.ownership import DIRECTORY as CLAIMS
from dcp_mem.memory.job import JobMemory
from dcp_mem.storage.routes import open_storage
from tests.storm import servers
from tests.storm.storm import Play, Storm, Tally
from tests.support.checkpoints.jobs import Job, agents, load_anew, save
from tests.support.private import private_directory
from tests.support.processes.forks import Forks, RankDeath, forking
from tests.support.storage.servers import StorageRoot
from tests.support.storage.soundness import (
    FLUSHER_POINTS,
    assert_kept,
    claims_of,
    committed,
    is_taken,
    note,
    noted,
)

_SAVES = 4
_SHARE_OF_SERVERS = 0.3
_ENDED_SECONDS = 90.0
_LONGEST_STOP = 0.4
_PAUSE = 0.2


@dataclass(frozen=True)
class Run:
    """One run: how it saves."""

    job: Job
    number: int
    agent: str
    keep: int | None
    waits: bool
    notes: Path
    armed: str
    """A fault point at which its flusher is stopped or killed."""


def _save(run: Run) -> str:
    """Save the same names as all runs; return "" or why storage refused them."""
    faults.arm(run.armed if run.agent == "thread" else "")
    writer = run.job.writer(agent=run.agent, keep_storage=run.keep, keep_memory=2)
    refused = ""
    for step in range(1, _SAVES + 1):
        save(writer, 10 * step + run.number, f"step-{step}")
        # The first agent alone is armed: else each one after it would be killed at the same point.
        os.environ.pop("DCP_MEM_FAULTS", None)
        if run.waits:
            try:
                writer.wait(f"step-{step}", timeout=_ENDED_SECONDS)
            except FlushFailed as error:
                refused = str(error)
        note(claims_of(writer), run.notes)
    try:
        writer.close()
    except FlushFailed as error:
        refused = str(error)
    note(claims_of(writer), run.notes)
    return refused


class Writers(Storm):
    """Each round has a root of its own."""

    def __init__(self, tally: Tally, kept: Path | None = None) -> None:
        super().__init__(tally, kept)
        self.wanted: Mapping[str, servers.Running] = servers.ALL
        """The servers to start; those that can't be had are done without."""
        self._servers: dict[str, servers.AnyServer] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The servers for all rounds."""
        with servers.started(self.wanted) as self._servers:
            yield

    @contextlib.contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """Nothing is shared by rounds."""
        yield self._play

    def _play(self, chance: Random) -> str:
        where = servers.chosen(self._servers, _SHARE_OF_SERVERS, chance)
        with (
            servers.fresh_root(self._servers, where) as root,
            private_directory("storm") as memory,  # its end kills agents, which write to the root
            self.keeping(memory, Path(root.url).parent),
        ):
            meeting = _Meeting(self, root, memory, chance)
            meeting.play()
        self.tally[f"rounds on {where}"] += 1
        return f"{where}, {len(meeting.runs)} runs"


class _Meeting:
    """One round."""

    def __init__(self, storm: Storm, root: StorageRoot, memory: Path, chance: Random) -> None:
        self._tally, self._root, self._memory, self._chance = storm.tally, root, memory, chance
        count = chance.choice([2, 2, 3, 4])
        agent = chance.choice(["thread", "thread", "process"])
        self.runs = [
            Run(
                job=self._job(number),
                number=number,
                agent=agent,
                keep=chance.choice([None, None, 2]),
                waits=chance.random() < 0.5,
                notes=memory / f"notes{number}",
                armed=_chosen_point(chance) if chance.random() < 0.4 else "",
            )
            for number in range(count)
        ]

    def _job(self, number: int) -> Job:
        return Job(self._root.url, str(self._memory / f"node{number}"), self._root.storage_options)

    def play(self) -> None:
        with contextlib.ExitStack() as stack:
            lives = []
            for run in self.runs:
                environment = {"DCP_MEM_FAULTS": run.armed}
                lives.append(stack.enter_context(forking(_save, None, run, env=environment)))
                time.sleep(self._chance.choice([0.0, 0.05, 0.2]))
            self._interfere(lives)
            self._let_all_end(lives)
            ends = [one.ended(_ENDED_SECONDS)[0] for one in lives]
            for end in ends:
                self._count_end(end)
            if self._chance.random() < 0.3:
                self._tally["runs that came back"] += 1
                number = self._chance.randrange(len(lives))
                again = replace(self.runs[number], armed="")
                lives[number] = stack.enter_context(forking(_save, None, again))
                self._let_all_end(lives)
                ends[number] = lives[number].ended(_ENDED_SECONDS)[0]
                self._count_end(ends[number])
            self._let_agents_end(lives)
        self._assert_sound(ends)

    def _interfere(self, lives: list[Forks[str]]) -> None:
        """Stop and kill runs, with their agents."""
        for _ in range(self._chance.randrange(1, 5)):
            time.sleep(self._chance.uniform(0.0, _LONGEST_STOP))
            number = self._chance.randrange(len(lives))
            act = self._chance.choice(["stopped", "stopped", "stopped", "killed"])
            self._tally[f"runs {act}"] += 1
            if act == "stopped":
                self._signal(lives, number, signal.SIGSTOP)
                time.sleep(self._chance.uniform(0.0, _LONGEST_STOP))
                if self._chance.random() < 0.5:
                    self._signal(lives, number, signal.SIGCONT)
            else:
                self._signal(lives, number, signal.SIGKILL)

    def _let_all_end(self, lives: list[Forks[str]]) -> None:
        """Have all go on, also from fault points that they come to later."""
        self._have_go_on(lives, lambda: any(one.is_running(0) for one in lives))

    def _let_agents_end(self, lives: list[Forks[str]]) -> None:
        """Have agents flush what runs have left: as long as they live, retention deletes."""
        self._have_go_on(lives, self._any_agent)
        assert not self._any_agent(), "an agent doesn't end"

    def _any_agent(self) -> bool:
        return any(agents(run.job.memory) for run in self.runs)

    def _have_go_on(self, lives: list[Forks[str]], is_busy: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _ENDED_SECONDS
        while is_busy() and time.monotonic() < deadline:
            for number in range(len(lives)):
                self._signal(lives, number, signal.SIGCONT)
            time.sleep(_PAUSE)

    def _signal(self, lives: list[Forks[str]], number: int, one: signal.Signals) -> None:
        """Send a signal to a run, to its agent, or to both."""
        flushers = agents(self.runs[number].job.memory) if self._has_agents else []
        if not flushers or one is signal.SIGCONT or self._chance.random() < 0.6:
            lives[number].send(0, one)
        for agent in flushers:
            with suppress(ProcessLookupError):
                os.kill(agent.pid, one)

    @property
    def _has_agents(self) -> bool:
        return self.runs[0].agent == "process"

    def _count_end(self, end: "str | RankDeath") -> None:
        if isinstance(end, RankDeath):
            assert end.signal is signal.SIGKILL, end
            return
        self._tally["saves"] += _SAVES
        assert not end or is_taken(end), end
        self._tally["runs that were refused" if end else "runs that stored all"] += 1

    def _assert_sound(self, ends: "list[str | RankDeath]") -> None:
        stored = committed(self._root.url, self._root.storage_options)
        claims = {claim for run in self.runs for claim in noted(run.notes)}
        self._tally["durable by their runs"] += len(claims)
        assert_kept(stored, claims, has_retention=any(run.keep for run in self.runs))
        for name in stored:
            number = load_anew(self._job(9), name).number
            assert number // 10 == int(name.removeprefix("step-")), (name, number)
            self._tally["loads"] += 1
        owner = self._owner()
        if owner is not None and isinstance(ends[owner.number], str):
            assert ends[owner.number] == "", ends[owner.number]
            assert load_anew(self._job(8)).number == 10 * _SAVES + owner.number
            self._tally["loads"] += 1

    def _owner(self) -> Run | None:
        """The run with the newest generation on storage, if its memory tells."""
        storage = open_storage(self._root.url, self._root.storage_options)
        claims = sorted(entry.name for entry in storage.ls(CLAIMS) if "generation-" in entry.name)
        if not claims:
            return None
        token = json.loads(storage.get(f"{CLAIMS}/{claims[-1]}"))["run"]
        for run in self.runs:
            held = JobMemory(run.job.memory, "job").checkpoints()
            if held and held[0].manifest.run == token:
                return run
        return None


def _chosen_point(chance: Random) -> str:
    action = chance.choice(["stop", "stop", "kill"])
    return f"{chance.choice(FLUSHER_POINTS)}:{action}:{chance.randrange(1, 6)}"
