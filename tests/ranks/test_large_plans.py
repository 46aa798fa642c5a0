"""Ranks that plan in portions, as thousands of them do."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from tests.support.checkpoints.large_jobs import as_large_jobs
from tests.support.checkpoints.models import (
    full_tensor,
    sharded_state,
    unsharded_state,
    zero_tensor,
)
from tests.support.checkpoints.roundtrip import Places, comes_back
from tests.support.processes.forks import forked_ranks


@as_large_jobs()
def _saves(places: Places) -> None:
    rank = dist.get_rank()
    state = {
        **sharded_state(full_tensor, "a"),
        "replicated": torch.arange(100.0),
        "nested": {"lr": 0.5, "step": torch.tensor(7)},
        f"own.{rank}": torch.full((3,), rank),
    }
    blank = functools.partial(sharded_state, zero_tensor, "a")
    with places.writer(keep_memory=2) as writer:
        for name in ("first", "second"):
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            writer.wait(name)
            dist.barrier()
            comes_back(places, name, sharded_state(full_tensor, "a"), blank=blank)


@pytest.mark.timeout(240)
def test_what_is_planned_in_portions_comes_back_from_every_road(places: Places) -> None:
    forked_ranks(_saves, 4, places, timeout=200)
    expected = {**unsharded_state("a", full_tensor), "replicated": torch.arange(100.0)}
    expected |= {f"own.{rank}": torch.full((3,), rank) for rank in range(4)}
    comes_back(places, "second", expected)


@as_large_jobs()
def _contradicts(places: Places) -> str:
    state = {"same": torch.zeros(5), "other": torch.zeros(3 + dist.get_rank())}
    with places.writer() as writer:
        try:
            dcp_mem.save(state, checkpoint_id="never", storage_writer=writer)
        except CheckpointException as error:
            return str(error)
    return ""


def test_ranks_that_contradict_each_other_all_hear_of_it(places: Places) -> None:
    for text in forked_ranks(_contradicts, 3, places):
        assert "other: ranks have different sizes of the whole tensor" in text
