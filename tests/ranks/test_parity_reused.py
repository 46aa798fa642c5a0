"""Parity in other nodes' memory: what hasn't changed since the earlier checkpoint isn't sent.

Nodes are memory roots: each rank has the one of its node.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
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
from dcp_mem import parity
from dcp_mem.common.values import Outcome
from dcp_mem.format import names
from dcp_mem.replicating import earlier_parity
from dcp_mem.replicating.earlier_parity import Deciding, EarlierSegment
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

_RANKS = 4
_PARITY = {"redundancy": parity(_RANKS - 1)}
Spoil = Callable[[Nodes], None]


@pytest.fixture
def nodes(memory_root: Path) -> Nodes:
    return Nodes(str(memory_root))


def _assert_parity_is_right(nodes: Nodes, name: str, count: int = _RANKS) -> None:
    """All parity of a checkpoint is the XOR of the shares that its records name."""
    held = [nodes.held(node).find(name)[0] for node in range(count)]
    assert {one.replication.outcome for one in held} == {Outcome.REPLICATED}
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


def _trains(nodes: Nodes, steps: int) -> list[tuple[int, int, int]]:
    """For each save: bytes that this rank put on the wire, and all ranks' that were reported."""
    wire, found = SentBytes(), []
    with nodes.writer(**_PARITY) as writer:
        for step in range(1, steps + 1):
            name = f"step-{step}"
            nbytes = wire.during(partial(save, writer, name, trained(step)))
            found.append((nbytes, *amounts(writer, name)))
    return found


def test_parity_of_later_checkpoints_takes_what_has_changed(nodes: Nodes) -> None:
    """The note, of 0 to 200 bytes, ends each segment elsewhere at each step."""
    base_nbytes, adapters_nbytes = LAYERS * BASE_NBYTES, LAYERS * ADAPTER_NBYTES
    for first, *later in forked_ranks(_trains, _RANKS, nodes, 4):
        assert first[0] > base_nbytes + adapters_nbytes
        assert first[2] == 0
        for nbytes, sent_nbytes, reused_nbytes in later:
            assert adapters_nbytes < nbytes < sent_at_most(adapters_nbytes)
            assert _RANKS * adapters_nbytes < sent_nbytes < _RANKS * sent_at_most(adapters_nbytes)
            assert reused_nbytes > 0.98 * _RANKS * base_nbytes
    _assert_parity_is_right(nodes, "step-4")


def _saves_what_changes(
    nodes: Nodes, changes: Sequence[Collection[str]], lengths: Sequence[int]
) -> list[tuple[int, int]]:
    wire, found, values = SentBytes(), [], dict(trained(0))
    sizes = {"base": BASE_NBYTES, "adapter": ADAPTER_NBYTES, "note": 300}
    with nodes.writer(**_PARITY) as writer:
        for step, changed in enumerate([set(values), *changes]):
            values.update(dict.fromkeys(changed, step))
            state = {**state_of(values), f"tail{dist.get_rank()}": b"t" * lengths[step]}

            def act(state: dict[str, Any] = state, name: str = f"step-{step}") -> None:
                dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
                writer.wait(name, "replicated", timeout=60)

            changed_nbytes = sum(sizes[one.rpartition(".")[2]] for one in changed)
            found.append((wire.during(act), changed_nbytes))
    return found


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sets(st.sampled_from(sorted(trained(0)))), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 1, 100, 4000, 70_000]), min_size=5, max_size=5),
)
def test_whatever_changes_parity_is_that_of_its_checkpoint(
    nodes: Nodes, changes: Sequence[Collection[str]], lengths: Sequence[int]
) -> None:
    for found in forked_ranks(_saves_what_changes, 3, nodes, changes, lengths):
        for nbytes, changed_nbytes in found:
            # Where a tail is much longer, the shares lie elsewhere, and all is sent.
            assert nbytes <= sent_at_most(changed_nbytes) or len(set(lengths)) > 1
    _assert_parity_is_right(nodes, f"step-{len(changes)}", 3)
    for node in range(3):
        shutil.rmtree(f"{nodes.root}/node{node}")


def _saves_random(nodes: Nodes) -> list[int]:
    found = []
    EarlierSegment.chunks = None  # type: ignore[assignment, method-assign]
    with nodes.writer(**_PARITY) as writer:
        for step in (1, 2):
            torch.manual_seed(step)
            state = {f"rank{dist.get_rank()}": torch.rand(1 << 20)}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            writer.wait(f"step-{step}", "replicated", timeout=60)
            found.append(amounts(writer, f"step-{step}")[1])
    return found


def test_where_all_has_changed_no_difference_is_made(nodes: Nodes) -> None:
    assert forked_ranks(_saves_random, _RANKS, nodes) == [[0, 0]] * _RANKS
    _assert_parity_is_right(nodes, "step-2")


def _saves_again(nodes: Nodes, step: int) -> tuple[int, int]:
    with nodes.writer(**_PARITY) as writer:
        save(writer, f"step-{step}", trained(step))
        return amounts(writer, f"step-{step}")


