"""The launcher reports what happened to every rank, and leaves nothing behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import (
    RankDeath,
    RanksFailed,
    RanksHung,
    forked,
    forked_ranks,
    forking,
    killed_ranks,
)


def _sum_of_ranks(scale: int) -> float:
    tensor = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(tensor)
    return tensor.item()


def _return_rank_or_die(fatal: int) -> int:
    rank = dist.get_rank()
    if rank == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _raise_on_rank(failing: int) -> None:
    if dist.get_rank() == failing:
        raise LookupError("no such shard")


def _wait_for_a_message_that_never_comes(notes: Path) -> None:
    (notes / str(dist.get_rank())).touch()
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(600)


def _start_child(path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    path.write_text(str(child.pid))


def _exit_without_returning() -> None:
    os._exit(0)


def test_a_killed_rank_is_reported_beside_what_the_others_returned() -> None:
    outcomes = killed_ranks(_return_rank_or_die, 2, 1)
    assert outcomes[0] == 0
    assert isinstance(outcomes[1], RankDeath)
    assert (outcomes[1].rank, outcomes[1].signal) == (1, signal.SIGKILL)


def test_an_unexpected_kill_fails() -> None:
    with pytest.raises(RanksFailed, match=r"ranks \[1\] died") as failure:
        forked_ranks(_return_rank_or_die, 2, 1)
    assert failure.value.outcomes[0] == 0


def test_a_kill_that_did_not_come_fails() -> None:
    with pytest.raises(RanksFailed, match="no rank died of SIGKILL"):
        killed_ranks(_sum_of_ranks, 2, 1)


def test_an_exception_fails_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="LookupError: no such shard") as failure:
        forked_ranks(_raise_on_rank, 2, 0)
    death = failure.value.outcomes[0]
    assert isinstance(death, RankDeath)
    assert "in _raise_on_rank" in death.traceback
    assert death.exit_code == 1


def test_an_exit_without_a_return_value_fails() -> None:
    with pytest.raises(RanksFailed, match="exit code 0"):
        forked(_exit_without_returning)


def test_a_hang_shows_where_every_rank_stands(tmp_path: Path) -> None:
    with forking(_wait_for_a_message_that_never_comes, 2, tmp_path) as ranks:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        with pytest.raises(RanksHung) as failure:
            ranks.join(timeout=0.2)
    for death in failure.value.outcomes:
        assert isinstance(death, RankDeath)
        assert death.hung
        assert "in _wait_for_a_message_that_never_comes" in death.output


def test_children_of_a_rank_die_with_the_call(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    forked(_start_child, note)
    child = int(note.read_text())
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone
