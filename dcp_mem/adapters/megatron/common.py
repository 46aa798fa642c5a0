"""The files that Megatron has beside the sharded part of a checkpoint, and how they get into memory and back.

Megatron's functions work on a directory: `common.pt` holds what isn't sharded, `metadata.json` says which format it is. A
checkpoint in memory has `common.pt` as one of its entries, and a stand-in for the directory is made where Megatron wants one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from dcp_mem.errors import DcpMemError
from dcp_mem.events import log

BACKEND, VERSION = "torch_dist", 1
"""Megatron's name for what lies on storage: its own loader reads it."""

_OURS = "dcp_mem"
_KEY = "common"


def _object(data: torch.Tensor | None) -> ShardedObject:
    return ShardedObject(f"{_OURS}.{_KEY}", data, (1,), (0,))


COMMON: str = _object(None).unique_key
"""What the entry is called that holds the common state."""


def common_object(directory: str | os.PathLike[str]) -> ShardedObject | None:
    """The bytes of a directory's `common.pt`, as an object that Megatron's own loader passes over; None where there is none."""
    try:
        data = bytearray(Path(directory, COMMON_STATE_FNAME).read_bytes())
    except FileNotFoundError:
        return None
    return _object(torch.frombuffer(data, dtype=torch.uint8))


class Common:
    """The common state of a checkpoint, to be loaded by `dcp_mem.load(common.state, …)`.

    data: the bytes of `common.pt`; None before, and for a checkpoint without.
    """

    def __init__(self) -> None:
        self.data: bytes | None = None

    @property
    def state(self) -> dict[str, Any]:
        return {_OURS: self}

    def state_dict(self) -> dict[str, Any]:
        return {COMMON.removeprefix(f"{_OURS}."): None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises DcpMemError where that entry holds something else."""
        if not state_dict:
            return
        try:
            ((data,),) = state_dict.values()
            self.data = data.numpy().tobytes()
        except (AttributeError, TypeError, ValueError):
            raise DcpMemError(f"{COMMON} holds no common state: MemorySaveStrategy didn't write it") from None

    def is_optional(self, key: str) -> bool:
        """Whether a checkpoint may lack it: Megatron's own do."""
        return True


@contextmanager
def stand_in(name: str, common: bytes) -> Iterator[str]:
    """A directory of that name, with what Megatron's loading wants to find in a checkpoint's."""
    with tempfile.TemporaryDirectory(prefix="dcp_mem-megatron-") as parent:
        directory = make_directory(parent, name)
        Path(directory, COMMON_STATE_FNAME).write_bytes(common)
        save_config(CheckpointingConfig(BACKEND, VERSION), directory)
        yield directory


def make_directory(parent: str, name: str) -> str:
    directory = os.path.join(parent, name)
    os.mkdir(directory)
    return directory


def put_beside(stand_in: str, directory: str, *, missing_only: bool = False) -> None:
    """Copy the two files into the checkpoint's directory, for Megatron's own tools, if there is such a directory here.

    The checkpoint is complete without them, so what goes wrong is logged.
    """
    if not os.path.isdir(directory) or (missing_only and os.path.exists(os.path.join(directory, CONFIG_FNAME))):
        return
    try:
        for file in (COMMON_STATE_FNAME, CONFIG_FNAME):  # the one that says "this is a checkpoint" last
            target = os.path.join(directory, file)
            temporary = f"{target}.{secrets.token_hex(4)}"
            shutil.copyfile(os.path.join(stand_in, file), temporary)
            os.replace(temporary, target)
    except OSError as error:
        log.warning("%s is complete in memory, but Megatron's files can't be put there: %s", directory, error)
