"""Megatron's files beside the sharded part of a checkpoint: how they get into memory and back.

Megatron's functions work on a directory: `common.pt` holds what isn't sharded, `metadata.json`
names the format. A checkpoint in memory has `common.pt` as one of its entries; where Megatron wants
a directory, a temporary one stands in.
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

from dcp_mem.common.log import log
from dcp_mem.errors import DcpMemError

BACKEND, VERSION = "torch_dist", 1
"""Megatron's name for what lies on storage: its own loader reads it."""

_OURS = "dcp_mem"
_KEY = "common"


def _object(data: torch.Tensor | None) -> ShardedObject:
    return ShardedObject(f"{_OURS}.{_KEY}", data, (1,), (0,))


COMMON: str = _object(None).unique_key
"""Name of the entry that holds the common state."""


def common_object(directory: str | os.PathLike[str]) -> ShardedObject | None:
    """Return a directory's `common.pt` as an object that Megatron's loader ignores.

    Args:
        directory: Where Megatron has written `common.pt`; None is returned if it hasn't.
    """
    try:
        data = bytearray(Path(directory, COMMON_STATE_FNAME).read_bytes())
    except FileNotFoundError:
        return None
    return _object(torch.frombuffer(data, dtype=torch.uint8))


class Common:
    """The common state of a checkpoint, to be loaded by `dcp_mem.load(common.state, …)`.

    Attributes:
        data: The bytes of `common.pt`; None before the load, and for a checkpoint without.
    """

    def __init__(self) -> None:
        self.data: bytes | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Return the state dict that has this as its one entry."""
        return {_OURS: self}

    def state_dict(self) -> dict[str, Any]:
        """Return the entry's name with no value: the load fills it in."""
        return {COMMON.removeprefix(f"{_OURS}."): None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the bytes from what was loaded.

        Args:
            state_dict: The loaded entry; empty where the checkpoint has none.

        Raises:
            DcpMemError: The entry holds something else.
        """
        if not state_dict:
            return
        try:
            ((data,),) = state_dict.values()
            self.data = data.numpy().tobytes()
        except (AttributeError, TypeError, ValueError):
            raise DcpMemError(
                f"{COMMON} holds no common state: MemorySaveStrategy didn't write it"
            ) from None

    def is_optional(self, key: str) -> bool:
        """Return True: a checkpoint may lack the entry, as Megatron's own do.

        Args:
            key: Ignored.
        """
        return True


@contextmanager
def stand_in(name: str, common: bytes) -> Iterator[str]:
    """Make a temporary directory of that name, with the files that Megatron's loading looks for.

    Args:
        name: The checkpoint's name under its root.
        common: The bytes of Megatron's `common.pt`.
    """
    with tempfile.TemporaryDirectory(prefix="dcp_mem-megatron-") as parent:
        directory = make_directory(parent, name)
        Path(directory, COMMON_STATE_FNAME).write_bytes(common)
        save_config(CheckpointingConfig(BACKEND, VERSION), directory)
        yield directory


def make_directory(parent: str, name: str) -> str:
    """Make a directory in another one; return its path.

    Args:
        parent: Where to make it.
        name: The directory's name.
    """
    directory = os.path.join(parent, name)
    os.mkdir(directory)
    return directory


def put_beside(stand_in: str, directory: str, *, missing_only: bool = False) -> None:
    """Copy the two files into the checkpoint's directory, for Megatron's own tools, if it exists.

    The checkpoint is complete without them, so what goes wrong is logged.

    Args:
        stand_in: Directory that has the files.
        directory: The checkpoint's directory.
        missing_only: Leave files alone that are there.
    """
    if not os.path.isdir(directory) or (
        missing_only and os.path.exists(os.path.join(directory, CONFIG_FNAME))
    ):
        return
    try:
        # The file that says "this is a checkpoint" comes last.
        for file in (COMMON_STATE_FNAME, CONFIG_FNAME):
            target = os.path.join(directory, file)
            temporary = f"{target}.{secrets.token_hex(4)}"
            shutil.copyfile(os.path.join(stand_in, file), temporary)
            os.replace(temporary, target)
    except OSError as error:
        log.warning(
            "%s is complete in memory, but Megatron's files can't be put there: %s",
            directory,
            error,
        )
