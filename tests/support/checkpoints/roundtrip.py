"""What tests of saving and loading share: a job's places, the four roads back, bit equality."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from dcp_mem import MemoryStorageReader, MemoryStorageWriter
from dcp_mem.format.names import metadata_file
from dcp_mem.memory.job import JobMemory
from tests.support.checkpoints.jobs import wait_until

T = TypeVar("T")
State = dict[str, Any]

ROADS = ("memory", "storage", "stock from memory", "stock from storage")
"""Our reader or torch's own, from the node's memory or from storage."""

_OTHER = 0x5A
"""The fill of tensors before a load, so that old values can't pass for loaded ones."""


@dataclass(frozen=True)
class Places:
    """Where a job keeps its checkpoints: the memory root and a directory as storage."""

    memory: str
    url: str
    job: str = "job"

    def writer(self, **options: Any) -> MemoryStorageWriter:
        """Make a writer to both places; unless told otherwise it flushes from a thread."""
        return MemoryStorageWriter(
            self.url, **{"memory_root": self.memory, "job": self.job, "agent": "thread", **options}
        )

    def reader(self, road: str, name: str, **options: Any) -> StorageReader:
        """A reader that sees this one place only."""
        if road == "memory":
            return MemoryStorageReader(None, memory_root=self.memory, job=self.job, **options)
        if road == "storage":
            return MemoryStorageReader(
                self.url, memory_root=f"{self.memory}/none", job=self.job, **options
            )
        directory = self.directory(road, name) if road.endswith("storage") else self.shown(name)
        return dcp.FileSystemReader(str(directory))

    def shown(self, name: str) -> Path:
        """Return the checkpoint's directory in memory, once torch's own readers find it.

        Its `.metadata` is made in the background.
        """
        memory = JobMemory(self.memory, self.job)
        wait_until(
            lambda: is_shown(memory, name), f"{name} to be shown to torch's own readers", timeout=20
        )
        return self.directory("memory", name)

    def metadata(self, name: str) -> Metadata:
        """Return what torch's own reader finds in memory, without that reader's own mark."""
        metadata = dcp.FileSystemReader(self.shown(name)).read_metadata()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = None
        return metadata

    def directory(self, road: str, name: str) -> Path:
        """The checkpoint's directory on that road."""
        return (
            Path(self.url, name) if road.endswith("storage") else Path(self.memory, self.job, name)
        )

    def save(self, writer: MemoryStorageWriter, state: State, name: str, **options: Any) -> None:
        """Save, and wait until memory and storage have it; only ranks that lead a node wait."""
        dcp.save(state, checkpoint_id=name, storage_writer=writer, **options)
        writer.wait(name, timeout=60)

    def load(self, road: str, name: str, into: State, **options: Any) -> State:
        """Load a checkpoint into the state and return it."""
        ours = not road.startswith("stock")
        dcp.load(
            into,
            checkpoint_id=name if ours else None,
            storage_reader=self.reader(road, name),
            **options,
        )
        return into


def is_shown(memory: JobMemory, name: str) -> bool:
    """Return whether `.metadata` in memory is of the complete save; only one node ever has it."""
    return all(
        path.exists() and held.manifest.save_id.encode() in path.read_bytes()
        for held in memory.find(name)
        if len(held.manifest.nodes) == 1
        for path in [Path(held.directory, metadata_file(held.manifest.scope))]
    )


