"""How a life is ended: what is killed, and when."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random

import psutil

from dcp_mem.common import faults
from tests.storm.lives import Life, Notes
from tests.storm.promises import newest_done
from tests.support.checkpoints.jobs import agents
from tests.support.processes.forks import Forks

_STARTED_SECONDS = 20.0
_POLL_SECONDS = 0.002
_PLACES = (0, 1, 2, 3, 5, 8, 13, 20)
"""After which save of the life; 0: before the first, in the restore mostly."""
_LATEST_PASS = 8
_DELAYS = (0.0, 0.005, 0.03, 0.1)


class End(Enum):
    """What ends a life."""

    RANK = "a rank is killed"
    RANKS = "all ranks are killed"
    EVERYTHING = "ranks and agent are killed"
    AGENT = "the agent is killed, then all ranks"
    POINT = "ranks are killed at a fault point"
    AGENT_POINT = "the agent is killed at a fault point, then all ranks"
    TERMINATED = "SIGTERM to all ranks"
    CLOSED = "nothing is killed"


_WEIGHTS: Mapping[End, int] = {
    End.RANK: 20,
    End.RANKS: 18,
    End.EVERYTHING: 10,
    End.AGENT: 10,
    End.POINT: 22,
    End.AGENT_POINT: 8,
    End.TERMINATED: 8,
    End.CLOSED: 5,
}
_TRAINER_POINTS = [
    name
    for name in faults.POINTS
    if name.startswith(("save.", "stage.", "complete.", "frozen.")) or name == "checksums.made"
]
_AGENT_POINTS = [
    name for name in faults.POINTS if name.startswith(("flush.", "claim.", "checksums.", "reuse."))
]


@dataclass(frozen=True)
class Ending:
    """How one life is to end.

    Attributes:
        how: What is done.
        after: How many saves the life has begun by then.
        delay: Seconds from then on.
        victim: The rank, where one is killed.
        armed: Fault points, by rank.
        agent_armed: A fault point of agents.
    """

    how: End
    after: int
    delay: float
    victim: int
    armed: Mapping[int, str]
    agent_armed: str = ""

    def __str__(self) -> str:
        point = self.agent_armed or next(iter(self.armed.values()), "")
        return f"{self.how.value}{f' ({point})' * bool(point)}"

    def play(self, life: Life, running: Forks[str], ranks: int) -> int:
        """Do it; return the newest save that was complete when a SIGTERM was sent, else 0."""
        if self.how in (End.POINT, End.CLOSED):
            return 0
        self._await_moment(life, running)
        done = newest_done(life.progress, ranks)
        if self.how in (End.AGENT, End.EVERYTHING):
            kill_agents(life.job.memory)
        if self.how is End.AGENT:
            time.sleep(2 * self.delay)
        number = signal.SIGTERM if self.how is End.TERMINATED else signal.SIGKILL
        for rank in [self.victim] if self.how is End.RANK else range(ranks):
            running.send(rank, number)
        return done if self.how is End.TERMINATED else 0

    def _await_moment(self, life: Life, running: Forks[str]) -> None:
        notes, deadline = Notes(life.progress, self.victim), time.monotonic() + _STARTED_SECONDS
        while time.monotonic() < deadline and running.is_running(self.victim):
            if self.after == 0 and notes.get("started"):
                break
            begun = notes.get("begun")
            if begun is not None and life.index_of(begun["number"]) >= self.after:
                break
            time.sleep(_POLL_SECONDS)
        time.sleep(self.delay)


def chosen_ending(chance: Random, ranks: int, *, has_storage: bool) -> Ending:
    """Choose how a life of so many ranks ends."""
    (how,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    if how is End.TERMINATED and not has_storage:
        how = End.RANKS
    passes = chance.randrange(1, _LATEST_PASS)
    victims = [rank for rank in range(ranks) if chance.random() < 0.6] or [0]
    point, agent_point = chance.choice(_TRAINER_POINTS), chance.choice(_AGENT_POINTS)
    return Ending(
        how=how,
        after=chance.choice(_PLACES),
        delay=chance.uniform(0.0, chance.choice(_DELAYS)),
        victim=chance.randrange(ranks),
        armed=dict.fromkeys(victims, f"{point}:kill:{passes}") if how is End.POINT else {},
        agent_armed=f"{agent_point}:kill:{passes}" if how is End.AGENT_POINT else "",
    )


def kill_agents(memory: str | Path) -> int:
    """Kill the agents of a memory root, wait until they are gone, and count them."""
    found = agents(memory)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(found, timeout=_STARTED_SECONDS)
    return len(found)
