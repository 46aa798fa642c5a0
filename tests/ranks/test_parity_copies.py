"""Parity in other nodes' memory, between real processes.

Nodes are memory roots: each rank has the one of its node.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageWriter, State, parity
from dcp_mem.common.files import allocated_bytes
from dcp_mem.format import names
from dcp_mem.memory.checkpoint import checksums_of
from dcp_mem.memory.job import JobMemory
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import forked_ranks


def _memory(root: Path, rank: int, per_node: int) -> str:
    return f"{root}/node{rank // per_node}"


def _state(step: int, nbytes: int) -> dict[str, Any]:
    """Make a state: parts of different sizes, and byte items that change length per save."""
    rank = dist.get_rank()
    large = torch.arange(nbytes // 4 * (rank % 3 + 1), dtype=torch.int32) * 7 + step * 1009 + rank
    return {
        f"large{rank}": large,
        f"small{rank}": torch.full((7,), step),
        f"note{rank}": "." * (step * 1000 + rank),
    }


def _saves(
    root: Path, per_node: int, k: int, steps: int, nbytes: int
) -> list[tuple[State, int, int, str]]:
    memory = _memory(root, dist.get_rank(), per_node)
    with MemoryStorageWriter(
        memory_root=memory, job="job", redundancy=parity(k), keep_memory=1
    ) as writer:
        for step in range(1, steps + 1):
            dcp_mem.save(_state(step, nbytes), checkpoint_id=f"step-{step}", storage_writer=writer)
            writer.wait(f"step-{step}", "replicated", timeout=60)
        newest = writer.status()[0]
        return [(newest.state, newest.replicas, newest.parity, newest.replication_error)]


@pytest.mark.parametrize(("nodes", "per_node", "k"), [(3, 1, 2), (2, 2, 4), (5, 1, 4), (4, 2, 3)])
def test_parity_is_the_xor_of_what_it_says_and_has_all_checksums_beside_it(
    memory_root: Path, nodes: int, per_node: int, k: int
) -> None:
    outcomes = forked_ranks(_saves, nodes * per_node, memory_root, per_node, k, 2, 3 << 20)
    assert {outcome[0][:3] for outcome in outcomes} == {(State.REPLICATED, 0, min(k, nodes - 1))}
    memories = [JobMemory(f"{memory_root}/node{node}", "job") for node in range(nodes)]
    held = [memory.checkpoints()[0] for memory in memories]
    segments = {
        segment.rank: np.fromfile(
            held[segment.rank // per_node].segment_path(segment.file), np.uint8
        )
        for segment in held[0].manifest.segments
    }
    covered = dict.fromkeys(segments, 0)
    for _, one in zip(memories, held, strict=True):
        for file, record in one.stripes().items():
            expected = np.zeros(record.stripe.nbytes, np.uint8)
            for share in record.stripe.shares:
                covered[share.rank] += share.stop - share.start
                length = share.stop - share.start
                expected[share.place : share.place + length] ^= segments[share.rank][
                    share.start : share.stop
                ]
                assert len(
                    checksums_of(one, names.segment_file(share.rank, one.manifest.save_id)).crc32c
                )
            found = np.fromfile(one.segment_path(file), np.uint8)[: record.stripe.nbytes]
            assert np.array_equal(found, expected)
    assert covered == {segment.rank: segment.nbytes for segment in held[0].manifest.segments}


def _takes(root: Path, redundancy: Any) -> int:
    memory = f"{root}/node{dist.get_rank()}"
    with MemoryStorageWriter(
        memory_root=memory, job="job", redundancy=redundancy, keep_memory=1
    ) as writer:
        taken = 0
        for step in range(1, 5):
            state = {f"large{dist.get_rank()}": torch.full((6 << 20,), step)}
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            if redundancy is not None:
                writer.wait(f"step-{step}", "replicated", timeout=60)
            # A slot whose checksums are being made isn't free for the next save but one.
            own = f"checksums-__{dist.get_rank()}_0-*.json"
            there = Path(memory, "job", f"step-{step}", ".dcp_mem")
            wait_until(lambda there=there, own=own: list(there.glob(own)), "checksums")  # type: ignore[misc]
            taken = max(taken, allocated_bytes(f"{memory}/job"))
        return taken


def test_parity_over_four_nodes_takes_at_most_three_tenths_more_memory(memory_root: Path) -> None:
    (memory_root / "a").mkdir(0o700)
    (memory_root / "b").mkdir(0o700)
    alone = max(forked_ranks(_takes, 5, memory_root / "a", None))
    assert max(forked_ranks(_takes, 5, memory_root / "b", parity(4))) <= 1.3 * alone


def test_parity_that_cannot_work_is_refused(memory_root: Path) -> None:
    with pytest.raises(ConfigError, match="replicas=1"):
        parity(1)
    with pytest.raises(ConfigError, match="no replicas="):
        MemoryStorageWriter(memory_root=memory_root, job="job", redundancy=parity(2), replicas=1)
