"""`frozen=` with copies in other nodes' memory: these are made once, and shared there as well.

Nodes are memory roots: each rank has the one of its node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_mem
from dcp_mem import MemoryStorageReader, MemoryStorageWriter, State
from tests.support.channels import SentBytes
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.held import (
    names_in,
    rejected_in,
    segments_in,
    sizes_in,
    unlucky_samples,
    wait_for_comparisons,
)
from tests.support.checkpoints.jobs import occupied, wait_for_spare_slots
from tests.support.processes import faults, kill_targets
from tests.support.processes.forks import forked_ranks, raised_by

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
BASE_NBYTES, ADAPTER_NBYTES = 8 * MIB, MIB
SLOT_MORE = 4 * MIB
"""What a slot may take beyond its segment: room for a tail, and whole huge pages."""
_QUICK = {"DCP_MEM_REPLICATION_TIMEOUT": "5", "DCP_MEM_TIMEOUT": "30"}


class Own(DefaultSavePlanner):
    """A planner of the user's: torch plans."""


@dataclass(frozen=True)
class Nodes:
    """Where the nodes' memory lies."""

    root: str

    def memory(self, node: int | None = None) -> str:
        return f"{self.root}/node{dist.get_rank() if node is None else node}"

    def writer(self, **options: Any) -> MemoryStorageWriter:
        chosen = {"replicas": 1, "keep_memory": 2, "frozen": "*.base.*", **options}
        return MemoryStorageWriter(memory_root=self.memory(), job="job", **chosen)

    def held(self, node: int | None = None) -> Path:
        """The job's directory on a node."""
        return Path(self.memory(node), "job")


@pytest.fixture
def nodes(memory_root: Path) -> Nodes:
    return Nodes(str(memory_root))


