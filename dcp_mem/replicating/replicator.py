"""The background thread that replicates complete checkpoints, one at a time, beside training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from dcp_mem.comm.agreement import Failures
from dcp_mem.comm.transfer import Amount
from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import Outcome
from dcp_mem.format.manifest import Manifest, ReplicationRecord
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import end_lease
from dcp_mem.memory.slots import SlotPool
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.task import ReplicationTask, abandon_all
from dcp_mem.replicating.worker import Worker


@value_class(kw_only=True)
class Replication:
    """A checkpoint to replicate, and this rank's part in it."""

    task: ReplicationTask
    redundancy: Redundancy  # what the checkpoint has once all goes well
    lease: int  # a descriptor that keeps the checkpoint in memory; closed at the end
    is_leader: bool  # whether this rank records the outcome for its node
    remark: str  # what the record says where all goes well
    # called on the node's leader once the outcome is recorded, with whether all went well
    on_recorded: Callable[[bool], None]


class Replicator:
    """One process's part in replicating checkpoints. Failures are recorded, and never raised. Any
    thread may call anything at any time.
    """

    def __init__(self, memory: JobMemory, slots: SlotPool) -> None:
        self._memory, self._slots = memory, slots
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()  # of that thread; each has its own
        self._guard = threading.Lock()
        self._at_work = threading.Lock()  # workers share connections: one at a time

    @property
    def is_busy(self) -> bool:
        """Whether a replication is under way."""
        with self._guard:
            return self._thread is not None and self._thread.is_alive()

    def start(self, replication: Replication) -> None:
        """Replicate in the background, behind what is under way: a load in another thread may
        repair. The lease and slots are given back, whatever happens.
        """
        try:
            with self._guard:
                earlier, cancelled = self._thread, threading.Event()

                def replicate() -> None:
                    if earlier is not None:
                        earlier.join()
                    self._replicate(replication, cancelled)

                self._thread = daemon(replicate, "dcp_mem-replicate")
                self._cancelled = cancelled
        except Exception as error:
            self._give_up(replication, str(error))

    def carry_out(self, task: ReplicationTask) -> Failures:
        """Carry out a task now, behind what is under way; return what failed on which rank."""
        with self._at_work:
            return Worker(self._memory, self._slots, task, threading.Event()).run()

    def cancel(self) -> None:
        """Cancel what is under way, on all ranks; it ends as soon as they all know, or time out."""
        with self._guard:
            self._cancelled.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is under way. A peer that hangs is waited for until it times out."""
        with self._guard:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _replicate(self, replication: Replication, cancelled: threading.Event) -> None:
        name, started = replication.task.manifest.name, time.monotonic()
        is_replicated = False
        try:
            worker = Worker(self._memory, self._slots, replication.task, cancelled)
            with self._at_work:
                failures = worker.run()
            self._record(replication, failures, time.monotonic() - started, worker.amount)
            is_replicated = not failures
            faults.point("replicate.recorded")
        except Exception:
            log.warning("the replication of %s ended in disorder", name, exc_info=True)
        finally:
            end_lease(replication.lease)
            os.close(replication.lease)
        try:
            if replication.is_leader:
                replication.on_recorded(is_replicated)
        except Exception:
            log.warning("what %s supersedes stays in memory for now", name, exc_info=True)

    def _give_up(self, replication: Replication, why: str) -> None:
        """Do none of it: the other ranks learn why, and needn't wait for this one."""
        task = replication.task
        try:
            task.ranks.leave(why)
            abandon_all(self._slots, task.slots.values())
            self._record(replication, ((task.ranks.rank, why),), 0.0, Amount())
        except Exception:
            log.warning("the replication of %s can't begin", task.manifest.name, exc_info=True)
        finally:
            end_lease(replication.lease)
            os.close(replication.lease)

    def _record(
        self, replication: Replication, failures: Failures, seconds: float, amount: Amount
    ) -> None:
        manifest, redundancy = replication.task.manifest, replication.redundancy
        error = "; ".join(f"rank {rank}: {text}" for rank, text in failures)
        if failures:
            log.warning("%s is not replicated: %s", manifest.name, error)
        else:
            log.info("%s is replicated (%s) in %.2f s", manifest.name, redundancy, seconds)
        if replication.is_leader:
            if failures:
                record = self._failed(manifest, error, seconds)
            else:
                record = ReplicationRecord(
                    save_id=manifest.save_id,
                    outcome=Outcome.REPLICATED,
                    copies=redundancy.copies,
                    parity=redundancy.parity,
                    seconds=seconds,
                    error=replication.remark,
                    sent_nbytes=amount.sent_nbytes,
                    reused_nbytes=amount.reused_nbytes,
                )
            self._memory.record_replication(manifest, record)

    def _failed(self, manifest: Manifest, error: str, seconds: float) -> ReplicationRecord:
        """Return the record of what has failed: a repair leaves what the next load shall repair."""
        for local in self._memory.find(manifest.name):
            before = local.replication
            is_same = local.manifest.save_id == manifest.save_id
            if is_same and before.outcome == Outcome.REPLICATED:
                return replace(before, error=f"what has been lost is not made again: {error}")
        return ReplicationRecord(
            save_id=manifest.save_id, outcome=Outcome.FAILED, seconds=seconds, error=error
        )
