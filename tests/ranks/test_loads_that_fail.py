"""Loads that fail: no rank waits, no lease stays, and no state is of two checkpoints."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter, NotOfOneSave
from tests.support.processes.forks import forked_ranks, in_process, on_ranks, raised_by

_ENV = {"DCP_MEM_TIMEOUT": "60"}
_SOON_SECONDS = 30.0


def _writer(root: str) -> MemoryStorageWriter:
    return MemoryStorageWriter(None, memory_root=root, job="job", keep_memory=2)


def _reader(root: str) -> MemoryStorageReader:
    return MemoryStorageReader(None, memory_root=root, job="job")


# -- errors that can't be pickled ------------------------------------------------------------------


class _Unpicklable(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def _refuse() -> NoReturn:
    raise _Unpicklable("can't be", "unpickled")


class _Refusing:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _load_what_one_rank_cannot_unpickle(root: str) -> tuple[str, float, str]:
    own: dict[str, Any] = {"x": torch.ones(8)}
    with _writer(root) as writer:
        dcp.save({**own, "y": 1}, checkpoint_id="good", storage_writer=writer)
        if dist.get_rank() == 1:
            own["refusing"] = _Refusing()
        dcp.save(own, checkpoint_id="bad", storage_writer=writer)
    dist.barrier()
    started = time.monotonic()
    error = raised_by(lambda: dcp.load(own, checkpoint_id="bad", storage_reader=_reader(root)))
    seconds = time.monotonic() - started
    dist.barrier()
    into = {"x": torch.zeros(8)}
    afterwards = raised_by(
        lambda: dcp.load(into, checkpoint_id="good", storage_reader=_reader(root))
    )
    return str(error), seconds, str(afterwards)


def test_an_error_that_cannot_be_pickled_ends_the_load_on_all_ranks(memory_root: Path) -> None:
    found = forked_ranks(
        _load_what_one_rank_cannot_unpickle, 2, str(memory_root), timeout=150, env=_ENV
    )
    for error, seconds, afterwards in found:
        assert "can't be unpickled" in error, found
        assert seconds < _SOON_SECONDS, found
        assert afterwards == "None", found


# -- older checkpoints -----------------------------------------------------------------------------


def _save_old_and_damaged_new(root: str) -> None:
    with _writer(root) as writer:
        dcp.save({"w": torch.full((400_000,), 1.0)}, checkpoint_id="old", storage_writer=writer)
        new = {"w": torch.full((400_000,), 2.0), "x": torch.full((400_000,), 2.0)}
        dcp.save(new, checkpoint_id="new", storage_writer=writer)
        directory = Path(root, "job", "new")
        until = time.monotonic() + 60
        while not list(directory.glob(".dcp_mem/checksums-*.json")):
            assert time.monotonic() < until
            time.sleep(0.05)
    (segment,) = directory.glob("__*.distcp")
    data = bytearray(segment.read_bytes())
    data[len(data) // 4] ^= 1  # of w
    segment.write_bytes(data)


@pytest.mark.parametrize("which", ["dcp.load", "dcp_mem.load", "strict=False"])
@in_process
def test_a_partial_load_never_mixes_a_damaged_checkpoint_with_an_older_one(
    memory_root: Path, which: str
) -> None:
    root = str(memory_root)
    _save_old_and_damaged_new(root)

    def load(into: dict[str, Any]) -> None:
        if which == "strict=False":
            dcp_mem.load(into, storage_reader=_reader(root), strict=False)
            return
        planner = DefaultLoadPlanner(allow_partial_load=True)
        act: Any = dcp.load if which == "dcp.load" else dcp_mem.load
        act(into, storage_reader=_reader(root), planner=planner)

    both = {"w": torch.zeros(400_000), "x": torch.zeros(400_000)}
    error = raised_by(lambda: load(both))
    assert isinstance(error, NotOfOneSave), error
    assert error.lacking == ("x",)
    for into in ({"w": torch.zeros(400_000)}, {"w": torch.zeros(400_000), "y": torch.ones(3)}):
        load(into)
        assert into["w"].unique().tolist() == [1.0]


class _Choosing(DefaultLoadPlanner):
    keys = "of the user's own"


@in_process
def test_a_planner_with_an_attribute_of_its_own_falls_back_to_an_older_checkpoint(
    memory_root: Path,
) -> None:
    root = str(memory_root)
    _save_old_and_damaged_new(root)
    into = {"w": torch.zeros(400_000)}
    dcp.load(into, storage_reader=_reader(root), planner=_Choosing())
    assert into["w"].unique().tolist() == [1.0]


# -- leases ----------------------------------------------------------------------------------------


class _Raising(DefaultLoadPlanner):
    def finish_plan(self, new_plan: Any) -> NoReturn:
        raise OSError("finish_plan has failed")


@pytest.mark.parametrize("planner", [None, _Raising])
@on_ranks(2, timeout=150, env=_ENV)
def test_a_load_that_cannot_be_planned_keeps_no_lease(
    memory_root: Path, planner: type[DefaultLoadPlanner] | None
) -> None:
    root = str(memory_root)
    with _writer(root) as writer:
        dcp.save({"x": torch.ones(8)}, checkpoint_id="a", storage_writer=writer)
    dist.barrier()
    files = list(Path(root, "job", "a").rglob("*"))
    kept = _reader(root)
    into = {"x": torch.zeros(8)}
    if planner is None and dist.get_rank() == 1:
        into["y"] = torch.zeros(3)  # which the checkpoint lacks

    def load(reader: MemoryStorageReader) -> None:
        given = None if planner is None else planner()
        dcp.load(into, storage_reader=reader, planner=given)

    assert raised_by(lambda: load(kept)) is not None
    assert raised_by(lambda: load(_reader(root))) is not None
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:  # to ask is to hold the lease for a moment
        assert not [one for one in files if one.is_file() and _is_leased(one)]
    kept.close()


def _is_leased(path: Path) -> bool:
    """Return whether a process reads, flushes or stages this file right now."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@in_process
