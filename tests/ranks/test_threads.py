"""Several threads of one process save, load, wait and close: each is right, and none hangs."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_mem
from dcp_mem import MemoryStorageWriter, NoRecoverableCheckpoint, State
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.memory.locks import RunIdentity
from dcp_mem.memory.root import private_directory
from dcp_mem.memory.slots import SlotPool
from dcp_mem.runtime.session import (
    Session,
    close_session,
    enter_session,
    open_session,
    session_for,
)
from dcp_mem.runtime.turns import Turn
from tests.support.checkpoints.jobs import Job, load_anew, make_state, number_of
from tests.support.processes.forks import forked_ranks

pytestmark = pytest.mark.timeout(240)

_SECONDS = 60.0


def _at_once(*acts: Callable[[], object]) -> None:
    """Call all of these in a thread each, that begin together; raise what one of them raised."""
    start, errors = threading.Barrier(len(acts)), []

    def run(act: Callable[[], object]) -> None:
        start.wait(_SECONDS)
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


# -- saves -----------------------------------------------------------------------------------------


def test_two_threads_with_a_writer_each_save_sixty_times_each(memory_job: Job) -> None:
    saved: dict[str, int] = {}

    def save(first: int) -> None:
        writer = memory_job.writer(agent="thread", keep_memory=3)
        for number in range(first, first + 120, 2):
            # Structures change now and then: a plan is made while the other thread saves by its.
            state = make_state(number) | ({"more": torch.ones(number)} if number % 20 < 2 else {})
            dcp_mem.save(state, checkpoint_id=f"step-{number}", storage_writer=writer)
            saved[f"step-{number}"] = number

    with memory_job.writer(agent="thread") as writer:
        _at_once(lambda: save(0), lambda: save(1))
        assert len(saved) == 120
        kept = [entry for entry in writer.status() if entry.in_memory]
        assert len(kept) == 3
        for entry in kept:
            state = make_state(-1)
            with memory_job.reader() as reader:
                dcp_mem.load(state, checkpoint_id=entry.name, storage_reader=reader)
            assert number_of(state) == saved[entry.name]
    assert gc.isenabled()


def _save_in_crossed_order(job: Job) -> list[str]:
    """Save from two threads, in another order on each rank; return what these saves raised."""
    rank = dist.get_rank()
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    raised: dict[int, str] = {}
    entered = threading.Event()
    wait_for_turn: Callable[[Turn], None] = Turn.wait

    def waiting(turn: Turn) -> None:
        wait_for_turn(turn)
        entered.set()

    with job.writer(agent="thread", persist=False) as writer:

        def save(thread: int) -> None:
            try:
                dcp.save(
                    {"x": torch.full((9,), thread)},
                    checkpoint_id=f"of-thread-{thread}",
                    storage_writer=writer,
                    process_group=groups[thread],
                )
            except dcp.CheckpointException as error:
                raised[thread] = str(error)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Turn, "wait", waiting)
            first = threading.Thread(target=save, args=(rank,), daemon=True)
            first.start()
            assert entered.wait(_SECONDS)
            _at_once(lambda: save(1 - rank))
            first.join(_SECONDS)
        assert not first.is_alive(), "a thread hangs"
        dist.barrier()
        dcp.save(make_state(7), checkpoint_id="later", storage_writer=writer)
        dist.barrier()
        state = make_state(-1)
        with job.reader() as reader:
            dcp.load(state, storage_reader=reader)
        assert number_of(state) == 7
    return [raised[thread] for thread in range(2)]


def test_saves_of_threads_in_another_order_on_each_rank_are_refused(memory_job: Job) -> None:
    """Each has a process group of its own, so DCP has no exchange in which the ranks would meet."""
    for raised in forked_ranks(_save_in_crossed_order, 2, memory_job):
        assert all("in the same order on all ranks" in one for one in raised), raised


def test_a_close_waits_for_the_saves_of_other_threads(memory_job: Job) -> None:
    writer, session, turn = _entered(memory_job)
    turn.wait()
    closing = _closing(writer)
    closing.join(0.05)
    assert closing.is_alive()
    assert session_for(writer.settings, _RUN) is session, "a save goes on in its own session"
    turn.end()
    closing.join(_SECONDS)
    assert not closing.is_alive()
    assert open_session(writer.settings) is None


def test_a_save_that_comes_while_the_session_is_closed_gets_a_new_one(memory_job: Job) -> None:
    writer, session, turn = _entered(memory_job)
    turn.wait()
    closing = _closing(writer)
    found: list[Session] = []
    closing.join(0.05)

    def enter() -> None:
        later, own = enter_session(writer.settings, _RUN)
        with own:
            found.append(later)

    entering = threading.Thread(target=enter, daemon=True)
    entering.start()
    entering.join(0.05)
    assert not found
    turn.end()
    for thread in (closing, entering):
        thread.join(_SECONDS)
    assert len(found) == 1
    assert found[0] is not session
    close_session(writer.settings)


def test_a_close_does_not_wait_for_a_thread_that_has_died(memory_job: Job) -> None:
    writer, _, turn = _entered(memory_job)
    _at_once(turn.wait)  # and never ends it
    _at_once(lambda: writer.close(flush=False))


def test_a_close_by_the_thread_whose_save_broke_off_does_not_wait_for_it(memory_job: Job) -> None:
    writer, _, turn = _entered(memory_job)

    def close_with_a_turn() -> None:
        turn.wait()
        writer.close(flush=False)

    _at_once(close_with_a_turn)


def test_two_closes_at_once_close_once(memory_job: Job) -> None:
    writer, _, turn = _entered(memory_job)
    turn.end()
    close = lambda: writer.close(flush=False)  # noqa: E731
    _at_once(close, close, close)
    assert open_session(writer.settings) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_a_process_that_saves_can_save(memory_job: Job) -> None:
    writer, session, turn = _entered(memory_job)
    turn.wait()
    child = os.fork()
    if not child:
        status = 1
        try:
            # Its session is its own, with turns of its own.
            own, first = enter_session(writer.settings, _RUN)
            with first:
                status = int(own is session)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    turn.end()
    writer.close(flush=False)


# -- any of it, in any order -----------------------------------------------------------------------


@dataclass
class _Life:
    """A job that several threads of this process use."""

    job: Job
    begun: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))

    def run(self, calls: Sequence[str]) -> None:
        """Make these calls, with a writer and a reader of this thread's own."""
        writer, last = self.job.writer(agent="thread", keep_memory=2), 0
        for call in calls:
            if call == "save":
                last = next(self.numbers)
                self.begun.add(last)
                name = f"step-{last}"
                dcp_mem.save(make_state(last), checkpoint_id=name, storage_writer=writer)
            elif call == "load":
                self._load(None)
            elif call == "load own" and last:
                self._load(last)
            elif call == "status":
                for entry in writer.status():
                    assert int(entry.name.removeprefix("step-")) in self.begun
            elif call == "wait" and last:
                writer.wait(f"step-{last}", State.DURABLE, timeout=_SECONDS)
            elif call == "close":
                writer.close()

    def _load(self, number: int | None) -> None:
        state = make_state(-1)
        with self.job.reader() as reader:
            try:
                name = None if number is None else f"step-{number}"
                dcp_mem.load(state, checkpoint_id=name, storage_reader=reader)
            except dcp.CheckpointException as error:
                [(cause, _)] = error.failures.values()
                # It may have been pushed out of memory, before its flush or while it was read.
                assert isinstance(cause, NoRecoverableCheckpoint)
                return
        found = number_of(state)
        assert found in self.begun
        assert number is None or found == number