def _tensors(rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return what a rank saves: a base of two tensors, and an adapter."""
    number = dist.get_rank() if rank is None else rank
    half = torch.arange(BASE_NBYTES // 8, dtype=torch.int32)
    return {
        f"rank{number}.base.a": half + 7 * number,
        f"rank{number}.base.b": half * 3 + number,
        f"rank{number}.adapter": torch.zeros(ADAPTER_NBYTES // 4, dtype=torch.int32),
    }


def _save(writer: MemoryStorageWriter, state: dict[str, Any], step: int, road: str = "") -> None:
    state[f"rank{dist.get_rank()}.adapter"].fill_(step)
    name = f"step-{step}"
    if road == "torch plans":
        dcp.save(state, checkpoint_id=name, storage_writer=writer, planner=Own())
    elif road == "asynchronous":
        dcp_mem.async_save(state, checkpoint_id=name, storage_writer=writer).result()
    else:
        dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
    writer.wait(name, "replicated", timeout=60)


def _sent(writer: MemoryStorageWriter, step: int) -> tuple[int, int]:
    status = next(one for one in writer.status() if one.name == f"step-{step}")
    assert status.state is State.REPLICATED
    return status.replication_sent_nbytes, status.replication_reused_nbytes


def _second_inodes(job: Path) -> dict[int, set[int]]:
    """Return the inodes of the segments of frozen items on a node, by the rank that saved them."""
    found: dict[int, set[int]] = {}
    for name in names_in(job):
        for path in segments_in(job / name):
            rank, number = map(int, path.name.removeprefix("__").partition("-")[0].split("_"))
            if number == 1:
                found.setdefault(rank, set()).add(path.stat().st_ino)
    return found


def _files(nodes: Nodes, count: int, name: str) -> dict[str, list[bytes]]:
    """Return the bytes of each segment of a checkpoint, from each node that has it."""
    found: dict[str, list[bytes]] = {}
    for node in range(count):
        directory = nodes.held(node) / name
        for file, nbytes in sizes_in(directory).items():
            if (directory / file).exists():
                data = (directory / file).read_bytes()[:nbytes]
                found.setdefault(file, []).append(data)
    return found


def _assert_copies_are_equal(nodes: Nodes, count: int, name: str, copies: int = 2) -> None:
    found = _files(nodes, count, name)
    assert len(found) == 2 * count
    assert {len(one) for one in found.values()} == {copies}
    assert all(len(set(one)) == 1 for one in found.values())


def _differs(nodes: Nodes, state: dict[str, Any], step: int) -> list[str]:
    """Load a checkpoint; return what isn't as it was saved."""
    out = {name: torch.full_like(value, -1) for name, value in state.items()}
    reader = MemoryStorageReader(memory_root=nodes.memory(), job="job", verify=True)
    dcp_mem.load(out, checkpoint_id=f"step-{step}", storage_reader=reader)
    return [name for name, value in state.items() if not torch.equal(out[name], value)]


# -- one copy on each node -------------------------------------------------------------------------


def _trains(nodes: Nodes, steps: int, road: str, options: Mapping[str, Any]) -> dict[str, Any]:
    wire, state, sent = SentBytes(), _tensors(), []
    with nodes.writer(**options) as writer:
        for step in range(1, steps + 1):
            nbytes = wire.during(partial(_save, writer, state, step, road))
            sent.append((nbytes, *_sent(writer, step)))
        wait_for_spare_slots()
        dist.barrier()
        return {
            "sent": sent,
            "inodes": {rank: len(found) for rank, found in _second_inodes(nodes.held()).items()},
            "allocated": occupied(nodes.held()),
            "differs": _differs(nodes, state, steps),
        }


@pytest.mark.parametrize("road", ["dcp_mem", "torch plans", "asynchronous"])
@pytest.mark.parametrize("keep", [1, 3])
def test_each_node_has_one_copy_of_what_is_frozen(nodes: Nodes, road: str, keep: int) -> None:
    for found in forked_ranks(_trains, 2, nodes, keep + 4, road, {"keep_memory": keep}):
        assert found["inodes"] == {0: 1, 1: 1}
        assert found["differs"] == []
        first, *later = found["sent"]
        assert first[0] > BASE_NBYTES
        for nbytes, sent_nbytes, reused_nbytes in later[road == "asynchronous" :]:
            assert ADAPTER_NBYTES < nbytes < 1.1 * ADAPTER_NBYTES + MIB
            assert sent_nbytes < 2 * (1.1 * ADAPTER_NBYTES + MIB)
            assert reused_nbytes > 2 * BASE_NBYTES
        checkpoints = max(keep, 2) + 2
        most = 2 * (BASE_NBYTES + SLOT_MORE + checkpoints * (ADAPTER_NBYTES + SLOT_MORE))
        assert found["allocated"] < most
    _assert_copies_are_equal(nodes, 2, f"step-{keep + 4}")


def test_two_copies_are_shared_on_both_nodes(nodes: Nodes) -> None:
    for found in forked_ranks(_trains, 3, nodes, 4, "dcp_mem", {"replicas": 2}):
        assert found["inodes"] == {0: 1, 1: 1, 2: 1}
        assert all(nbytes < 2 * (1.1 * ADAPTER_NBYTES + MIB) for nbytes, *_ in found["sent"][1:])
    _assert_copies_are_equal(nodes, 3, "step-4", copies=3)


def _keeps_within(nodes: Nodes, limit: int) -> int:
    most, state = 0, _tensors()
    with nodes.writer(keep_memory=1, memory_limit=limit) as writer:
        for step in range(1, 6):
            if step == 4:
                state[f"rank{dist.get_rank()}.base.a"].add_(1)
            _save(writer, state, step)
            most = max(most, occupied(nodes.held()))
        dist.barrier()
    return most


def test_a_memory_limit_holds_with_copies_of_what_is_frozen(nodes: Nodes) -> None:
    # While the base is copied anew there are two of it, of this rank's and of the other one's.
    limit = 2 * (2 * (BASE_NBYTES + SLOT_MORE) + 3 * (ADAPTER_NBYTES + SLOT_MORE))
    assert max(forked_ranks(_keeps_within, 2, nodes, limit)) <= limit
    _assert_copies_are_equal(nodes, 2, "step-5")


def _runs_again(nodes: Nodes, first: int) -> list[tuple[int, int]]:
    state, found = _tensors(), []
    with nodes.writer() as writer:
        for step in range(first, first + 3):
            _save(writer, state, step)
            found.append(_sent(writer, step))
        assert {len(one) for one in _second_inodes(nodes.held()).values()} == {1}
        dist.barrier()
    return found


def test_a_restarted_job_sends_nothing_of_the_base_and_shares_again(nodes: Nodes) -> None:
    for first in (1, 4):
        for found in forked_ranks(_runs_again, 2, nodes, first):
            for sent_nbytes, reused_nbytes in found[first == 1 :]:
                assert sent_nbytes < 2 * (1.1 * ADAPTER_NBYTES + MIB)
                assert reused_nbytes > 1.9 * BASE_NBYTES
    _assert_copies_are_equal(nodes, 2, "step-6")


# -- wrong declarations ----------------------------------------------------------------------------


def _changes(nodes: Nodes, changes: Sequence[Collection[str]], keep: int) -> list[str]:
    """Change tensors before saves, on rank 1 past their counters; return what differs in loads."""
    rank, state, wrong = dist.get_rank(), _tensors(), []
    with nodes.writer(keep_memory=keep) as writer:
        for step, changed in enumerate(changes, 1):
            for one in changed:
                tensor = state.get(f"rank{rank}.{one}")
                if tensor is not None:
                    (tensor.data if rank else tensor).add_(step)
            _save(writer, state, step)
            dist.barrier()
            wrong += _differs(nodes, state, step)
            dist.barrier()
    return wrong


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sets(st.sampled_from(["base.a", "base.b"])), min_size=1, max_size=5),
    st.integers(1, 3),
)
@example([set(), set(), {"base.a"}, set(), {"base.b"}, {"base.a"}, set()], 2)
def test_any_changes_are_in_the_copies(
    nodes: Nodes, changes: Sequence[Collection[str]], keep: int
) -> None:
    assert forked_ranks(_changes, 2, nodes, changes, keep) == [[], []]
    _assert_copies_are_equal(nodes, 2, f"step-{len(changes)}")
    for node in range(2):
        shutil.rmtree(f"{nodes.root}/node{node}")


