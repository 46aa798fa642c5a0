"""The least that DCP's saves can cost: their own work, with a writer that does nothing."""

from __future__ import annotations

import time
from concurrent.futures import Future as UploadFuture
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
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


def async_save(tree: dict[str, Any]) -> float:
    """Save asynchronously without staging and writing; return the seconds that the call took."""
    start = time.perf_counter()
    answer = dcp.async_save(tree, storage_writer=NullStager())
    took = time.perf_counter() - start
    upload = answer if isinstance(answer, UploadFuture) else answer.upload_completion
    upload.result()
    return took


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


class NullStager(NullWriter, AsyncStager):
    """A writer that stages as well, and stages nothing."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
        return {}

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        return