_CALLS = st.lists(
    st.sampled_from(["save", "save", "save", "load", "load own", "status", "wait", "close"]),
    min_size=1,
    max_size=8,
)
_jobs = itertools.count()


@pytest.mark.parametrize("with_storage", [False, True])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(threads=st.lists(_CALLS, min_size=2, max_size=3))
def test_threads_that_save_load_wait_and_close_find_whole_steps_and_none_hangs(
    memory_root: Path, tmp_path: Path, with_storage: bool, threads: list[list[str]]
) -> None:
    name = f"job-{next(_jobs)}"
    url = str(tmp_path / name) if with_storage else None
    life = _Life(Job(url, str(memory_root), name=name))
    if not with_storage:
        threads = [[call for call in calls if call != "wait"] for calls in threads]
    _at_once(*(partial(life.run, calls) for calls in threads))
    last = life.job.writer(agent="thread")
    last.close()
    assert open_session(last.settings) is None
    if life.begun:
        assert load_anew(life.job).number in life.begun
    assert gc.isenabled()


# -- what sessions are made of ---------------------------------------------------------------------


def test_threads_claim_slots_of_their_own(memory_root: Path) -> None:
    pool, claimed, guard = (
        SlotPool(private_directory(str(memory_root / "slots"))),
        set[int](),
        threading.Lock(),
    )

    def claim() -> None:
        for _ in range(50):
            slot = pool.claim(4096, "frames")
            with guard:
                assert slot.inode not in claimed
                claimed.add(slot.inode)
            assert pool.free_count() >= 0
            pool.take_back(lambda path: True)
            with guard:
                claimed.remove(slot.inode)
            pool.abandon(slot)

    _at_once(claim, claim, claim)
    assert pool.free_count() <= 3
    pool.close()


def test_a_slot_that_another_thread_writes_to_stays_though_its_file_is_deleted(
    memory_root: Path,
) -> None:
    pool = SlotPool(private_directory(str(memory_root / "slots")))
    slot = pool.claim(4096, "")
    os.remove(slot.path)
    _at_once(pool.free_count)
    assert slot.descriptor >= 0
    slot.map(4096, 4096)
    slot.write_at(0, b"x")
    pool.share(slot)
    assert pool.free_count() == 0
    assert slot.descriptor < 0
    pool.close()


def test_the_collector_is_paused_until_the_last_thread_lets_it_go_on() -> None:
    assert gc.isenabled()
    begun, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            begun.set()
            assert may_end.wait(_SECONDS)

    other = threading.Thread(target=pause, daemon=True)
    with collector_paused():
        other.start()
        assert begun.wait(_SECONDS)
    assert not gc.isenabled()
    may_end.set()
    other.join(_SECONDS)
    assert gc.isenabled()


# -- helpers ---------------------------------------------------------------------------------------

_RUN = RunIdentity("run", "token")


def _entered(job: Job) -> tuple[MemoryStorageWriter, Session, Turn]:
    """A writer, its session, and a turn in that, which nobody has waited for."""
    writer = job.writer(agent="thread")
    return writer, *enter_session(writer.settings, _RUN)


def _closing(writer: MemoryStorageWriter) -> threading.Thread:
    """A thread that closes the writer's session."""
    thread = threading.Thread(target=partial(close_session, writer.settings), daemon=True)
    thread.start()
    return thread