def _changes_unnoticed(nodes: Nodes) -> list[str]:
    rank, state = dist.get_rank(), _tensors()
    with unlucky_samples(), nodes.writer(keep_memory=12) as writer:
        for step in range(1, 19):
            if step == 10 and rank == 1:
                state["rank1.base.a"].data[12345] = 77
            raised_by(partial(_save, writer, state, step))  # what is rejected leaves memory
            wait_for_comparisons()
            dist.barrier()
        rejected = rejected_in(nodes.held())
        return [name for name in names_in(nodes.held()) if name not in rejected]


def test_the_nodes_with_copies_learn_which_checkpoints_are_stale(nodes: Nodes) -> None:
    # The comparison behind step-9 has found nothing, and that behind step-17 the change.
    for newest, *others in forked_ranks(_changes_unnoticed, 2, nodes):
        assert newest == "step-18"
        assert "step-9" in others
        assert not {f"step-{step}" for step in range(10, 18)}.intersection(others)
    _assert_copies_are_equal(nodes, 2, "step-18")


# -- what goes wrong -------------------------------------------------------------------------------


def _loads(nodes: Nodes, step: int) -> list[str]:
    state = _tensors()
    state[f"rank{dist.get_rank()}.adapter"].fill_(step)
    found = _differs(nodes, state, step)
    dist.barrier()
    return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_restored_from_copies_that_were_shared(nodes: Nodes, lost: int) -> None:
    forked_ranks(_trains, 2, nodes, 4, "dcp_mem", {})
    shutil.rmtree(nodes.memory(lost))
    assert forked_ranks(_loads, 2, nodes, 4) == [[], []]


def _loads_and_goes_on(nodes: Nodes) -> list[str]:
    found = _loads(nodes, 4)
    state = _tensors()
    with nodes.writer() as writer:
        for step in (5, 6):
            _save(writer, state, step)
        dist.barrier()
    return found


