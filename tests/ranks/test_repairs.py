"""What a loss of memory has cost a checkpoint is made again, if not by one load then by the next.

And copies are of their checkpoint, in whatever order ranks begin to make them.

Nodes are memory roots, one for each rank.
"""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from dcp_mem.common import faults
from dcp_mem.memory.job import JobMemory
from dcp_mem.replicating.replicator import Replication, Replicator
from dcp_mem.runtime.session import _drain_sessions, open_session
from tests.support.checkpoints.jobs import Job, load_anew, save
from tests.support.processes.forks import forked_ranks

_ENV = {"DCP_MEM_REPLICATION_TIMEOUT": "5"}


def _job(root: str) -> Job:
    return Job(None, f"{root}/node{dist.get_rank()}")


def _save(root: str) -> None:
    with _job(root).writer(replicas=1) as writer:
        save(writer, 1)
        writer.wait("step-1", "replicated", timeout=60)


def _load(root: str, fault: str) -> int:
    if dist.get_rank() == 1:
        faults.arm(fault)
    number = load_anew(_job(root)).number
    _drain_sessions()
    return number


def _outcomes(root: str) -> list[tuple[str, int, bool, int]]:
    """Return the record of each node, and how many segments lie there."""
    found = []
    for node in range(2):
        (held,) = JobMemory(f"{root}/node{node}", "job").find("step-1")
        record = held.replication
        segments = [one for one in held.segment_files() if one.endswith(".distcp")]
        found.append((record.outcome, record.copies, bool(record.error), len(segments)))
    return found


def test_a_repair_that_fails_is_made_up_for_by_the_next_load(memory_root: Path) -> None:
    root = str(memory_root)
    forked_ranks(_save, 2, root, env=_ENV)
    assert _outcomes(root) == [("replicated", 1, False, 2)] * 2
    shutil.rmtree(f"{root}/node1")
    assert forked_ranks(_load, 2, root, "replicate.received:raise:1", env=_ENV) == [1, 1]
    assert _outcomes(root) == [("replicated", 1, True, 2), ("failed", 0, True, 0)]
    assert forked_ranks(_load, 2, root, "", env=_ENV) == [1, 1]
    assert _outcomes(root) == [("replicated", 1, False, 2)] * 2


def _replicate_in_another_order(root: str) -> None:
    start, held, rank = Replicator.start, list[Replication](), dist.get_rank()

    def start_both(self: Replicator, replication: Replication) -> None:
        held.append(replication)
        if len(held) == 2:
            start(self, held[rank])
            start(self, held[1 - rank])

    with pytest.MonkeyPatch.context() as patch, _job(root).writer(replicas=1) as writer:
        patch.setattr(Replicator, "start", start_both)
        save(writer, 1)
        save(writer, 2)
        session = open_session(writer.settings)
        assert session is not None
        session.replicator.wait(60)
    dist.barrier()


def test_no_copy_is_of_another_checkpoint_where_ranks_begin_in_another_order(
    memory_root: Path,
) -> None:
    forked_ranks(_replicate_in_another_order, 2, str(memory_root), env=_ENV)
    for node in range(2):
        for held in JobMemory(f"{memory_root}/node{node}", "job").checkpoints():
            assert len([one for one in held.segment_files() if one.endswith(".distcp")]) == 1
            assert held.replication.outcome == "failed"
