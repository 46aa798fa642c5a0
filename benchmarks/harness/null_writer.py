"""The least that `dcp.save` can cost: its own work, with a writer that does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from benchmarks.harness.clock import seconds

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from benchmarks.harness.states import State


def save(state: State) -> float:
    """Save without writing, and return the seconds."""
    return seconds(lambda: dcp.save(state.tree, storage_writer=NullWriter()))


class NullWriter(StorageWriter):
    """A writer that fulfils DCP's contract and writes nothing."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        return

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
