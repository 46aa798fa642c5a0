"""A save keeps no reference to the state dict, which trainers without a collector would keep."""

import gc
import weakref

import pytest
import torch

import dcp_mem
from tests.support.checkpoints.plans import SAVES
from tests.support.checkpoints.roundtrip import Places
from tests.support.processes.forks import forked, in_process


@pytest.mark.parametrize("road", ["dcp.save", "dcp_mem.save"])
@in_process
def test_a_tensor_is_freed_after_each_kind_of_save_though_no_collector_runs(
    places: Places, road: str
) -> None:
    gc.disable()
    kept = []
    with places.writer(keep_memory=2) as writer:
        for way, size in (
            ("the first save of a structure", 100),
            ("a warm save", 100),
            ("a changed structure", 200),
        ):
            tensor = torch.rand(size)
            alive = weakref.ref(tensor)
            state = {"weights": tensor}
            SAVES[road](state, checkpoint_id="step", storage_writer=writer)
            del tensor, state
            if alive() is not None:
                kept.append(way)
    assert kept == []


def _save_nested_sharded(places: Places) -> bool:
    """Save what only torch's planner can plan; tell whether a tensor of it is still alive."""
    gc.disable()
    with places.writer(keep_memory=2) as writer:
        tensor = torch.rand(100)
        alive = weakref.ref(tensor)
        state = {"weights": tensor, "subclass": _Subclass(torch.rand(3))}
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
        del tensor, state
        return alive() is not None


class _Subclass(torch.Tensor):
    """A subclass, which dcp_mem's own planning leaves to torch's planner."""


def test_a_tensor_is_freed_after_a_save_that_had_no_common_plan(places: Places) -> None:
    assert not forked(_save_nested_sharded, places)
