"""Copies and parity in other nodes' memory: what hasn't changed since the earlier ones isn't sent.

Nodes are memory roots: each rank has the one of its node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_mem
from dcp_mem import MemoryStorageWriter, parity
from dcp_mem.common.values import Outcome
from dcp_mem.format import names
from dcp_mem.replicating.earlier import Deciding, EarlierFile, EarlierSegment
from dcp_mem.runtime.session import open_session
from tests.support.channels import SentBytes
from tests.support.checkpoints.damage import flip
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

Spoil = Callable[[Nodes, MemoryStorageWriter], None]
BASES, ADAPTERS = LAYERS * BASE_NBYTES, LAYERS * ADAPTER_NBYTES


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What other nodes get, and from how many ranks."""

    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    copies: int = 1

    def check(self, nodes: Nodes, name: str) -> None:
        """What lies on the nodes is what the ranks have saved."""
        held = [nodes.held(node).find(name)[0] for node in range(self.ranks)]
        assert {one.replication.outcome for one in held} == {Outcome.REPLICATED}
        if "redundancy" in self.options:
            _assert_parity_is_right(held)
        else:
            _assert_copies_are_equal(held, self.copies + 1)


COPIES = Kind(ranks=2, options={"replicas": 1})
PARITY = Kind(ranks=4, options={"redundancy": parity(3)})
KINDS = {
    "copies": COPIES,
    "copies of three checkpoints": Kind(ranks=2, options={"replicas": 1, "keep_memory": 3}),
    "two copies": Kind(ranks=3, options={"replicas": 2}, copies=2),
    "parity": PARITY,
}
every_kind = pytest.mark.parametrize("kind", [COPIES, PARITY], ids=["copies", "parity"])


@pytest.fixture
def nodes(memory_root: Path) -> Nodes:
    return Nodes(str(memory_root))


def _assert_copies_are_equal(held: Sequence[Any], copies: int) -> None:
    """Each segment has the same bytes wherever it lies, those between its items included."""
    for segment in held[0].manifest.segments:
        paths = [Path(one.segment_path(segment.file)) for one in held]
        found = [one.read_bytes()[: segment.nbytes] for one in paths if one.exists()]
        assert (len(found), len(set(found))) == (copies, 1)


def _assert_parity_is_right(held: Sequence[Any]) -> None:
    """All parity of a checkpoint is the XOR of the shares that its records name."""
    segments = {
        segment.rank: np.fromfile(held[segment.rank].segment_path(segment.file), np.uint8)
        for segment in held[0].manifest.segments
    }
    covered = dict.fromkeys(segments, 0)
    for one in held:
        for file, record in one.stripes().items():
            expected = np.zeros(record.stripe.nbytes, np.uint8)
            for share in record.stripe.shares:
                nbytes = share.stop - share.start
                covered[share.rank] += nbytes
                expected[share.place : share.place + nbytes] ^= segments[share.rank][
                    share.start : share.stop
                ]
            found = np.fromfile(one.segment_path(file), np.uint8)[: record.stripe.nbytes]
            assert np.array_equal(found, expected)
    assert covered == {segment.rank: segment.nbytes for segment in held[0].manifest.segments}


# -- what is sent ----------------------------------------------------------------------------------


