"""Parity in other nodes' memory, between real processes.

Nodes are memory roots: each rank has the one of its node.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import MemoryStorageWriter, State, parity
from tests.support.checkpoints.held import manifest_in
from tests.support.checkpoints.jobs import occupied, wait_until
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
    held = [memory_root / f"node{node}" / "job" / "step-2" for node in range(nodes)]
    written = manifest_in(held[0])["segments"]
    nbytes = dict(zip(written["rank"], written["nbytes"], strict=True))
    segments = {
        rank: np.fromfile(next(held[rank // per_node].glob(f"__{rank}_0-*.distcp")), np.uint8)
        for rank in nbytes
    }
    covered = dict.fromkeys(segments, 0)
    for directory in held:
        for path in directory.glob("__parity_*.xor"):
            record = json.loads((directory / ".dcp_mem" / f"{path.stem[2:]}.json").read_text())
            stripe = record["body"]["stripe"]
            expected = np.zeros(stripe["nbytes"], np.uint8)
            for share in stripe["shares"]:
                rank, length = share["rank"], share["stop"] - share["start"]
                covered[rank] += length
                expected[share["place"] : share["place"] + length] ^= segments[rank][
                    share["start"] : share["stop"]
                ]
                (table,) = directory.glob(f".dcp_mem/checksums-__{rank}_0-*.json")
                assert all(json.loads(table.read_text())["body"]["tables"].values())
            assert np.array_equal(np.fromfile(path, np.uint8)[: stripe["nbytes"]], expected)
    assert covered == nbytes


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
            taken = max(taken, occupied(Path(memory, "job")))
        return taken


def test_parity_over_four_nodes_takes_at_most_three_tenths_more_memory(memory_root: Path) -> None:
    (memory_root / "a").mkdir(0o700)
    (memory_root / "b").mkdir(0o700)
    alone = max(forked_ranks(_takes, 5, memory_root / "a", None))
    assert max(forked_ranks(_takes, 5, memory_root / "b", parity(4))) <= 1.3 * alone
