"""Several ranks: sharded state of every kind, other world sizes, groups, and ranks that fail."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import MemoryStorageWriter
from tests.support.checkpoints.plans import SAVES, TorchPlanner
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    blank_of,
    comes_back,
)
from tests.support.processes.forks import forked_ranks, on_ranks, raised_by

# -- sharded state ---------------------------------------------------------------------------------


def _save(
    places: Places, writer: MemoryStorageWriter, state: State, name: str, **options: Any
) -> None:
    places.save(writer, state, name, **options)
    # From here on it is durable for all ranks; and no rank saves before all have loaded.
    dist.barrier(options.get("process_group"))


def _in_turn(step: int) -> dcp.DefaultSavePlanner | None:
    """The planner of a save: dcp_mem plans in turn with torch."""
    return TorchPlanner() if step % 2 else None


# -- over and over ---------------------------------------------------------------------------------


@on_ranks(2, timeout=100)
def test_a_hundred_saves_by_two_ranks_leave_nothing_behind(places: Places) -> None:
    saves, rank = 120, dist.get_rank()
    most = descriptors = 0
    with places.writer(keep_memory=2) as writer:
        for step in range(saves):
            state = {
                "w": torch.full((4096,), float(step)),
                f"own.{rank}": torch.full((64,), rank + step),
                "step": step,
            }
            dcp.save(
                state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=_in_turn(step)
            )
            if step == 20:
                writer.wait()  # what is being flushed is open for a while
                descriptors = len(os.listdir("/proc/self/fd"))
            dist.barrier()
            job = Path(places.memory, places.job)
            most = max(most, len([*job.rglob("*.slot"), *job.rglob("*.distcp")]))
            dist.barrier()
        writer.wait()
        growth = len(os.listdir("/proc/self/fd")) - descriptors
        dist.barrier()
        comes_back(places, f"step-{saves - 1}", state)
        dist.barrier()
    assert most <= 2 * (2 + 1)
    assert growth <= 4


@on_ranks(2)
def test_prepared_ranks_find_their_slots_ready(places: Places) -> None:
    rank = dist.get_rank()
    state = {f"own.{rank}": torch.full((1 << 18,), float(rank)), "w": torch.ones(5)}
    with places.writer(keep_memory=2) as writer:
        assert writer.prepare(state).wait(30)
        dist.barrier()
        job = Path(places.memory, places.job)
        before = {path.stat().st_ino for path in job.rglob("*.slot")}
        dist.barrier()
        for step in range(3):
            _save(places, writer, state, f"{step}")
            comes_back(places, f"{step}", state)
            dist.barrier()
        after = {path.stat().st_ino for path in [*job.rglob("*.slot"), *job.rglob("*.distcp")]}
        dist.barrier()
    assert len(before) == 2 * 3
    assert not after - before


# -- nodes -----------------------------------------------------------------------------------------


def _saves_on_two_nodes(places: Places) -> None:
    """Each rank with a memory root of its own, which makes it a node of its own."""
    rank = dist.get_rank()
    mine = Places(f"{places.memory}/node-{rank}", places.url)
    with contextlib.suppress(FileExistsError):
        os.mkdir(mine.memory, 0o700)
    state = {"w": torch.arange(20.0), f"own.{rank}": torch.full((9,), rank)}
    with mine.writer() as writer:
        for step in range(3):
            state["w"] += 1
            _save(mine, writer, state, f"{step}", planner=_in_turn(step))
            comes_back(mine, f"{step}", state, roads=("storage", "stock from storage"))
            reader = places.reader("storage", "")
            into = blank_of(state)
            dcp.load(into, storage_reader=reader)
            assert_same(state, into)
            dist.barrier()
        for held in ("0", "1", "2")[1:]:
            assert len(list(mine.directory("memory", held).glob("*.distcp"))) == 1


def test_two_nodes_make_a_checkpoint_durable_together(places: Places) -> None:
    forked_ranks(_saves_on_two_nodes, 2, places)
    comes_back(
        places, "2", {"own.0": torch.full((9,), 0), "own.1": torch.full((9,), 1)}, roads=ROADS[1::2]
    )


@on_ranks(2, timeout=60)
def test_a_node_that_has_no_room_for_the_catalog_fails_the_save_on_every_rank(
    places: Places,
) -> None:
    rank = dist.get_rank()
    mine = Places(f"{places.memory}/node-{rank}", places.url)
    os.mkdir(mine.memory, 0o700)
    errors, catalogs = [], Path(mine.memory, mine.job, ".catalogs")
    with mine.writer(persist=False) as writer:
        dcp.save({"a": 1}, checkpoint_id="first", storage_writer=writer)
        for road, save in SAVES.items():
            # Another structure each time: a known one has a catalog that nobody puts again.
            state = {road: torch.arange(20.0), f"own.{rank}": torch.full((9,), rank)}
            if rank == 1:
                catalogs.rename(f"{catalogs}.aside")
                catalogs.touch()
            bad = raised_by(
                functools.partial(save, state, checkpoint_id="bad", storage_writer=writer)
            )
            if rank == 1:
                catalogs.unlink()
                Path(f"{catalogs}.aside").rename(catalogs)
            errors.append(str(bad))
            save(state, checkpoint_id="good", storage_writer=writer)
            assert mine.directory("memory", "good").is_dir()
    assert all("Not a directory" in error for error in errors)
