"""Damages: files of two checkpoints, in memory and on storage, and a load that meets the damage.

Asserted: the load takes a checkpoint from elsewhere, or the older one and says why; all of its
state is one save's. Nothing is loaded where all is damaged; nothing else is raised.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.storm.storm import Play, Storm
from tests.support.checkpoints.damaged_loads import (
    Damage,
    chosen_damage,
    files_of,
    load_damaged,
    save_two_verified,
)
from tests.support.checkpoints.jobs import Job
from tests.support.private import private_directory
from tests.support.processes.forks import forked, forked_ranks

_OUTCOMES = ("nothing left to load", "older checkpoint loaded", "same checkpoint loaded")


class Damages(Storm):
    """One to three files are damaged in each round, mostly with one place alone left."""

    rounds_in_series = 100

    @contextlib.contextmanager
    def series(self, chance: Random) -> Iterator[Play]:
        """Two checkpoints of one rank or two."""
        with (
            private_directory("storm") as memory,
            tempfile.TemporaryDirectory(prefix="dcp_mem-storm-") as storage,
        ):
            job = Job(storage, str(memory))
            forked_ranks(save_two_verified, chance.choice([1, 2]), job)
            files = files_of(job)
            with self.keeping(memory, Path(storage)):
                yield lambda chance: self._play(job, files, chance)

    def _play(self, job: Job, files: list[Path], chance: Random) -> str:
        damage = chosen_damage(job, files, chance, most=3)
        number, problem = forked(_load, job, damage, chance.random())
        assert not problem, f"{damage}: {problem}"
        for path, act in damage.acts:
            where = "memory" if job.directory in path.parents else "storage"
            self.tally[f"{act.__name__.strip('_')}, in {where}"] += 1
        self.tally["loads"] += 1
        self.tally[_OUTCOMES[number]] += 1
        return str(damage)


def _load(job: Job, damage: Damage, seed: float) -> tuple[int, str]:
    return load_damaged(job, damage, Random(seed))
