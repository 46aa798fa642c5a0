"""Several hundred saves by two ranks, with kills at random. DCP_MEM_SOAK=N makes it N lives long.

Where the kills fall follows from a seed, which is printed; the moment at which a signal arrives
doesn't.
"""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from tests.support.checkpoints.jobs import (
    Job,
    agents,
    committed_in,
    load,
    load_anew,
    occupied,
    save,
    wait_until,
)
from tests.support.processes import faults
from tests.support.processes.forks import forking
from tests.support.seeds import seeded

_RANKS = 2
_KEEP = 2
_SAVES_OF_A_LIFE = 40
_LIVES = int(os.environ.get("DCP_MEM_SOAK", "6"))
_TRAINER_POINTS = [
    name for name in faults.POINTS if name.startswith(("save.", "stage.", "complete."))
]


def _live(job: Job, progress: str, armed: dict[int, str], first: bool) -> int:
    """One life of a rank: load what there is, then save on until a fault ends it.

    Returns the number that it loaded.
    """
    rank = dist.get_rank()
    start = 0 if first else load_anew(job).number
    faults.arm(armed.get(rank, ""))
    with job.writer(keep_memory=_KEEP) as writer:
        for number in range(start + 1, start + 1 + _SAVES_OF_A_LIFE):
            _note(progress, f"{rank}.begun", number)
            save(writer, number)
            _note(progress, f"{rank}.done", number)
    return start


def _note(progress: str, name: str, number: int) -> None:
    path = Path(progress, name)
    path.with_suffix(".new").write_text(str(number))
    path.with_suffix(".new").rename(path)


def _highest(progress: Path, what: str) -> int:
    return max((int(path.read_text()) for path in progress.glob(f"*.{what}*")), default=0)


def _load_from_memory(job: Job) -> int:
    return load_anew(job).number


@pytest.mark.slow
@pytest.mark.random
@pytest.mark.timeout(max(600, 50 * _LIVES))
def test_hundreds_of_saves_and_random_kills_never_lose_or_mix_a_checkpoint(
    memory_root: Path, tmp_path: Path
) -> None:
    chance = seeded()
    progress = tmp_path / "progress"
    progress.mkdir()
    job = Job(str(tmp_path / "run"), str(memory_root))
    killed = 0
    for life in range(_LIVES):
        before = _highest(progress, "done")
        armed = {}
        if life < _LIVES - 1:
            point, passages = chance.choice(_TRAINER_POINTS), chance.randrange(1, _SAVES_OF_A_LIFE)
            victims = [rank for rank in range(_RANKS) if chance.random() < 0.6] or [0]
            armed = dict.fromkeys(victims, f"{point}:kill:{passages}")
        with forking(_live, _RANKS, job, str(progress), armed, life == 0) as ranks:
            try:
                ranks.join(timeout=120)
            except AssertionError as error:
                if not armed or "SIGKILL" not in str(error):
                    raise
                killed += 1
        if chance.random() < 0.4:
            for agent in agents(memory_root):
                with contextlib.suppress(psutil.NoSuchProcess):
                    agent.send_signal(signal.SIGKILL)
        found = _load_from_memory(job)
        assert _highest(progress, "done") <= found <= _highest(progress, "begun"), (
            f"life {life}, {armed}"
        )
        assert found >= before
        assert len(list((job.directory / ".slots").iterdir())) <= (_KEEP + 1) * _RANKS
        assert occupied(job.directory) <= (_KEEP + 2) * _RANKS * (4 << 20)
    assert killed >= _LIVES // 3
    assert _highest(progress, "done") >= 10 * _LIVES
    _storage_holds_whole_checkpoints(job, tmp_path / "run")
    wait_until(
        lambda: len(agents(memory_root)) == 0,
        "the agent ends when nothing is left to do",
        timeout=60,
    )


def _storage_holds_whole_checkpoints(job: Job, root: Path) -> None:
    """Check that torch alone loads commits, and that the newest is loaded without memory too."""
    committed = sorted(int(name.removeprefix("step-")) for name in committed_in(root))
    assert committed
    for number in (committed[0], committed[len(committed) // 2], committed[-1]):
        assert load(FileSystemReader(root / f"step-{number}")) == number
    newest = load_anew(job).number
    shutil.rmtree(job.directory)
    assert load_anew(job).number == newest == committed[-1]
