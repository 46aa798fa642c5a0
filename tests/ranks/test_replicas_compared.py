"""Replicas that should be equal are compared; a difference names tensor and ranks."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_mem import CheckpointManager
from tests.support.processes.forks import forked_ranks, on_ranks

pytestmark = pytest.mark.timeout(120)

_TURNS = 8
"""Comparisons after which every tensor has had its turn."""


def _state(damaged: str) -> dict[str, Any]:
    """A state as DDP and HSDP have it, in which rank 1's replica of one tensor differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    rank = dist.get_rank()
    local = torch.arange(12.0).view(4, 3) + rank % 2
    state: dict[str, Any] = {
        "plain": torch.arange(100.0),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "hybrid": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False),
        "sharded": DTensor.from_local(torch.full((4, 3), rank), mesh, [Shard(0), Shard(0)]),
        "step": rank,
    }
    if damaged and rank == 1:
        tensor = state[damaged]
        (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).view(-1)[0] += 1
    return state


def _compare(root: Path, damaged: str, is_async: bool) -> set[str]:
    with CheckpointManager(
        memory_root=root, job="job", compare_replicas=2, async_save=is_async
    ) as manager:
        state, found = _state(damaged), set[str]()
        for step in range(2 * _TURNS + 2):
            found |= set(manager.save(step, state).troubles)
        return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("damaged", ["plain", "half", "scalar", "hybrid"])
def test_a_replica_that_differs_is_named_with_its_rank(
    memory_root: Path, damaged: str, is_async: bool
) -> None:
    for found in forked_ranks(_compare, 4, memory_root, damaged, is_async):
        (text,) = found
        others = "rank 3" if damaged == "hybrid" else "ranks 0, 2, 3"
        assert f": {damaged} differs between replicas: " in text
        assert "rank 1" in text
        assert others in text


@pytest.mark.parametrize("is_async", [False, True])
@on_ranks(2)
def test_replicas_are_summed_up_behind_training(memory_root: Path, is_async: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    run: Any = threading.Thread.run

    def held(thread: threading.Thread) -> None:
        if thread.name == "dcp_mem-replicas":
            begun.set()
            assert go_on.wait(30)
        run(thread)

    rank = dist.get_rank()
    state = {f"w{number}": torch.full((5,), float(rank)) for number in range(8 * _TURNS)}
    with (
        patch.object(threading.Thread, "run", held),
        CheckpointManager(
            memory_root=memory_root, job="job", compare_replicas=1, async_save=is_async
        ) as manager,
    ):
        saved = manager.save(1, state)
        assert begun.wait(30)
        assert saved.troubles == ()
        if not is_async:
            assert manager.latest() == 1, "the checkpoint is complete without them"
        go_on.set()
        troubles = tuple(manager.save(2, state).troubles)
    assert troubles
    assert all("differs between replicas" in text or "more" in text for text in troubles)


def test_replicas_that_are_equal_are_no_trouble(memory_root: Path) -> None:
    assert forked_ranks(_compare, 4, memory_root, "", False) == [set()] * 4