def survives(
    places: Places,
    state: State,
    *,
    blank: Callable[[], State] | None = None,
    roads: Sequence[str] = ROADS,
    save_planner: Callable[[], SavePlanner] | None = None,
    load_planner: Callable[[], LoadPlanner] | None = None,
    context: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Save a state and assert that every road brings it back to the bit.

    blank: makes the state that is loaded into; by default it is derived from what is saved.
    context: around each load.
    """
    with places.writer() as writer:
        places.save(
            writer, state, "step-1", planner=save_planner() if save_planner is not None else None
        )
        comes_back(
            places,
            "step-1",
            state,
            blank=blank,
            roads=roads,
            load_planner=load_planner,
            context=context,
        )


def comes_back(
    places: Places,
    name: str,
    state: State,
    *,
    blank: Callable[[], State] | None = None,
    roads: Sequence[str] = ROADS,
    load_planner: Callable[[], LoadPlanner] | None = None,
    context: Callable[[], AbstractContextManager[object]] | None = None,
) -> None:
    """Assert that every road brings back this state, to the bit, from a saved checkpoint."""
    for road in roads:
        into = blank() if blank is not None else blank_of(state)
        planner = load_planner() if load_planner is not None else None
        if context is None:
            places.load(road, name, into, planner=planner)
        else:
            with context():
                places.load(road, name, into, planner=planner)
        assert_same(state, into, road)


def blank_of(value: Any) -> Any:
    """The same structure with other values: tensors full of 0x5A, None in place of objects."""
    if isinstance(value, Mapping):
        return {key: blank_of(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank_of(inner) for inner in value)
    if isinstance(value, DTensor):
        local = blank_of(value.to_local())
        return DTensor.from_local(
            local,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if isinstance(value, torch.Tensor):
        return other_bytes(torch.empty(value.shape, dtype=value.dtype))
    return None


def properties_of(entry: TensorStorageMetadata) -> TensorProperties:
    """Return a tensor's noted properties without strides, which torch notes since 2.15, unread."""
    changes: dict[str, Any] = {"strides": None} if hasattr(entry.properties, "strides") else {}
    return replace(entry.properties, **changes)


def through_fsspec(kind: Callable[..., T], url: str, options: Mapping[str, Any]) -> T:
    """A reader or writer of torch's.

    Those of torch 2.6 take no options for fsspec, which then has them as defaults.
    """
    if not options or "kwargs" in inspect.signature(kind).parameters:
        return kind(url, **options)
    with patch.dict(fsspec.config.conf, {url.partition("://")[0]: dict(options)}):
        return kind(url)


def other_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with bytes that no test saves."""
    tensor.reshape(-1).view(torch.uint8).fill_(_OTHER if tensor.dtype is not torch.bool else 0)
    return tensor


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of any bit patterns that the dtype allows."""
    generator = torch.Generator().manual_seed(seed + 7)
    tensor = torch.empty(shape, dtype=dtype)
    raw = tensor.reshape(-1).view(torch.uint8)
    raw.copy_(
        torch.randint(
            0, 2 if dtype is torch.bool else 256, raw.shape, dtype=torch.uint8, generator=generator
        )
    )
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in order, as bytes."""
    plain = torch.empty(
        tensor.numel(), dtype=tensor.dtype
    )  # .contiguous() may leave strides that .view() refuses
    plain.copy_(tensor.detach().reshape(-1))
    return plain.view(torch.uint8).numpy().tobytes()


def assert_same(saved: Any, loaded: Any, where: str = "") -> None:
    """Equal in structure, types, dtypes, shapes and every bit."""
    if isinstance(saved, Mapping):
        assert isinstance(loaded, Mapping), where
        assert list(map(str, saved)) == list(map(str, loaded)), where
        for key, value in saved.items():
            assert_same(value, loaded[key], f"{where}[{key!r}]")
    elif isinstance(saved, (list, tuple)):
        assert type(saved) is type(loaded), where
        assert len(saved) == len(loaded), where
        for position, (one, other) in enumerate(zip(saved, loaded, strict=True)):
            assert_same(one, other, f"{where}[{position}]")
    elif isinstance(saved, DTensor):
        assert isinstance(loaded, DTensor), where
        assert (saved.shape, saved.placements) == (loaded.shape, loaded.placements), where
        assert_same(saved.to_local(), loaded.to_local(), where)
    elif isinstance(saved, ShardedTensor):
        assert isinstance(loaded, ShardedTensor), where
        for one, other in zip(saved.local_shards(), loaded.local_shards(), strict=True):
            assert one.metadata == other.metadata, where
            assert_same(one.tensor, other.tensor, where)
    elif isinstance(saved, torch.Tensor):
        assert isinstance(loaded, torch.Tensor), where
        assert_same_tensor(saved, loaded, where)
    else:
        assert type(saved) is type(loaded), f"{where}: {type(saved)} came back as {type(loaded)}"
        assert saved == loaded, where


def assert_same_tensor(saved: torch.Tensor, loaded: torch.Tensor, where: str) -> None:
    assert (saved.dtype, saved.shape) == (loaded.dtype, loaded.shape), where
    assert saved.layout == loaded.layout, where
    if saved.is_quantized:
        assert saved.qscheme() == loaded.qscheme(), where
        assert torch.equal(saved.int_repr(), loaded.int_repr()), where
        assert torch.equal(saved.dequantize(), loaded.dequantize()), where
    elif saved.layout is torch.strided:
        assert bits(saved) == bits(loaded), f"{where}: other bytes were loaded than were saved"
    else:
        assert torch.equal(saved.to_dense(), loaded.to_dense()), where
