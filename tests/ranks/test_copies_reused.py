"""Copies in other nodes' memory: what hasn't changed since the earlier copy isn't sent.

Nodes are memory roots: each rank has the one of its node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_mem
from dcp_mem import MemoryStorageWriter
from dcp_mem.comm.transfer import CHUNK
from dcp_mem.format import names
from dcp_mem.replicating import earlier
from dcp_mem.replicating.earlier import EarlierCopy
from dcp_mem.runtime.session import open_session
from tests.support.channels import SentBytes
from tests.support.checkpoints.fine_tuning import (
    ADAPTER_NBYTES,
    BASE_NBYTES,
    LAYERS,
    Nodes,
    amounts,
    loads,
    save,
    saves_until_killed,
    sent_at_most,
    state_of,
    trained,
)
from tests.support.processes import kill_targets
from tests.support.processes.forks import forked_ranks

pytestmark = pytest.mark.timeout(120)

Spoil = Callable[["Nodes", MemoryStorageWriter], None]


@pytest.fixture
def nodes(memory_root: Path) -> Nodes:
    return Nodes(str(memory_root))


def _assert_copies_are_equal(nodes: Nodes, count: int, name: str, copies: int = 2) -> None:
    """Each segment has the same bytes wherever it lies, those between its items included."""
    found: dict[str, list[bytes]] = {}
    for node in range(count):
        (held,) = nodes.held(node).find(name)
        for segment in held.manifest.segments:
            path = Path(held.segment_path(segment.file))
            if path.exists():
                data = path.read_bytes()[: segment.nbytes]
                found.setdefault(segment.file, []).append(data)
    assert [len(one) for one in found.values()] == [copies] * count
    assert all(len(set(one)) == 1 for one in found.values())


# -- what is sent ----------------------------------------------------------------------------------


def _trains(nodes: Nodes, steps: int, options: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """For each save: bytes that this rank put on the wire, and all ranks' that were reported."""
    wire, found = SentBytes(), []
    with nodes.writer(**{"replicas": 1, **options}) as writer:
        for step in range(1, steps + 1):
            name = f"step-{step}"
            nbytes = wire.during(partial(save, writer, name, trained(step)))
            found.append((nbytes, *amounts(writer, name)))
    return found


@pytest.mark.parametrize("options", [{}, {"keep_memory": 3}], ids=str)
def test_copies_of_later_checkpoints_take_what_has_changed(
    nodes: Nodes, options: Mapping[str, Any]
) -> None:
    by_rank = forked_ranks(_trains, 2, nodes, 4, options)
    base_nbytes, adapters_nbytes = LAYERS * BASE_NBYTES, LAYERS * ADAPTER_NBYTES
    for first, *later in by_rank:
        assert first[0] > base_nbytes + adapters_nbytes
        assert first[2] == 0
        for nbytes, sent_nbytes, reused_nbytes in later:
            assert adapters_nbytes < nbytes < sent_at_most(adapters_nbytes)
            assert 2 * adapters_nbytes < sent_nbytes < 2 * sent_at_most(adapters_nbytes)
            assert 2 * base_nbytes < reused_nbytes + sent_nbytes
            assert reused_nbytes > 1.9 * base_nbytes
    _assert_copies_are_equal(nodes, 2, "step-4")


def test_two_copies_of_a_segment_take_what_has_changed_each(nodes: Nodes) -> None:
    for _, *later in forked_ranks(_trains, 3, nodes, 3, {"replicas": 2}):
        for nbytes, _, _ in later:
            assert nbytes < 2 * sent_at_most(LAYERS * ADAPTER_NBYTES)
    _assert_copies_are_equal(nodes, 3, "step-3", copies=3)


def _saves_what_changes(nodes: Nodes, changes: Sequence[Collection[str]]) -> list[tuple[int, int]]:
    wire, found, values = SentBytes(), [], dict(trained(0))
    with nodes.writer(replicas=1) as writer:
        save(writer, "first", values)
        for step, changed in enumerate(changes, 1):
            values.update(dict.fromkeys(changed, step))
            name = f"step-{step}"
            nbytes = wire.during(partial(save, writer, name, values))
            sizes = {"base": BASE_NBYTES, "adapter": ADAPTER_NBYTES, "note": 300}
            found.append((nbytes, sum(sizes[one.rpartition(".")[2]] for one in changed)))
    return found


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.sets(st.sampled_from(sorted(trained(0)))), min_size=1, max_size=4))
def test_whatever_changes_is_sent_and_little_else(
    nodes: Nodes, changes: Sequence[Collection[str]]
) -> None:
    for found in forked_ranks(_saves_what_changes, 2, nodes, changes):
        for nbytes, changed_nbytes in found:
            assert nbytes <= sent_at_most(changed_nbytes)
    _assert_copies_are_equal(nodes, 2, f"step-{len(changes)}")
    for node in range(2):
        shutil.rmtree(f"{nodes.root}/node{node}")


def _saves_in_two_shapes(nodes: Nodes) -> list[int]:
    found = []
    with nodes.writer(replicas=1) as writer:
        for step, name in ((1, "step-1"), (2, "step-2")):
            state = state_of(trained(0))
            if step == 2:  # all items lie elsewhere
                state = {f"rank{dist.get_rank()}.first": torch.zeros(100), **state}
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            writer.wait(name, "replicated", timeout=60)
            found.append(amounts(writer, name)[1])
    return found


