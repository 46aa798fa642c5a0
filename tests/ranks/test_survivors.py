"""A rank dies, and the others' processes live on: they close, meet again with another in its place,
and go on from the newest checkpoint."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dcp_mem import CheckpointManager
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes import faults
from tests.support.processes.forks import Forks, forking

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

_SECONDS = 5
_MOST_SECONDS = 3 * _SECONDS + 5.0
"""A close that waits for a lost rank in one call, and in what goes on behind it."""
_ENV = {"DCP_MEM_TIMEOUT": str(_SECONDS), "DCP_MEM_REPLICATION_TIMEOUT": str(_SECONDS)}
_RANKS = 3
_BETWEEN = "between two saves"
_POINTS = (
    _BETWEEN,
    "save.agreed",
    "stage.copied",
    "complete.receipts",
    "complete.manifest",
    "replicate.chunk",
    "replicate.sealed",
)
_PASS = 3
"""The victim dies in the third save of its life, or behind it."""
_STEPS = 5
_LAST = "none"


class _Plan(NamedTuple):
    """What happens, life after life.

    Attributes:
        memory: The ranks' memory roots lie in it.
        stores: What the ranks meet in lies in it.
        victim: The rank that dies.
        deaths: Where it dies, by life; `_LAST`: it lives.
        is_async: Whether saves go on behind training.
    """

    memory: str
    stores: str
    victim: int
    deaths: tuple[str, ...]
    is_async: bool


class _Life(NamedTuple):
    """What a rank has seen of one life.

    Attributes:
        restored: The step that it began with.
        completed: The last step that it knows to be complete.
        seconds: Of closing, and of leaving the groups.
        threads: Of the process, once the next life's groups are made.
        descriptors: Likewise.
    """

    restored: int
    completed: int
    seconds: float
    threads: int
    descriptors: int


def _meet(plan: _Plan, life: int, rank: int) -> None:
    store = dist.FileStore(f"{plan.stores}/store-{life}", _RANKS)
    store.add("here", 1)  # those that have outlived a rank may still be closing
    wait_until(lambda: store.add("here", 0) >= _RANKS, "all ranks meet")
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=_SECONDS),
    )


def _state(rank: int, step: int) -> dict[str, Any]:
    return {f"of {rank}": torch.full((70_000,), float(step)), "step": step}


def _lives(plan: _Plan, rank: int, first: int) -> list[_Life]:
    torch.set_num_threads(1)
    seen = []
    for life in range(first, len(plan.deaths)):
        _meet(plan, life, rank)
        held = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        death = plan.deaths[life] if rank == plan.victim else _LAST
        faults.arm("" if death in (_BETWEEN, _LAST) else f"{death}:kill:{_PASS}")
        seen.append(_Life(*_live(plan, rank, death), *held))
        if rank == plan.victim:
            break
    return seen


def _live(plan: _Plan, rank: int, death: str) -> tuple[int, int, float]:
    """Train for a few steps, or until a rank is lost; close everything, and leave the groups.

    Returns:
        Which step it began with, the last one that is known to be complete, and the seconds from
        the end of training on.
    """
    group = dist.new_group(timeout=timedelta(seconds=_SECONDS)) if plan.is_async else None
    memory = f"{plan.memory}/{rank}"
    options: Any = {"async_save": plan.is_async, "process_group": group}
    state = _state(rank, 0)
    manager = CheckpointManager(memory_root=memory, job="job", replicas=1, **options)
    restored = completed = manager.restore(state) or 0
    assert torch.equal(state[f"of {rank}"], _state(rank, restored)[f"of {rank}"])
    try:
        with manager:
            try:
                for step in range(restored + 1, restored + _STEPS + 1):
                    saved = manager.save(step, _state(rank, step))
                    if saved and not saved.troubles:  # else it may be of the save before
                        completed = step - plan.is_async
                    if death == _BETWEEN and step == restored + _PASS:
                        os.kill(os.getpid(), signal.SIGKILL)
                    dist.barrier()  # the training's own
            finally:
                ended = time.monotonic()
    except RuntimeError:  # a rank is lost, says gloo
        gc.collect()
    dist.destroy_process_group()
    return restored, completed, time.monotonic() - ended


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async save"])
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_close_meet_again_and_go_on_from_the_newest_checkpoint(
    memory_root: Path, tmp_path: Path, is_async: bool, victim: int
) -> None:
    deaths = (*_POINTS, _LAST)
    plan = _Plan(str(memory_root), str(tmp_path), victim, deaths, is_async)
    with ExitStack() as stack:
        survivors = {
            rank: stack.enter_context(forking(_lives, None, plan, rank, 0, env=_ENV))
            for rank in range(_RANKS)
            if rank != victim
        }
        for life in range(len(plan.deaths)):
            mortal: Forks[list[_Life]] = stack.enter_context(
                forking(_lives, None, plan, victim, life, env=_ENV)
            )
            if plan.deaths[life] != _LAST:
                mortal.join(killed={0})
        found = {rank: forks.join(120)[0] for rank, forks in survivors.items()}
        [last] = mortal.join(60)[0]
    first, *others = found.values()
    assert all([one.restored for one in seen] == [one.restored for one in first] for seen in others)
    assert last.restored == first[-1].restored
    for seen in found.values():
        for before, after in pairwise(seen):
            assert after.restored >= before.completed
        assert max(life.seconds for life in seen) < _MOST_SECONDS, seen
        # What is left of earlier groups is closed when the ranks first meet again.
        assert seen[-1].threads <= max(life.threads for life in seen[1:-1]) + 1, seen
        assert seen[-1].descriptors <= max(life.descriptors for life in seen[1:-1]) + 4, seen
