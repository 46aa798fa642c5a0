"""The thread that has complete checkpoints made safe on other nodes, one at a time, while training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcp_mem import faults
from dcp_mem.events import log
from dcp_mem.format.manifest import ReplicationRecord
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease
from dcp_mem.memory.slots import SlotPool
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.work import Failures, Work, Worker


@dataclass(frozen=True, slots=True)
class Replication:
    """A checkpoint that is to be made safe, and this rank's part in it.

    redundancy: what it has once all goes well. lease: keeps the checkpoint in memory. remark: what the record says where all
    goes well. then: what the node's leader does once that is written down; told whether all went well.
    """

    work: Work
    redundancy: Redundancy
    lease: int
    is_leader: bool
    remark: str
    then: Callable[[bool], None]


class Replicator:
    """One process's part in replicating a job's checkpoints. What fails is written down, and never raised."""

    def __init__(self, memory: JobMemory, slots: SlotPool) -> None:
        self._memory, self._slots = memory, slots
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, replication: Replication) -> None:
        """Have it done in the background. Only when nothing else is under way."""
        assert not self.is_busy
        self._cancelled.clear()
        self._thread = threading.Thread(
            target=self._replicate, args=(replication,), name="dcp_mem-replicate", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        """End what is under way, on all ranks; it is over as soon as they all know, or time out."""
        self._cancelled.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is under way. A peer that hangs is waited for until it times out."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _replicate(self, replication: Replication) -> None:
        name, started = replication.work.manifest.name, time.monotonic()
        is_replicated = False
        try:
            failures = Worker(self._memory, self._slots, replication.work, self._cancelled).run()
            self._record(replication, failures, time.monotonic() - started)
            is_replicated = not failures
            faults.point("replicate.recorded")
        except Exception:
            log.warning("the replication of %s ended in disorder", name, exc_info=True)
        finally:
            end_lease(replication.lease)
            os.close(replication.lease)
        try:
            if replication.is_leader:
                replication.then(is_replicated)
        except Exception:
            log.warning("what %s supersedes stays in memory for now", name, exc_info=True)

    def _record(self, replication: Replication, failures: Failures, seconds: float) -> None:
        manifest, made = replication.work.manifest, replication.redundancy
        error = "; ".join(f"rank {rank}: {text}" for rank, text in failures)
        if failures:
            log.warning("%s is not replicated: %s", manifest.name, error)
        else:
            log.info("%s is replicated (%s) in %.2f s", manifest.name, made, seconds)
        if replication.is_leader:
            record = ReplicationRecord(manifest.save_id, "failed", 0, 0, seconds, error)
            if not failures:
                record = ReplicationRecord(
                    manifest.save_id, "replicated", made.copies, made.parity, seconds, replication.remark
                )
            self._memory.record_replication(manifest, record)
