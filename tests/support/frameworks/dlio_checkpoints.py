"""MLPerf Storage's checkpoint workloads: DLIO saves and loads through dcp_mem, or torch's DCP.

DLIO takes a class by `checkpoint_mechanism_classname`; docs/testing.md has the command. One rank.
DLIO times `save_checkpoint` and `load_checkpoint`; dcp_mem's flush goes on behind a save.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from torch.utils._pytree import tree_map_only

import dcp_mem


class _Whole(PyTorchCheckpointing):  # type: ignore[misc]
    """What DLIO has for one rank's files, saved and loaded as one checkpoint."""

    _of_class: dict[type, Any] = {}  # noqa: RUF012 (DLIO asks each class for its one instance)

    @classmethod
    def get_instance(cls) -> Any:
        return cls._of_class.setdefault(cls, cls())

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Any] = {}
        self._at = Path(self.args.checkpoint_folder).resolve()

    def save_state(self, suffix: str, state: Any, fsync: bool = False) -> None:
        self._state[Path(suffix).name] = state

    def load_state(self, suffix: str, state: Any) -> None:
        self._state[Path(suffix).name] = tree_map_only(torch.Tensor, torch.empty_like, state)

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        super().save_checkpoint(epoch, step_number)
        self._save(f"step-{step_number}", self._state)
        self._state = {}

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        super().load_checkpoint(epoch, step_number)
        self._load(f"step-{step_number}", self._state)
        self._state = {}


class TorchDCP(_Whole):
    def _save(self, name: str, state: dict[str, Any]) -> None:
        dcp.save(state, checkpoint_id=self._at / name, no_dist=True)

    def _load(self, name: str, state: dict[str, Any]) -> None:
        dcp.load(state, checkpoint_id=self._at / name, no_dist=True)


class DcpMem(_Whole):
    def __init__(self) -> None:
        super().__init__()
        root = os.environ["DCP_MEM_ROOT"]
        self._writer = dcp_mem.MemoryStorageWriter(self._at, memory_root=root, keep_memory=1)

    def _save(self, name: str, state: dict[str, Any]) -> None:
        dcp_mem.save(state, checkpoint_id=name, storage_writer=self._writer)

    def _load(self, name: str, state: dict[str, Any]) -> None:
        root = os.environ["DCP_MEM_ROOT"]
        reader = dcp_mem.MemoryStorageReader(self._at, memory_root=root)
        dcp_mem.load(state, checkpoint_id=name, storage_reader=reader)

    def finalize(self) -> None:
        self._writer.close()
