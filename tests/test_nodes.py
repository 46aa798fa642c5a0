"""Several nodes on one machine: ranks with memory roots of their own."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_mem import MemoryStorageReader, MemoryStorageWriter, NoRecoverableCheckpoint
from dcp_mem.memory.job import JobMemory
from tests.launch import run_ranks


def _state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.arange(4096.0).view(64, 64) + value, mesh, [Shard(0)])
    return {"sharded": sharded, "replicated": torch.full((33,), value), "step": int(value)}


def _node_root(memory_root: Path, ranks_per_node: int) -> Path:
    return memory_root / f"node{dist.get_rank() // ranks_per_node}"


def _save_on_two_nodes(memory_root: Path, path: str) -> list[list[str]]:
    """What each node holds after two saves: the segments that lie there, and the state."""
    root = _node_root(memory_root, 2)
    writer = MemoryStorageWriter(path, memory=root, job="job")
    for step in (1, 2):
        dcp.save(_state(step), checkpoint_id=f"step-{step}", storage_writer=writer)
    newest, older = JobMemory(str(root), "job").held()
    files = sorted(name.name for name in Path(newest.directory).glob("*.distcp"))
    writer.close()
    return [[newest.name, older.name], files, [str(len(newest.manifest.nodes))]]


def _load(memory_root: Path, path: str, ranks_per_node: int) -> tuple[str, str, bool]:
    reader = MemoryStorageReader(path, memory=_node_root(memory_root, ranks_per_node), job="job")
    state = _state(0)
    dcp.load(state, storage_reader=reader)
    expected = _state(2)
    same = torch.equal(state["sharded"].full_tensor(), expected["sharded"].full_tensor()) and torch.equal(
        state["replicated"], expected["replicated"]
    )
    report = reader.report()
    return report.checkpoint_id, report.source, same and state["step"] == 2


def _load_from_memory_alone(memory_root: Path) -> list[str]:
    reader = MemoryStorageReader(memory=_node_root(memory_root, 2), job="job")
    try:
        dcp.load(_state(0), storage_reader=reader)
    except CheckpointException as error:
        return [type(failure[0]).__name__ for failure in error.failures.values()]
    return []


def test_every_node_gets_the_manifest_but_holds_only_its_own_segments(memory_root: Path, tmp_path: Path) -> None:
    held = run_ranks(_save_on_two_nodes, 4, memory_root, str(tmp_path / "run"))
    assert all(names == ["step-2", "step-1"] for names, _, _ in held)
    assert [file.split("_0-")[0] for file in held[0][1]] == ["__0", "__1"]
    assert [file.split("_0-")[0] for file in held[2][1]] == ["__2", "__3"]
    assert all(nodes == ["2"] for _, _, nodes in held)


def test_two_agents_commit_one_checkpoint_that_any_world_loads(memory_root: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run_ranks(_save_on_two_nodes, 4, memory_root, path)
    assert run_ranks(_load, 4, memory_root, path, 2) == [("step-2", "storage", True)] * 4
    shutil.rmtree(memory_root / "node1")
    assert run_ranks(_load, 2, memory_root, path, 1) == [("step-2", "storage", True)] * 2


def test_what_no_node_holds_whole_is_refused_on_all_ranks_alike(memory_root: Path, tmp_path: Path) -> None:
    run_ranks(_save_on_two_nodes, 4, memory_root, str(tmp_path / "run"))
    outcomes = run_ranks(_load_from_memory_alone, 4, memory_root)
    assert outcomes == [[NoRecoverableCheckpoint.__name__] * 4] * 4
