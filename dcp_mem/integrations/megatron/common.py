"""Megatron's files beside the sharded part of a checkpoint: how they get into memory and back.

Megatron's functions work on a directory: `metadata.json` names the format, and what isn't sharded
lies in `common.pt` or, from megatron-core 0.19 on, as an object among the shards. A checkpoint in
memory has `common.pt` as one of its entries, or that object; where Megatron wants a directory, a
temporary one stands in, with the common state where the installed release looks for it.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dcp_mem import functional
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError
from dcp_mem.format.metadata import StorageInfo, with_storage
from dcp_mem.format.saved_streams import is_whole
from dcp_mem.integrations.megatron.releases import COMMON_IS_SHARDED, MEGATRONS_COMMON
from dcp_mem.planning.load_planner import LocalLoadPlanner
from dcp_mem.reader import MemoryStorageReader

BACKEND, VERSION = "torch_dist", 1
"""Megatron's name for what lies on storage: its own loader reads it."""

_SHARD = "__0_0.distcp"
_METADATA = ".metadata"


def _object(data: torch.Tensor | None) -> ShardedObject:
    return ShardedObject("dcp_mem.common", data, (1,), (0,))


COMMON: str = _object(None).unique_key
"""Name of the entry that holds `common.pt`."""

UNKNOWN_OBJECTS = frozenset({COMMON} if COMMON_IS_SHARDED else {COMMON, MEGATRONS_COMMON})
"""Names of entries that the installed Megatron doesn't know."""


def common_object(directory: str | os.PathLike[str]) -> ShardedObject | None:
    """Return a directory's `common.pt`, if it is there, as an object that Megatron ignores."""
    try:
        data = bytearray(Path(directory, COMMON_STATE_FNAME).read_bytes())
    except FileNotFoundError:
        return None
    return _object(torch.frombuffer(data, dtype=torch.uint8))


def put_common_file(state: Any, directory: str | os.PathLike[str]) -> None:
    """Put a common state that goes among the shards into `common.pt` as well.

    There Megatron finds it before the shards are flushed, and releases before 0.19 do. A state that
    `torch.load` would refuse is left to the shards.
    """
    put_beside(os.fspath(directory), {COMMON_STATE_FNAME: _file(state)})


def _file(state: Any) -> bytes | None:
    """Return `common.pt` for a common state; None if `torch.load` would refuse it."""
    written = io.BytesIO()
    torch.save(state, written)
    data = written.getvalue()
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:
        return None
    return data


@value_class
class Common:
    """The common state of a checkpoint, as it was saved."""

    data: bytes  # the bytes of `common.pt`, or of the object among the shards
    is_sharded: bool

    def file(self) -> bytes | None:
        """Return `common.pt`; None if `torch.load` would refuse it."""
        if not self.is_sharded:
            return self.data
        try:
            (state,) = torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=True)
        except Exception:
            return None
        return _file(state)


class _AsSaved(LocalLoadPlanner):
    """Hands out byte items as they are: Megatron decides what it unpickles."""

    def __init__(self) -> None:
        super().__init__(weights_only=True, optional=lambda _: True)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        stream = value.getvalue()
        if not is_whole(stream):
            raise ValueError("it isn't as torch wrote it")
        self.original_state_dict[read_item.dest_index.fqn] = stream


def load_common(reader: MemoryStorageReader, name: str) -> Common | None:
    """Load the common state of a checkpoint on all ranks; None if it has none."""
    found: dict[str, Any] = {COMMON: None, MEGATRONS_COMMON: None}
    functional.raising_cause(
        functional.load,
        found,
        checkpoint_id=name,
        storage_reader=reader,
        planner=_AsSaved(),
        process_group=reader._process_group,
    )
    if (stream := found.get(MEGATRONS_COMMON)) is not None:
        return Common(stream, is_sharded=True)
    if (stream := found.get(COMMON)) is None:
        return None
    try:
        (data,) = torch.load(io.BytesIO(stream), weights_only=True)
        return Common(data.numpy().tobytes(), is_sharded=False)
    except Exception:
        raise DcpMemError(
            f"{COMMON} holds no common state: MemorySaveStrategy didn't write it"
        ) from None


@contextmanager
def stand_in(name: str, common: Common) -> Iterator[str]:
    """Make a temporary directory of that name, with the files that Megatron's loading looks for."""
    with tempfile.TemporaryDirectory(prefix="dcp_mem-megatron-") as parent:
        directory = make_directory(parent, name)
        if common.is_sharded and COMMON_IS_SHARDED:
            _put_shard(directory, common.data)
        elif (data := common.file()) is not None:
            Path(directory, COMMON_STATE_FNAME).write_bytes(data)
        else:
            raise DcpMemError(
                f"{name}: its common state holds what only megatron-core 0.19 or newer, which "
                "saved it, reads: load it with that"
            )
        save_config(CheckpointingConfig(BACKEND, VERSION), directory)
        yield directory


def _put_shard(directory: str, data: bytes) -> None:
    """Write a checkpoint of torch's that has the common state alone."""
    Path(directory, _SHARD).write_bytes(data)
    entries = Metadata({MEGATRONS_COMMON: BytesStorageMetadata()})
    places = {MetadataIndex(MEGATRONS_COMMON): StorageInfo(_SHARD, 0, len(data))}
    Path(directory, _METADATA).write_bytes(pickle.dumps(with_storage(entries, places, "")))


def make_directory(parent: str, name: str) -> str:
    """Make a directory in another one; return its path."""
    directory = os.path.join(parent, name)
    os.mkdir(directory)
    return directory


def files_beside(stand_in: str, common: Common | None = None) -> dict[str, bytes | None]:
    """Return the two files that Megatron's own tools look for in a checkpoint's directory."""
    common_file = Path(stand_in, COMMON_STATE_FNAME)
    saved = common_file.read_bytes() if common_file.exists() else None
    return {
        COMMON_STATE_FNAME: common.file() if common is not None else saved,
        # The file that says "this is a checkpoint" comes last.
        CONFIG_FNAME: Path(stand_in, CONFIG_FNAME).read_bytes(),
    }


def put_beside(
    directory: str, files: Mapping[str, bytes | None], *, missing_only: bool = False
) -> None:
    """Put files into the checkpoint's directory, for Megatron's own tools, if it exists.

    The checkpoint is complete without them, so what goes wrong is logged.

    `files`: what they hold, by name, in order; None for one that is to be removed.
    """
    if not os.path.isdir(directory) or (
        missing_only and os.path.exists(os.path.join(directory, CONFIG_FNAME))
    ):
        return
    try:
        for name, data in files.items():
            target = Path(directory, name)
            if data is None:
                target.unlink(missing_ok=True)
                continue
            temporary = Path(f"{target}.{secrets.token_hex(4)}")
            temporary.write_bytes(data)
            temporary.replace(target)
    except OSError as error:
        log.warning(
            "%s is complete in memory, but Megatron's files can't be put there: %s",
            directory,
            error,
        )
