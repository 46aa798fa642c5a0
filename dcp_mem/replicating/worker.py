"""One rank's part in a replication task: sending, receiving, and agreeing on how it went."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial, reduce

from dcp_mem.comm.agreement import Failures, joined
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import Amount, receive, refuse, send
from dcp_mem.common import faults, files
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.sendable import sendable
from dcp_mem.common.value_class import value_class
from dcp_mem.errors import DcpMemError, RankFailed
from dcp_mem.format.manifest import StripeRecord
from dcp_mem.memory.checkpoint import checksums_of
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.slots import SlotPool
from dcp_mem.replicating.earlier import Deciding, Offer, Vote, begins_as_earlier, earlier_of
from dcp_mem.replicating.plan import FilePlan
from dcp_mem.replicating.receive import IncomingFile
from dcp_mem.replicating.send import OutgoingFiles
from dcp_mem.replicating.task import SMALL_CHUNK, ReplicationTask, SegmentTables

_LONGEST_ROUND = 5.0
_CALL_NBYTES = 64


class Overtaken(Exception):
    """A newer checkpoint is to be replicated instead, or the job ends."""


@sendable
@value_class(kw_only=True)
class _Progress:
    """The progress of some ranks, joined; the ranks exchange it while they work."""

    is_done: bool
    is_cancelled: bool
    failures: Failures
    amount: Amount
    in_full: frozenset[str]  # files that are to be made again, from all bytes of their parts
    # (save id, rank) of checkpoints that turned out to hold stale frozen tensors of a rank
    stale: frozenset[tuple[str, int]]

    def join(self, other: _Progress) -> _Progress:
        return _Progress(
            is_done=self.is_done and other.is_done,
            is_cancelled=self.is_cancelled or other.is_cancelled,
            failures=joined(self.failures, other.failures),
            amount=self.amount.plus(other.amount),
            in_full=self.in_full | other.in_full,
            stale=self.stale | other.stale,
        )


class Worker:
    """Does one rank's part. `amount` is what all ranks have sent, once `run` has succeeded."""

    def __init__(
        self, memory: JobMemory, slots: SlotPool, task: ReplicationTask, cancelled: threading.Event
    ) -> None:
        """Prepare the task; `cancelled` ends it, on all ranks, and is set where another rank did
        so.
        """
        self._memory, self._slots, self._task, self._cancelled = memory, slots, task, cancelled
        self._ranks, self._manifest, self._rank = task.ranks, task.manifest, task.ranks.rank
        directory = memory.checkpoint_directory(task.manifest.name)
        self._tables = SegmentTables(directory, task.manifest)
        self._outgoing = OutgoingFiles(memory, task, self._tables)
        self._incoming: list[IncomingFile] = []
        self._failures: list[tuple[int, str]] = []
        self._has_kept_checksums = False
        self._in_full: set[str] = set()
        self._amounts: list[Amount] = []
        self._threads: list[threading.Thread] = []
        self.amount = Amount()

    def run(self) -> Failures:
        """Carry out this rank's part; return what failed on which rank, and raise no Exception.

        No thread of this is left when it returns, or raises what has interrupted it.

        1. Start a thread for each rank that this rank sends to, or receives from. The two make
           sure that both are at this task.
        2. Agree with all ranks, round by round, until all of them are done (`_agree`).
        3. Keep the checksums of this rank's own segment, if all of it was sent (`_agree`).
        4. Let readers in to the files that were sealed; give back the other slots.
        5. If anything failed, leave the ranks: their connections aren't used any more.

        A file that began as an earlier one, and turned out not to be right, is made again: all
        ranks do 1 and 2 for it once more.
        """
        self._guarded("replicating", lambda: faults.point("replicate.started"))
        try:
            failures = self._carry_out(self._task.plans)
            if self._in_full and not failures:
                again = [plan for plan in self._task.plans if plan.file in self._in_full]
                failures = self._carry_out(again)
        except BaseException as error:
            self._cancelled.set()
            self._ranks.leave(type(error).__name__)
            raise
        finally:
            self._join()  # first: they write into the slots
            self._give_back()
        if failures:
            self._ranks.leave("; ".join(text for _, text in failures))
        else:
            self._task.on_replicated()
        return failures

    def _carry_out(self, plans: Sequence[FilePlan]) -> Failures:
        self._guarded("replicating", lambda: self._start(plans))
        try:
            return self._agree()
        except RankFailed as error:
            self._join()
            self._keep_checksums()
            return (
                *self._failures,
                *((rank, f"agreeing: {text}") for rank, text in error.failures),
            )

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        """Call `act`, and keep an error as a failure of this rank."""
        try:
            act()
        except Exception as error:
            self._failures.append(
                (self._rank, f"{what}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            )

    # -- 1. sending and receiving ------------------------------------------------------------------

    def _start(self, plans: Sequence[FilePlan]) -> None:
        own = self._rank
        incoming = [self._file(plan) for plan in plans if plan.receiver == own]
        self._incoming += incoming
        by_receiver: dict[int, list[FilePlan]] = {}
        by_sender: dict[int, list[IncomingFile]] = {}
        for plan in plans:
            if own in plan.senders and plan.receiver != own:
                by_receiver.setdefault(plan.receiver, []).append(plan)
        for file in incoming:
            for sender in file.plan.senders or (own,):
                by_sender.setdefault(sender, []).append(file)
        acts: list[tuple[str, Callable[[], None]]] = [
            (f"sending to rank {receiver}", partial(self._send, receiver, sent))
            for receiver, sent in by_receiver.items()
        ]
        for sender, received in by_sender.items():
            act = partial(self._receive, sender) if sender != own else self._add_own
            acts.append((f"receiving from rank {sender}", partial(act, received)))
        for what, work in acts:
            self._threads.append(daemon(partial(self._guarded, what, work), "dcp_mem-copy"))

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _file(self, plan: FilePlan) -> IncomingFile:
        deciding = None
        if begins_as_earlier(plan):
            is_first = plan.file not in self._in_full
            earlier = earlier_of(self._memory, plan, self._manifest) if is_first else None
            deciding = Deciding(plan, earlier, self._task.timeout)
        slot = self._task.slots.get(plan.file, "")
        return IncomingFile(plan, slot, self._tables, self._seal, deciding)

    def _send(self, receiver: int, plans: Sequence[FilePlan]) -> None:
        with self._channel(self._rank, receiver) as channel:
            for plan in plans:
                offer = None
                if begins_as_earlier(plan):
                    offer = Offer(len(plan.parts_from(self._rank)))
                    channel.receive(offer.message).wait()
                    vote = self._outgoing.vote(plan, offer)
                    channel.send(bytearray([vote])).wait()
                    if vote is Vote.SHARES:
                        self._amounts.append(Amount(reused_nbytes=plan.nbytes))
                        continue
                with ExitStack() as registered:

                    def register(memory: memoryview, registered: ExitStack = registered) -> None:
                        registered.enter_context(channel.registered(memory))

                    chunks = self._outgoing.chunks(plan, offer, channel, register, self._go_on)
                    self._amounts.append(Amount(sent_nbytes=send(channel, chunks, self._go_on)))

    def _receive(self, sender: int, files: Sequence[IncomingFile]) -> None:
        with self._channel(sender, self._rank) as channel:
            try:
                for file in files:
                    self._receive_file(channel, sender, file)
            except BaseException:
                for file in files:
                    file.fail()
                raise

    def _receive_file(self, channel: Channel, sender: int, file: IncomingFile) -> None:
        if file.deciding is not None and file.deciding.hear(channel, sender) == Vote.SHARES:
            self._link(file, file.deciding)
            return
        if not file.slot:
            file.slot = self._task.claim(file.plan)
        try:
            file.begin()
        except DcpMemError as error:
            refuse(channel, str(error))
            raise
        with channel.registered(file.received_into):
            receive(channel, file.chunks_from(sender, channel), self._go_on)
        file.end()

    def _link(self, file: IncomingFile, deciding: Deciding) -> None:
        """Give the earlier copy one more name, under the checksums that it was received with."""
        faults.point("frozen.shared")
        assert deciding.earlier is not None
        earlier, name = deciding.earlier, file.plan.file
        known = checksums_of(earlier.local, os.path.basename(earlier.file.path))
        table = replace(self._tables[name], crc32c=known.crc32c)
        link = partial(files.link, earlier.file.path)
        self._memory.add_copy(self._manifest, name, {name: table}, link)
        file.is_finished = True

    def _reject(self, stale: Mapping[str, int]) -> None:
        """Mark checkpoints whose segment of frozen items turned out to be stale, by save id."""
        for checkpoint in self._memory.checkpoints() if stale else ():
            rank = stale.get(checkpoint.manifest.save_id)
            if rank is not None and not checkpoint.rejected:
                with suppress(FileNotFoundError):  # it has just been evicted
                    why = f"frozen tensors had changed unnoticed, on rank {rank}"
                    self._memory.reject(checkpoint, why)

    def _add_own(self, files: Sequence[IncomingFile]) -> None:
        """Add the parts that this rank's own node has."""
        for file in files:
            plan = file.plan
            file.begin()
            for part in plan.parts_from(self._rank):
                source = self._outgoing.open(part.file, plan)
                for start in range(part.start, part.stop, SMALL_CHUNK):
                    self._go_on()
                    data = source.read(start, min(start + SMALL_CHUNK, part.stop))
                    file.add(part.place + start - part.start, data)
            for name in plan.checksums_from(self._rank):
                file.checksums[name] = self._outgoing.checksums(name, plan)
            file.end()

    def _seal(self, file: IncomingFile) -> None:
        """Put an assembled file into the checkpoint, beside what verifies it."""
        faults.point("replicate.received")
        plan, slot, wrong = file.plan, file.slot, file.sum_up()
        assert not isinstance(slot, str)
        if wrong and file.is_reused:
            log.warning("what lay here of %s, or what its sender had, is damaged", plan.file)
            self._in_full.add(plan.file)
            file.is_finished = True
            return
        if wrong:
            raise DcpMemError(
                f"{wrong} of {len(file.crcs)} blocks of {plan.file} haven't come as they were saved"
            )
        seal = partial(self._slots.seal, slot)
        if plan.stripe is None:
            tables = {plan.file: file.table()}
            self._memory.add_copy(self._manifest, plan.file, tables, seal)
        else:
            record = StripeRecord(self._manifest.save_id, plan.stripe, tuple(file.crcs.tolist()))
            tables = file.stripe_tables()
            self._memory.add_copy(self._manifest, plan.file, tables, seal, record)
        file.is_sealed = file.is_finished = True
        faults.point("replicate.sealed")

    @contextmanager
    def _channel(self, sender: int, receiver: int) -> Iterator[Channel]:
        """Close the channel where the block raises, so that the peer doesn't wait."""
        channel = self._ranks.channel(sender, receiver, transport=self._task.transport)
        try:
            self._greet(channel)
            yield channel
        except BaseException:
            channel.close()
            raise

    def _greet(self, channel: Channel) -> None:
        """Make sure that the peer is at this task: a load's and a save's may come in any order."""
        own = bytearray(self._task.call.encode()[:_CALL_NBYTES].ljust(_CALL_NBYTES))
        others = bytearray(_CALL_NBYTES)
        sending, receiving = channel.send(own), channel.receive(others)
        receiving.wait()
        sending.wait()
        if others != own:
            raise DcpMemError("the other rank is at another checkpoint")

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Overtaken("a newer checkpoint is saved, or the job ends")

    # -- 2. agreeing -------------------------------------------------------------------------------

    def _agree(self) -> Failures:
        """Tell all ranks how far this one is, until all are done; return all ranks' failures. A
        rank that is done waits for slower ranks for as long as each of them takes part in the
        rounds.
        """
        while True:
            deadline = time.monotonic() + min(_LONGEST_ROUND, self._task.timeout / 4)
            for thread in self._threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
            is_done = not any(thread.is_alive() for thread in self._threads)
            if is_done:
                unfinished = [one.plan.file for one in self._incoming if not one.is_finished]
                if unfinished and not self._failures:
                    self._failures.append(
                        (self._rank, f"{', '.join(unfinished)} did not come whole")
                    )
                self._keep_checksums()
            amount = reduce(Amount.plus, [*self._amounts, *self._outgoing.reused], Amount())
            failures = joined(tuple(self._failures), ())
            own = _Progress(
                is_done=is_done,
                is_cancelled=self._cancelled.is_set(),
                failures=failures,
                amount=amount,
                in_full=frozenset(self._in_full),
                stale=frozenset((save_id, self._rank) for save_id in self._task.stale),
            )
            progress = self._ranks.all_reduce(own, _Progress.join)
            if progress.is_cancelled:
                self._cancelled.set()
            if progress.is_done:
                self._guarded("rejecting", partial(self._reject, dict(progress.stale)))
                self.amount, self._in_full = progress.amount, set(progress.in_full)
                return progress.failures

    # -- 3. and 4. ending --------------------------------------------------------------------------

    def _keep_checksums(self) -> None:
        """Write the checksums of this rank's own segment beside it; once. They verify copies that
        are read and segments that are rebuilt (invariant 1).
        """
        if self._task.own_slot is None or self._has_kept_checksums:
            return
        own = self._outgoing.own_tables()
        if own:
            self._has_kept_checksums = True
            write = partial(self._memory.add_checksums, self._manifest, own)
            self._guarded("writing checksums", write)

    def _give_back(self) -> None:
        sealed = {file.plan.file for file in self._incoming if file.is_sealed}
        claimed = {**self._task.slots, **{one.plan.file: one.slot for one in self._incoming}}
        for file, slot in claimed.items():
            if not isinstance(slot, str):
                (self._slots.share if file in sealed else self._slots.abandon)(slot)
        for incoming in self._incoming:
            incoming.close()
        self._outgoing.close()