def test_an_id_of_a_load_that_failed_early_is_not_that_of_the_next_load(memory_root: Path) -> None:
    root = str(memory_root)
    with _writer(root) as writer:
        for name in ("a", "b"):
            dcp.save({"x": torch.ones(8)}, checkpoint_id=name, storage_writer=writer)
    reader = _reader(root)
    reader.reset("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_mem.reader.dcp_call", _refuse)
        with pytest.raises(TypeError):
            reader.read_metadata()
    into = {"x": torch.zeros(8)}
    dcp.load(into, storage_reader=reader)
    assert reader.report().checkpoint_id == "b"


# -- copies on other nodes -------------------------------------------------------------------------


def _load_what_one_node_has_damaged(root: str) -> tuple[str, str]:
    rank = dist.get_rank()
    node = os.path.join(root, str(rank))
    os.makedirs(node, mode=0o700)
    state = {f"x{rank}": torch.full((400_000,), 1.0 + rank)}
    with MemoryStorageWriter(None, memory_root=node, job="job", replicas=1) as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
        writer.wait("a", dcp_mem.State.REPLICATED)
        directory = Path(node, "job", "a")
        until = time.monotonic() + 60
        while len(list(directory.glob(".dcp_mem/checksums-*.json"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
    if rank == 0:
        (segment,) = directory.glob("__0_*.distcp")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
    dist.barrier()
    into = {f"x{rank}": torch.zeros(400_000)}
    reader = MemoryStorageReader(None, memory_root=node, job="job")
    dcp.load(into, checkpoint_id="a", storage_reader=reader)
    assert into[f"x{rank}"].unique().tolist() == [1.0 + rank]
    return reader.report().checkpoint_id, "\n".join(reader.report().passed_over)


def test_damage_on_a_node_that_has_everything_is_made_good_by_the_other_nodes_copy(
    memory_root: Path,
) -> None:
    found = forked_ranks(
        _load_what_one_node_has_damaged, 2, str(memory_root), timeout=200, env=_ENV
    )
    for name, passed_over in found:
        assert name == "a"
        assert "CRC32C" in passed_over


def _load_what_leaves_a_nodes_memory(root: str, path: str, shared: bool) -> tuple[int, str]:
    rank = dist.get_rank()
    node = os.path.join(root, str(rank))
    os.makedirs(node, mode=0o700)
    state = {f"x{rank}": torch.full((400_000,), 1.0 + rank)}
    with MemoryStorageWriter(path, memory_root=node, job="job") as writer:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
        writer.wait("a")
    dist.barrier()
    leased, flock = list[str](), fcntl.flock

    def leave(descriptor: int, operation: int) -> None:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        if rank == 1 and not leased and file.endswith("/a/.dcp_mem/manifest.json"):
            leased.append(file)
            shutil.rmtree(Path(file).parents[1])
        flock(descriptor, operation)

    # Rank 1's segment is needed by rank 0 alone, or by both.
    into = {name: torch.zeros(400_000) for name in ("x0", "x1") if rank == 0 or shared}
    into = into or {"x0": torch.zeros(400_000)}
    reader = MemoryStorageReader(path, memory_root=node, job="job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", leave)
        dcp_mem.load(into, checkpoint_id="a", storage_reader=reader)
    for name, tensor in into.items():
        assert tensor.unique().tolist() == [1.0 + int(name[1])]
    return len(leased), "\n".join(reader.report().passed_over)


@pytest.mark.parametrize("shared", [False, True])
def test_what_leaves_a_nodes_memory_as_a_load_begins_comes_from_elsewhere(
    memory_root: Path, tmp_path: Path, shared: bool
) -> None:
    found = forked_ranks(
        _load_what_leaves_a_nodes_memory,
        2,
        str(memory_root),
        str(tmp_path),
        shared,
        timeout=200,
        env=_ENV,
    )
    assert found[1][0] >= 1
    for _, passed_over in found:
        assert "left this node's memory" in passed_over, found