def test_copies_are_made_again_after_a_loss_those_of_what_is_frozen_too(nodes: Nodes) -> None:
    forked_ranks(_trains, 2, nodes, 4, "dcp_mem", {})
    shutil.rmtree(nodes.memory(0))
    assert forked_ranks(_loads_and_goes_on, 2, nodes) == [[], []]
    _assert_copies_are_equal(nodes, 2, "step-6")
    shutil.rmtree(nodes.memory(1))
    assert forked_ranks(_loads, 2, nodes, 6) == [[], []]


def _saves_beside(nodes: Nodes, spoil: Callable[[Nodes], None]) -> tuple[int, int]:
    state = _tensors()
    with nodes.writer(keep_memory=1) as writer:
        for step in (1, 2):
            _save(writer, state, step)
        dist.barrier()
        if dist.get_rank() == 1:
            spoil(nodes)
        _save(writer, state, 3)
        dist.barrier()
        return _sent(writer, 3)


def _remove(nodes: Nodes) -> None:
    """Remove all names of the copy of rank 0's segment that lies here."""
    for path in nodes.held().glob("step-*/__0_1-*.distcp"):
        path.unlink()


def test_a_copy_that_is_gone_is_made_again(nodes: Nodes) -> None:
    (sent_nbytes, _), _ = forked_ranks(_saves_beside, 2, nodes, _remove)
    assert sent_nbytes > BASE_NBYTES
    _assert_copies_are_equal(nodes, 2, "step-3")


def _link_fails(nodes: Nodes) -> list[str]:
    state, link, found = _tensors(), os.link, []

    def fails(path: str, name: str, **options: Any) -> None:
        if "__0_1-" in name:
            raise FileNotFoundError(path)
        link(path, name, **options)

    with nodes.writer() as writer:
        _save(writer, state, 1)
        dist.barrier()
        if dist.get_rank() == 1:
            os.link = fails  # type: ignore[assignment]
        error = raised_by(lambda: _save(writer, state, 2))
        found.append(type(error).__name__)
        os.link = link
        dist.barrier()
        _save(writer, state, 3)
        dist.barrier()
    return found


def test_a_copy_that_is_gone_just_then_fails_one_replication(nodes: Nodes) -> None:
    assert forked_ranks(_link_fails, 2, nodes, env=_QUICK) == [["ReplicationFailed"]] * 2
    _assert_copies_are_equal(nodes, 2, "step-3")


def _saves_until_killed(nodes: Nodes, point: str) -> str:
    state, writer = _tensors(), nodes.writer()
    _save(writer, state, 1)
    _save(writer, state, 2)
    if dist.get_rank() == 1:
        faults.arm(f"{point}:kill:1")
    error = raised_by(lambda: _save(writer, state, 3))
    return type(error).__name__


@pytest.mark.parametrize("point", ["frozen.shared", "replicate.started", "replicate.chunk"])
def test_a_kill_while_copies_are_shared_leaves_the_earlier_ones_whole(
    nodes: Nodes, point: str
) -> None:
    ranks = kill_targets.forked(_saves_until_killed, 2, nodes, point, env=_QUICK)
    assert ranks.join(killed={1})[0] == "ReplicationFailed"
    _assert_copies_are_equal(nodes, 2, "step-2")
    forked_ranks(_runs_again, 2, nodes, 4)
    _assert_copies_are_equal(nodes, 2, "step-6")


def test_damage_of_a_shared_copy_is_found_by_a_load(nodes: Nodes) -> None:
    forked_ranks(_trains, 2, nodes, 3, "dcp_mem", {})
    directory = nodes.held(1) / "step-3"
    (second,) = directory.glob("__0_1-*.distcp")
    flip(second, sizes_in(directory)[second.name] // 2)
    shutil.rmtree(nodes.memory(0))
    for error in forked_ranks(_refused, 2, nodes):
        assert "CRC32C" in error or "damaged" in error


def _refused(nodes: Nodes) -> str:
    error = raised_by(lambda: _loads(nodes, 3))
    assert error is not None
    return f"{error} {error.__cause__}"
