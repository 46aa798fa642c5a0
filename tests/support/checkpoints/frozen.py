"""A job with `frozen=`: a base that is declared frozen and an adapter that each save changes."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import dcp_mem
from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.jobs import Job, wait_until
from tests.support.checkpoints.plans import save_by

State = dict[str, torch.Tensor]


def base_and_adapter(**shapes: tuple[int, ...]) -> State:
    """Tensors of random values, by name with `_` for each dot; the same in each process."""
    generator = torch.Generator().manual_seed(7)
    return {
        name.replace("_", "."): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def save(
    writer: MemoryStorageWriter, state: Any, step: int, road: str = "dcp_mem.save", **options: Any
) -> Any:
    """Save as `step-<step>`, by a road of `save_by`; an adapter gets the number of the step."""
    if "adapter" in state:
        state["adapter"].fill_(step)
    return save_by(road, writer, dict(state), f"step-{step}", **options)


def assert_holds(
    job: Job, state: State, step: int, *, root: Path | None = None, is_whole: bool = True
) -> None:
    """Load by our reader from memory, and by torch's, where a checkpoint lies there whole.

    root: of a storage, which is looked at instead.
    """
    directory = (root or job.directory) / f"step-{step}"
    if root is None:
        _assert_loads(state, checkpoint_id=f"step-{step}", storage_reader=job.reader())
    if is_whole:
        wait_until((directory / ".metadata").exists, "metadata for stock readers")
        _assert_loads(state, checkpoint_id=str(directory))


def _assert_loads(expected: State, **where: Any) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    (dcp_mem.load if "storage_reader" in where else dcp.load)(found, **where)
    for name, tensor in expected.items():
        here, there = (
            one.to_local() if isinstance(one, DTensor) else one for one in (found[name], tensor)
        )
        assert here.shape == there.shape, name
        assert torch.equal(_bytes_of(here), _bytes_of(there)), name


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().reshape(-1).contiguous()
    return flat.view(torch.uint8) if math.prod(tensor.shape) else torch.zeros(0, dtype=torch.uint8)


def frozen_file(job: Job, step: int) -> Path:
    """Rank 0's segment of frozen tensors of a checkpoint."""
    (file,) = _frozen_files(job, step, 0)
    return file


def inodes_of(job: Job, step: int, rank: int = 0) -> list[int]:
    """That of a rank's segment of frozen tensors, where the checkpoint has one."""
    return [path.stat().st_ino for path in _frozen_files(job, step, rank)]


def frozen_links(job: Job, step: int, rank: int = 0) -> int:
    """How many checkpoints share the frozen tensors of this one; 0 where it has none."""
    return sum(path.stat().st_nlink for path in _frozen_files(job, step, rank))


def frozen_inodes(job: Job) -> set[int]:
    """Those of the segments of frozen tensors of all checkpoints."""
    return {path.stat().st_ino for path in job.directory.glob("step-*/__*_1-*.distcp")}


def _frozen_files(job: Job, step: int, rank: int) -> list[Path]:
    return list((job.directory / f"step-{step}").glob(f"__{rank}_1-*.distcp"))