def test_another_run_reuses_the_parity_of_the_one_before(nodes: Nodes) -> None:
    assert forked_ranks(_saves_again, _RANKS, nodes, 1)[0][1] == 0
    assert forked_ranks(_saves_again, _RANKS, nodes, 2)[0][1] > 0.98 * _RANKS * LAYERS * BASE_NBYTES
    _assert_parity_is_right(nodes, "step-2")


# -- what goes wrong -------------------------------------------------------------------------------


def _saves_beside(nodes: Nodes, spoil: Spoil) -> tuple[int, int]:
    with nodes.writer(**_PARITY) as writer:
        save(writer, "step-1", trained(1))
        dist.barrier()
        if dist.get_rank() == 1:
            spoil(nodes)
        dist.barrier()
        save(writer, "step-2", trained(2))
        found = amounts(writer, "step-2")
        save(writer, "step-3", trained(3))
        assert amounts(writer, "step-3")[0] < _RANKS * sent_at_most(LAYERS * ADAPTER_NBYTES)
        return found


def _parity_file(nodes: Nodes) -> Path:
    (held,) = nodes.held(dist.get_rank()).find("step-1")
    (file,) = held.stripes()
    return Path(held.segment_path(file))


def _segment(nodes: Nodes) -> Path:
    (held,) = nodes.held(dist.get_rank()).find("step-1")
    return Path(held.segment_path(names.segment_file(dist.get_rank(), held.manifest.save_id)))


def _flip_parity(nodes: Nodes) -> None:
    flip(_parity_file(nodes), 1 << 20)


def _flip_segment(nodes: Nodes) -> None:
    """In what isn't sampled: between the 16 pages of a share."""
    flip(_segment(nodes), (2 << 20) + 5)


def _remove_parity(nodes: Nodes) -> None:
    _parity_file(nodes).unlink()


def _remove_segment(nodes: Nodes) -> None:
    _segment(nodes).unlink()


def _cut_segment(nodes: Nodes) -> None:
    with _segment(nodes).open("r+b") as file:
        file.truncate(5 << 20)


def _fail_to_read(nodes: Nodes) -> None:
    fill = earlier_parity.fill  # type: ignore[attr-defined]

    def failing(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
        earlier_parity.fill = fill  # type: ignore[attr-defined]
        raise EOFError("cut off")

    earlier_parity.fill = failing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spoil",
    [_flip_parity, _flip_segment, _remove_parity, _remove_segment, _cut_segment, _fail_to_read],
)
def test_parity_is_right_whatever_becomes_of_the_earlier_one(nodes: Nodes, spoil: Spoil) -> None:
    sent_nbytes, _ = forked_ranks(_saves_beside, _RANKS, nodes, spoil)[0]
    # One stripe at least was sent in full, a third of a segment of each of three ranks.
    assert sent_nbytes > LAYERS * BASE_NBYTES
    _assert_parity_is_right(nodes, "step-3")


def _saves_with_a_broken_note(nodes: Nodes) -> tuple[int, int]:
    crc, spoiled = earlier_parity._Received._crc, list[bool]()

    def spoiling(self: Any) -> int:
        if len(self._changed) and not spoiled:
            spoiled.append(True)
            self._changed[:] = 0
        return crc(self)

    with nodes.writer(**_PARITY) as writer:
        save(writer, "step-1", trained(1))
        earlier_parity._Received._crc = spoiling  # type: ignore[method-assign]
        save(writer, "step-2", trained(2))
        assert spoiled
        return amounts(writer, "step-2")


def test_a_chunk_that_came_otherwise_than_it_was_sent_comes_again(nodes: Nodes) -> None:
    sent_nbytes, _ = forked_ranks(_saves_with_a_broken_note, _RANKS, nodes)[0]
    assert sent_nbytes > _RANKS * (LAYERS * ADAPTER_NBYTES + (1 << 20))
    _assert_parity_is_right(nodes, "step-2")


@pytest.mark.parametrize("point", ["replicate.reused", "replicate.chunk", "replicate.received"])
def test_a_kill_amid_reuse_leaves_the_earlier_parity_whole(nodes: Nodes, point: str) -> None:
    ranks = kill_targets.forked(
        saves_until_killed,
        _RANKS,
        nodes,
        _PARITY,
        1,
        point,
        env={"DCP_MEM_REPLICATION_TIMEOUT": "6"},
    )
    assert ranks.join(killed={1})[0] == "ReplicationFailed"
    _assert_parity_is_right(nodes, "step-1")
    sent, _ = forked_ranks(_saves_again, _RANKS, nodes, 3)[0]
    assert sent < _RANKS * sent_at_most(LAYERS * ADAPTER_NBYTES)
    _assert_parity_is_right(nodes, "step-3")


def _fails_on_one_rank(nodes: Nodes) -> tuple[str, str]:
    with nodes.writer(**_PARITY) as writer:
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
    for text, newest in forked_ranks(_fails_on_one_rank, _RANKS, nodes):
        assert "out of luck" in text
        assert newest == "step-3"
    _assert_parity_is_right(nodes, "step-3")


def test_a_lost_node_is_restored_from_parity_that_was_sent_in_part(nodes: Nodes) -> None:
    forked_ranks(_trains, _RANKS, nodes, 3)
    shutil.rmtree(nodes.memory(0))
    assert forked_ranks(loads, _RANKS, nodes, 3) == [[]] * _RANKS
