"""Plans, metadata, saves and loads beside what torch makes of the same state."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

import dcp_mem
from tests.support.checkpoints.roundtrip import State, properties_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent."""


class TorchPlanner(dcp.DefaultSavePlanner):
    """Torch's default planner under another name, so that dcp_mem leaves the planning to torch."""


class TorchLoadPlanner(dcp.DefaultLoadPlanner):
    """The same for loads."""


def save_by_torch(state: State, **options: Any) -> Metadata:
    """`dcp.save`, planned by torch."""
    metadata: Metadata = dcp.save(state, planner=TorchPlanner(), **options)
    return metadata


def load_by_torch(state: State, **options: Any) -> None:
    """`dcp.load`, planned by torch."""
    dcp.load(state, planner=TorchLoadPlanner(), **options)


SAVES: Mapping[str, Callable[..., Metadata]] = {
    "dcp.save": dcp.save,
    "dcp_mem.save": dcp_mem.save,
    "torch's planner": save_by_torch,
}
"""The roads of a save: two that dcp_mem plans, and that of torch."""

_BEGUN: Mapping[str, Callable[..., Any]] = {
    **SAVES,
    "save": dcp_mem.save,
    "async": dcp_mem.async_save,
    "async by dcp": dcp.async_save,
}
"""Those, and asynchronous ones."""


def begin_save(
    road: str, writer: dcp_mem.MemoryStorageWriter, state: State, name: str, **options: Any
) -> Any:
    """Save on a road; returns what that returns."""
    return _BEGUN[road](state, checkpoint_id=name, storage_writer=writer, **options)


def save_by(
    road: str, writer: dcp_mem.MemoryStorageWriter, state: State, name: str, **options: Any
) -> Any:
    """Save on a road, and wait; returns what was saved, as DCP's metadata."""
    begun = begin_save(road, writer, state, name, **options)
    if not road.startswith("async"):
        return begun
    return getattr(begun, "upload_completion", begun).result(60)


LOADS: Mapping[str, Callable[..., object]] = {
    "dcp.load": dcp.load,
    "dcp_mem.load": dcp_mem.load,
    "torch's planner": load_by_torch,
}
"""The roads of a load."""


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what dcp_mem logs."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("dcp_mem"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def why_torch_plans(lines: Sequence[str]) -> list[str]:
    """Return why saves were left to torch, going by the log."""
    found = (re.search(r"is planned by torch(?:, which takes longer)?: (.*)", one) for one in lines)
    return [match[1] for match in found if match]


def planned(lines: Sequence[str]) -> list[str]:
    """Return the names of the checkpoints that the ranks planned, going by the log."""
    return [
        line.split()[1] for line in lines if line.startswith("planned ") and " ranks in " in line
    ]


def assert_same_content(ours: Metadata, theirs: Metadata) -> None:
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, expected in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(expected), name
        if isinstance(expected, TensorStorageMetadata):
            assert isinstance(found, TensorStorageMetadata)
            assert found.size == expected.size, name
            assert len(found.chunks) == len(expected.chunks), name
            key = _sides
            assert sorted(map(key, found.chunks)) == sorted(map(key, expected.chunks)), name
            assert all(
                type(each.offsets) is type(each.sizes) is torch.Size for each in found.chunks
            ), name
            assert properties_of(found) == properties_of(expected), name
    assert ours.planner_data == theirs.planner_data


def _sides(chunk: ChunkStorageMetadata) -> Box:
    return tuple(chunk.offsets), tuple(chunk.sizes)