def _trains(nodes: Nodes, kind: Kind, steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each save: bytes that this rank put on the wire, and all ranks' that were reported."""
    wire, found = SentBytes(), []
    with nodes.writer(**kind.options) as writer:
        for step in steps:
            name = f"step-{step}"
            nbytes = wire.during(partial(save, writer, name, trained(step)))
            found.append((nbytes, *amounts(writer, name)))
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_later_checkpoints_another_runs_too_send_what_has_changed_and_restore_a_lost_node(
    nodes: Nodes, kind: Kind
) -> None:
    """The note, of 0 to 200 bytes, ends each segment elsewhere at each step."""
    first_run = forked_ranks(_trains, kind.ranks, nodes, kind, [1, 2, 3])
    second_run = forked_ranks(_trains, kind.ranks, nodes, kind, [4])
    for (first, *later), last in zip(first_run, second_run, strict=True):
        assert first[0] > kind.copies * (BASES + ADAPTERS)
        assert first[2] == 0
        for nbytes, sent_nbytes, reused_nbytes in [*later, *last]:
            all_of_them = kind.ranks * kind.copies
            assert kind.copies * ADAPTERS < nbytes < kind.copies * sent_at_most(ADAPTERS)
            assert all_of_them * ADAPTERS < sent_nbytes < all_of_them * sent_at_most(ADAPTERS)
            assert reused_nbytes > 0.98 * all_of_them * BASES
    kind.check(nodes, "step-4")
    shutil.rmtree(nodes.memory(0))
    assert forked_ranks(loads, kind.ranks, nodes, 4) == [[]] * kind.ranks


def _saves_what_changes(
    nodes: Nodes, kind: Kind, changes: Sequence[Collection[str]], lengths: Sequence[int]
) -> list[tuple[int, int]]:
    wire, found, values = SentBytes(), [], dict(trained(0))
    sizes = {"base": BASE_NBYTES, "adapter": ADAPTER_NBYTES, "note": 300}
    with nodes.writer(**kind.options) as writer:
        for step, changed in enumerate([set(values), *changes]):
            values.update(dict.fromkeys(changed, step))
            state = {**state_of(values), f"tail{dist.get_rank()}": b"t" * lengths[step]}

            def act(state: dict[str, Any] = state, name: str = f"step-{step}") -> None:
                dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
                writer.wait(name, "replicated", timeout=60)

            changed_nbytes = sum(sizes[one.rpartition(".")[2]] for one in changed)
            found.append((wire.during(act), changed_nbytes))
    return found


@every_kind
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(st.sets(st.sampled_from(sorted(trained(0)))), min_size=1, max_size=4),
    lengths=st.lists(st.sampled_from([0, 1, 100, 4000, 70_000]), min_size=5, max_size=5),
)
def test_whatever_changes_is_sent_and_little_else(
    nodes: Nodes, kind: Kind, changes: Sequence[Collection[str]], lengths: Sequence[int]
) -> None:
    arguments = nodes, kind, changes, lengths
    for found in forked_ranks(_saves_what_changes, kind.ranks, *arguments):
        for nbytes, changed_nbytes in found:
            # Where a tail is much longer, the shares of parity lie elsewhere, and all is sent.
            assert nbytes <= sent_at_most(changed_nbytes) or len(set(lengths)) > 1
    kind.check(nodes, f"step-{len(changes)}")
    for node in range(kind.ranks):
        shutil.rmtree(f"{nodes.root}/node{node}")