def test_copies_of_another_layout_are_sent(nodes: Nodes) -> None:
    assert forked_ranks(_saves_in_two_shapes, 2, nodes) == [[0, 0]] * 2
    _assert_copies_are_equal(nodes, 2, "step-2")


def _saves_again(nodes: Nodes, step: int) -> tuple[int, int]:
    with nodes.writer(replicas=1) as writer:
        save(writer, f"step-{step}", trained(step))
        return amounts(writer, f"step-{step}")


def test_another_run_reuses_the_copies_of_the_one_before(nodes: Nodes) -> None:
    assert forked_ranks(_saves_again, 2, nodes, 1)[0][1] == 0
    assert forked_ranks(_saves_again, 2, nodes, 2)[0][1] > 1.9 * LAYERS * BASE_NBYTES
    _assert_copies_are_equal(nodes, 2, "step-2")


# -- what goes wrong -------------------------------------------------------------------------------


def _saves_beside(nodes: Nodes, spoil: Spoil) -> tuple[int, int]:
    with nodes.writer(replicas=1) as writer:
        save(writer, "step-1", trained(1))
        dist.barrier()
        if dist.get_rank() == 1:
            spoil(nodes, writer)
        save(writer, "step-2", trained(2))
        return amounts(writer, "step-2")


def _earlier_file(nodes: Nodes) -> str:
    """Path of the copy of rank 0's segment of step-1 on this rank's node."""
    (held,) = nodes.held(dist.get_rank()).find("step-1")
    return held.segment_path(names.segment_file(0, held.manifest.save_id))


def _flip(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    with Path(_earlier_file(nodes)).open("r+b") as file:
        file.seek(2 << 20)
        byte = file.read(1)
        file.seek(2 << 20)
        file.write(bytes([byte[0] ^ 1]))


def _remove(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    Path(_earlier_file(nodes)).unlink()


def _remove_checksums(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    path = Path(_earlier_file(nodes))
    (path.parent / names.checksums_file(path.name)).write_bytes(b"{}")


def _fail_to_read(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    def fill(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
        raise EOFError("cut off")

    earlier.fill = fill  # type: ignore[attr-defined]


def _evict_halfway(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    """Have the earlier checkpoint evicted, and its slots claimed, while it is copied from."""
    refill, path = EarlierCopy.refill, _earlier_file(nodes)

    def evicting(self: EarlierCopy, *arguments: Any) -> Any:
        memory = nodes.held(dist.get_rank())
        for held in memory.find("step-1"):
            inode = os.stat(path).st_ino
            assert memory.evict(held)
            session = open_session(writer.settings)
            assert session is not None
            slots = session.slots
            claimed = [slots.take(CHUNK, "") for _ in range(2)]
            assert inode not in {slot.inode for slot in claimed}
            for slot in claimed:
                slots.abandon(slot)
        return refill(self, *arguments)

    EarlierCopy.refill = evicting  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize(
    ("spoil", "least_resent"),
    [
        (_flip, 1 << 20),
        (_remove, LAYERS * BASE_NBYTES),
        (_remove_checksums, LAYERS * BASE_NBYTES),
        (_fail_to_read, LAYERS * BASE_NBYTES),
        (_evict_halfway, 0),
    ],
)
def test_a_copy_is_whole_whatever_becomes_of_the_earlier_one(
    nodes: Nodes, spoil: Spoil, least_resent: int
) -> None:
    (sent_nbytes, reused_nbytes), _ = forked_ranks(_saves_beside, 2, nodes, spoil)
    assert sent_nbytes >= 2 * LAYERS * ADAPTER_NBYTES + least_resent
    assert reused_nbytes > 0  # from rank 1 to rank 0, nothing has changed
    if not least_resent:
        assert sent_nbytes < 2 * sent_at_most(LAYERS * ADAPTER_NBYTES)
    _assert_copies_are_equal(nodes, 2, "step-2")


@pytest.mark.parametrize("point", ["replicate.reused", "replicate.chunk"])
def test_a_kill_amid_reuse_leaves_the_earlier_copies_whole(nodes: Nodes, point: str) -> None:
    ranks = kill_targets.forked(
        saves_until_killed,
        2,
        nodes,
        {"replicas": 1},
        1,
        point,
        env={"DCP_MEM_REPLICATION_TIMEOUT": "3"},
    )
    assert ranks.join(killed={1})[0] == "ReplicationFailed"
    _assert_copies_are_equal(nodes, 2, "step-1")
    sent, reused = forked_ranks(_saves_again, 2, nodes, 3)[0]
    assert sent < 2 * sent_at_most(LAYERS * ADAPTER_NBYTES)
    assert reused > 1.9 * LAYERS * BASE_NBYTES
    _assert_copies_are_equal(nodes, 2, "step-3")


def test_a_lost_node_is_restored_from_a_copy_that_was_sent_in_part(nodes: Nodes) -> None:
    forked_ranks(_trains, 2, nodes, 3, {})
    shutil.rmtree(nodes.memory(0))
    assert forked_ranks(loads, 2, nodes, 3) == [[], []]