def _saves_others(nodes: Nodes, kind: Kind) -> list[int]:
    """Save random values twice, then in a structure in which all items lie elsewhere."""
    found = []
    chunks, EarlierSegment.chunks = EarlierSegment.chunks, None  # type: ignore[assignment, method-assign]
    with nodes.writer(**kind.options) as writer:
        for step in (1, 2, 3):
            torch.manual_seed(step // 3)
            state = {f"rank{dist.get_rank()}": torch.rand(1 << 20) + step % 2}
            if step == 3:
                EarlierSegment.chunks = chunks  # type: ignore[method-assign]
                state = {f"rank{dist.get_rank()}.first": torch.zeros(100), **state}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            writer.wait(f"step-{step}", "replicated", timeout=60)
            found.append(amounts(writer, f"step-{step}")[1])
    return found


@every_kind
def test_where_all_has_changed_no_difference_is_made(nodes: Nodes, kind: Kind) -> None:
    assert forked_ranks(_saves_others, kind.ranks, nodes, kind) == [[0, 0, 0]] * kind.ranks
    kind.check(nodes, "step-3")


# -- what goes wrong -------------------------------------------------------------------------------


def _saves_beside(
    nodes: Nodes, kind: Kind, spoils: Sequence[Spoil]
) -> dict[str, tuple[int, int, int]]:
    """For each way to spoil what rank 1 has: bytes sent and reused then, and sent the next time."""
    found = {}
    for spoil in spoils:
        apart = Nodes(f"{nodes.root}/{spoil.__name__}")
        os.makedirs(apart.root, mode=0o700, exist_ok=True)
        with apart.writer(**kind.options) as writer:
            save(writer, "step-1", trained(1))
            dist.barrier()
            if dist.get_rank() == 1:
                spoil(apart, writer)
            dist.barrier()
            save(writer, "step-2", trained(2))
            then = amounts(writer, "step-2")
            save(writer, "step-3", trained(3))
            found[spoil.__name__] = (*then, amounts(writer, "step-3")[0])
            dist.barrier()
    return found


def _own(nodes: Nodes) -> Path:
    """Rank 1's own segment of step-1."""
    (held,) = nodes.held(1).find("step-1")
    return Path(held.segment_path(names.segment_file(1, held.manifest.save_id)))


def _received(nodes: Nodes) -> Path:
    """What rank 1 has received of step-1: a copy, or parity."""
    (held,) = nodes.held(1).find("step-1")
    (file,) = set(held.segment_files()) - {_own(nodes).name}
    return Path(held.segment_path(file))


def _flip_received(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    flip(_received(nodes), 1 << 20)


def _flip_own(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    """In what isn't sampled: between the 16 pages of a part."""
    flip(_own(nodes), (2 << 20) + 5)


def _remove_received(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    _received(nodes).unlink()


def _remove_own(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    _own(nodes).unlink()


def _cut_own(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    os.truncate(_own(nodes), 5 << 20)


def _fail_to_read(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    read_into = EarlierFile.read_into

    def failing(self: EarlierFile, memory: memoryview, start: int) -> None:
        EarlierFile.read_into = read_into  # type: ignore[method-assign]
        raise EOFError("cut off")

    EarlierFile.read_into = failing  # type: ignore[method-assign]


def _evict_halfway(nodes: Nodes, writer: MemoryStorageWriter) -> None:
    """Have the earlier checkpoint evicted, and its slots claimed, while differences come."""
    chunks, inode = Deciding.chunks, _received(nodes).stat().st_ino

    def evicting(self: Deciding, *arguments: Any) -> Any:
        Deciding.chunks = chunks  # type: ignore[method-assign]
        memory, session = nodes.held(1), open_session(writer.settings)
        assert session is not None
        assert memory.evict(memory.find("step-1")[0])
        claimed = [session.slots.take(1 << 20, "") for _ in range(2)]
        assert inode not in {slot.inode for slot in claimed}
        for slot in claimed:
            session.slots.abandon(slot)
        return chunks(self, *arguments)

    Deciding.chunks = evicting  # type: ignore[assignment, method-assign]


SPOILS = [
    _flip_received,
    _flip_own,
    _remove_received,
    _remove_own,
    _cut_own,
    _fail_to_read,
    _evict_halfway,
]


@every_kind
def test_copies_and_parity_are_right_whatever_becomes_of_the_earlier_ones(
    nodes: Nodes, kind: Kind
) -> None:
    found = forked_ranks(_saves_beside, kind.ranks, nodes, kind, SPOILS)[0]
    for spoil in SPOILS:
        sent_nbytes, reused_nbytes, sent_next = found[spoil.__name__]
        if spoil is _evict_halfway:
            assert sent_nbytes < kind.ranks * sent_at_most(ADAPTERS)
        else:  # a copy was sent in full, or a third of a segment of each of three ranks
            assert sent_nbytes > BASES
        assert reused_nbytes > 0  # what wasn't spoilt
        assert sent_next < kind.ranks * sent_at_most(ADAPTERS)
        kind.check(Nodes(f"{nodes.root}/{spoil.__name__}"), "step-3")


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        (COPIES, "replicate.reused"),
        (COPIES, "replicate.chunk"),
        (PARITY, "replicate.reused"),
        (PARITY, "replicate.chunk"),
        (PARITY, "replicate.received"),
    ],
)
def test_a_kill_amid_reuse_leaves_the_earlier_ones_whole(
    nodes: Nodes, kind: Kind, point: str
) -> None:
    arguments = nodes, kind.options, 1, point
    quick = {"DCP_MEM_REPLICATION_TIMEOUT": "3" if kind is COPIES else "6"}
    ranks = kill_targets.forked(saves_until_killed, kind.ranks, *arguments, env=quick)
    assert ranks.join(killed={1})[0] == "ReplicationFailed"
    kind.check(nodes, "step-1")
    ((_, sent_nbytes, reused_nbytes),) = forked_ranks(_trains, kind.ranks, nodes, kind, [3])[0]
    assert sent_nbytes < kind.ranks * sent_at_most(ADAPTERS)
    assert reused_nbytes > 0.98 * kind.ranks * BASES
    kind.check(nodes, "step-3")


def _fails_on_one_rank(nodes: Nodes) -> tuple[str, str]:
    with nodes.writer(**PARITY.options) as writer:
        save(writer, "step-1", trained(1))
        settle = Deciding.settle

        def failing(self: Deciding, *arguments: Any) -> None:
            Deciding.settle = settle  # type: ignore[method-assign]
            raise RuntimeError("out of luck")

        if dist.get_rank() == 1:
            Deciding.settle = failing  # type: ignore[assignment, method-assign]
        dcp_mem.save(state_of(trained(2)), checkpoint_id="step-2", storage_writer=writer)
        try:
            writer.wait("step-2", "replicated", timeout=30)
        except dcp_mem.ReplicationFailed as error:
            text = str(error)
        save(writer, "step-3", trained(3))
        return text, writer.status()[0].name


def test_a_sender_that_fails_leaves_none_of_the_others_waiting(nodes: Nodes) -> None:
    for text, newest in forked_ranks(_fails_on_one_rank, PARITY.ranks, nodes):
        assert "out of luck" in text
        assert newest == "step-3"
    PARITY.check(nodes, "step-3")
