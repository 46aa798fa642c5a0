"""Two runs at one root: one of them has it, and what a commit refers to is never deleted."""

import logging
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_mem import FlushFailed, MemoryStorageWriter, State, StorageTaken, keep_last
from dcp_mem.common import faults
from dcp_mem.flushing.loop import FlushLoop
from dcp_mem.flushing.ownership import DIRECTORY, Ownership
from dcp_mem.flushing.queue import FlushQueue
from dcp_mem.flushing.registration import Registration
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.order import SaveNumber, is_newer
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import checkpoint_names, committed_under
from dcp_mem.storage.routes import open_storage
from tests.support.checkpoints.jobs import Job, load_anew, save, wait_until
from tests.support.processes.forks import forked, forking, raised_by
from tests.support.storage.servers import StorageRoot
from tests.support.storage.soundness import FLUSHER_POINTS, is_taken
from tests.support.variants import examples

pytestmark = pytest.mark.timeout(120)


def run(job: Job, numbers: tuple[int, ...], armed: str = "", keep: int | None = None) -> str:
    """Be a run that loads nothing: save these, and return what became of the last."""
    faults.arm(armed)
    said = []
    writer = job.writer(agent="thread", keep_storage=keep)
    for number in numbers:
        save(writer, number)
        said.append(_waited_for(writer, f"step-{number}"))
    writer.close(flush=False)
    return " ".join(said)


def _waited_for(writer: MemoryStorageWriter, name: str) -> str:
    try:
        writer.wait(name, timeout=100)
    except FlushFailed as error:
        return "taken" if is_taken(str(error)) else str(error)
    return name


def _node(root: StorageRoot, memory_root: Path, number: int) -> Job:
    return Job(root.url, str(memory_root / f"node{number}"), root.storage_options)


def _assert_whole(root: StorageRoot, memory_root: Path) -> set[str]:
    """Every `.metadata` is whole; return the names."""
    storage = open_storage(root.url, root.storage_options)
    found = [one for name in checkpoint_names(storage) for one in committed_under(storage, name)]
    assert [one.problem for one in found if one.problem] == []
    for one in found:
        load_anew(_node(root, memory_root, 9), one.name)
    return {one.name for one in found}


@pytest.mark.parametrize("point", FLUSHER_POINTS)
@pytest.mark.slow
def test_a_run_that_is_stopped_anywhere_does_a_newer_one_no_harm(
    memory_root: Path, storage_root: StorageRoot, point: str
) -> None:
    """The old one stops in the flush of step-2, the new one saves steps 1 to 3, the old goes on."""
    with forking(
        run, None, _node(storage_root, memory_root, 0), (1, 2), _armed(point, "stop")
    ) as old:
        wait_until(lambda: _is_stopped(old.pid()), "the old run to stop")
        said = forked(run, _node(storage_root, memory_root, 1), (1, 2, 3), "", 2)
        assert said == "step-1 step-2 step-3"
        os.kill(old.pid(), signal.SIGCONT)
        said_by_old = old.join()[0]
    assert set(said_by_old.split()) <= {"step-1", "step-2", "taken"}
    assert {"step-2", "step-3"} <= _assert_whole(storage_root, memory_root)
    assert load_anew(_node(storage_root, memory_root, 8)).number == 3


def _armed(point: str, action: str) -> str:
    """In the flush of step-2, but for what happens once in a run."""
    return f"{point}:{action}:{1 if point == 'claim.taken' else 2}"


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("point", FLUSHER_POINTS)
@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_leaves_a_newer_one_alone(
    memory_root: Path, storage_root: StorageRoot, point: str
) -> None:
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked(run, _node(storage_root, memory_root, 0), (1, 2), _armed(point, "kill"))
    said = forked(run, _node(storage_root, memory_root, 1), (1, 2, 3), "", 2)
    assert said == "step-1 step-2 step-3"
    assert {"step-2", "step-3"} <= _assert_whole(storage_root, memory_root)


# -- who has it ------------------------------------------------------------------------------------


@dataclass
class Node:
    """A node's memory and its flusher, in this process."""

    job: Job

    def save(self, *numbers: int) -> None:
        """Save in memory; nothing is flushed by itself."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dcp_mem.runtime.session.Session.wake_agent", lambda *_, **__: None)
            writer = self.job.writer(keep_memory=4)
            for number in numbers:
                save(writer, number)
            writer.close(flush=False)

    @property
    def memory(self) -> JobMemory:
        return JobMemory(self.job.memory, "job")

    def ownership(self, *, is_live: bool = True) -> Ownership:
        return Ownership(self.memory, open_storage(self.job.url or "", {}), lambda: is_live)


@pytest.fixture
def node(memory_root: Path, tmp_path: Path) -> Callable[[int], Node]:
    return lambda number: Node(_node(StorageRoot(str(tmp_path / "root"), {}), memory_root, number))


def test_runs_take_one_generation_after_another(node: Callable[[int], Node]) -> None:
    for number in (1, 2, 3):
        node(number).save(1, 2)
        node(number).ownership().claim()
        numbers = [one.manifest.number for one in node(number).memory.checkpoints()]
        assert numbers == [SaveNumber(number, 2), SaveNumber(number, 1)]


def test_an_older_run_stops_and_the_next_start_takes_the_storage_back(
    node: Callable[[int], Node],
) -> None:
    old, new = node(1), node(2)
    for each in (old, new):
        each.save(1)
        each.ownership().claim()
    new.ownership().check()
    for refuse in (old.ownership().check, old.ownership().claim):
        with pytest.raises(StorageTaken, match=r"generation 2: process \d+ on "):
            refuse()
    old.save(2)  # a new run, in the memory of the old one
    old.ownership().claim()
    old.ownership().check()
    with pytest.raises(StorageTaken):
        new.ownership().check()


def test_a_dead_run_that_never_had_the_storage_takes_it_from_nobody(
    node: Callable[[int], Node],
) -> None:
    node(1).save(1)
    node(2).save(1)
    node(2).ownership().claim()
    with pytest.raises(StorageTaken):
        node(1).ownership(is_live=False).claim()


def test_runs_of_one_memory_are_claimed_for_in_their_order(node: Callable[[int], Node]) -> None:
    """Storage was down for a whole run."""
    node(1).save(1)
    node(1).ownership().claim()
    for number in (2, 3):
        node(2).save(number)
    node(2).ownership().claim()
    found = {one.name: one.manifest.generation for one in node(2).memory.checkpoints()}
    assert found == {"step-2": 2, "step-3": 3}


def _save_while(node: Node, number: int, claims: Callable[[], None]) -> int:
    """Save; have `claims` run once the ranks have agreed; return what a restart resumes from."""
    point = faults.point

    def claiming(name: str) -> None:
        if name == "stage.copied":
            claims()
        point(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "point", claiming)
        node.save(number)
    return load_anew(node.job).number


def test_a_save_stays_the_newest_where_an_earlier_run_gets_a_generation_meanwhile(
    node: Callable[[int], Node],
) -> None:
    for number in (1, 2, 3):  # the storage has three generations
        node(0).save(number)
        node(0).ownership().claim()
    node(1).save(1)  # of a run that was killed before its flusher got it a generation
    assert _save_while(node(1), 2, node(1).ownership().claim) == 2
    assert max(node(1).memory.generations.known().values()) > 3


def test_the_loser_says_so_in_its_status_and_keeps_its_checkpoints(
    node: Callable[[int], Node],
) -> None:
    old, new = node(1), node(2)
    old.save(1)
    old.ownership().claim()
    new.save(1)
    new.ownership().claim()
    flusher = FlushLoop(old.job.memory)
    flusher.register(Registration(job="job", url=old.job.url or "", overwrite=True))
    flusher.flush_next()
    (status,) = old.job.writer().status()
    assert status.state is State.FAILED
    assert "a newer run has taken it (generation 2" in status.error
    assert load_anew(old.job).number == 1


class _Said(NamedTuple):
    """What an older run says, once a newer one has the storage."""

    waited: str
    closed: str
    states: dict[str, tuple[State, str]]
    logged: str


def _is_overtaken(job: Job, agent: str, saved: Path, taken: Path) -> _Said:
    """Save step-1; save step-2 once a newer run has taken the storage."""
    log = StringIO()
    logging.getLogger("dcp_mem").addHandler(logging.StreamHandler(log))
    writer = job.writer(agent=agent, keep_memory=2)
    save(writer, 1)
    writer.wait("step-1", timeout=60)
    saved.touch()
    wait_until(taken.exists)
    save(writer, 2)
    waited = raised_by(lambda: writer.wait("step-2", timeout=60))
    assert isinstance(waited, FlushFailed), waited
    states = {one.name: (one.state, one.error) for one in writer.status()}
    closed = raised_by(writer.close)
    assert isinstance(closed, FlushFailed), closed
    assert load_anew(job, "step-2").number == 2, "it stays in memory"
    if agent == "process":
        (path,) = Path(job.memory).rglob("agent.log")
        log.write(path.read_text())
    return _Said(str(waited), str(closed), states, log.getvalue())


@pytest.mark.parametrize("agent", ["thread", "process"])
def test_the_loser_says_so_wherever_it_is_asked(
    memory_root: Path, tmp_path: Path, storage_root: StorageRoot, agent: str
) -> None:
    saved, taken = tmp_path / "saved", tmp_path / "taken"
    old = _node(storage_root, memory_root, 0)
    with forking(_is_overtaken, None, old, agent, saved, taken) as older:
        wait_until(saved.exists)
        newer = forked(run, _node(storage_root, memory_root, 1), (11, 12))
        assert newer == "step-11 step-12"
        taken.touch()
        (said,) = older.join(timeout=100)
    text = "a newer run has taken it (generation 2: process "
    state, error = said.states["step-2"]
    assert state is State.FAILED
    for told in (said.waited, said.closed, error, said.logged):
        assert text in told, said
    assert said.states["step-1"] == (State.DURABLE, "")
    assert {"step-1", "step-11", "step-12"} == _assert_whole(storage_root, memory_root)


# -- one in the middle of another ------------------------------------------------------------------


@dataclass
class _Interrupted:
    """A storage at whose requests something happens, by their number."""

    storage: Any
    acts: dict[int, Callable[[], object]]
    requests: int = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.storage, name)
        if not callable(found):
            return found

        def request(*arguments: Any, **options: Any) -> Any:
            self.requests += 1
            self.acts.pop(self.requests, lambda: None)()
            return found(*arguments, **options)

        return request


class _Killed(BaseException):
    """Ends a flusher as a kill does: nothing of it goes on."""


@dataclass
class Writers:
    """Runs with memories of their own at one root; each has saved the same two names."""

    root: StorageRoot
    memory: Path

    def flush(self, number: int, acts: dict[int, Callable[[], object]]) -> None:
        """Have a run flush what it has, as far as it gets."""
        job = _node(self.root, self.memory, number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "dcp_mem.flushing.flusher.open_storage",
                lambda *arguments: _Interrupted(open_storage(*arguments), acts),
            )
            patch.setattr(FlushQueue, "is_live", lambda *_: True)
            flusher = FlushLoop(job.memory)
            flusher.register(
                Registration(
                    job="job", url=self.root.url, overwrite=True, keep_storage=keep_last(1)
                )
            )
            with suppress(_Killed):
                while flusher.flush_next():  # what fails comes back later
                    pass

    def assert_sound(self, count: int) -> None:
        """What is committed is whole; what the owner calls durable is there, and is its own."""
        storage = open_storage(self.root.url, {})
        found = [
            one for name in checkpoint_names(storage) for one in committed_under(storage, name)
        ]
        assert [one.problem for one in found] == [""] * len(found)
        stored = {one.name: one for one in found}
        for number in range(count):
            memory = JobMemory(_node(self.root, self.memory, number).memory, "job")
            for checkpoint in memory.checkpoints():
                if checkpoint.flush.outcome == "durable":
                    self._assert_durable(stored, checkpoint.manifest)

    def _assert_durable(self, stored: dict[str, Any], manifest: Manifest) -> None:
        """It is there, unless a newer one has taken its name, or its place in `keep_last(1)`."""
        there = stored.get(manifest.name)
        newer = [one for one in stored.values() if is_newer(one.place, manifest.place)]
        assert newer or (there is not None and there.save_id == manifest.save_id)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Memories whose runs know nothing of each other."""
    directory = tmp_path_factory.mktemp("saved")
    for number in range(MOST_WRITERS):
        forked(_save_unflushed, _node(StorageRoot("/nowhere", {}), directory, number))
    return directory


def _save_unflushed(job: Job) -> None:
    Node(job).save(1, 2)


MOST_WRITERS = 4
INTERRUPTS = st.tuples(st.integers(1, 45), st.booleans())
"""The request at which the next run goes on, and whether this one is killed then."""


# Where the time is over while Hypothesis draws, it takes its own strategies for inconsistent.
@pytest.mark.timeout(600)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    interrupts=st.lists(INTERRUPTS, min_size=1, max_size=MOST_WRITERS - 1),
    again=st.permutations(range(MOST_WRITERS)),
)
def test_runs_that_meet_in_any_request_leave_whole_checkpoints_only(
    memory_root: Path, saved: Path, interrupts: list[tuple[int, bool]], again: list[int]
) -> None:
    """The first stops at a request, the second goes on until it stops, and so on; some are killed.

    Then those that took part try again, in any order: two to four of them.
    """
    with TemporaryDirectory(dir=memory_root) as example:
        memory = Path(example, "memory")
        shutil.copytree(saved, memory)
        for node in memory.iterdir():
            os.chmod(node, 0o700)
        writers = Writers(StorageRoot(f"{example}/root", {}), memory)

        def go(number: int) -> None:
            acts: dict[int, Callable[[], object]] = {}
            if number < len(interrupts):
                at, is_kill = interrupts[number]
                acts[at] = partial(meet, number, is_kill)
            writers.flush(number, acts)

        def meet(number: int, is_kill: bool) -> None:
            go(number + 1)
            if is_kill:
                raise _Killed

        count = len(interrupts) + 1
        go(0)
        writers.assert_sound(count)
        for number in again:
            if number < count:
                writers.flush(number, {})
                writers.assert_sound(count)


# -- without conditions ----------------------------------------------------------------------------


@pytest.fixture
def in_process() -> Storage:
    return open_storage("memory://two-writers", {})


def _committed(storage: Storage) -> set[str]:
    return {
        name
        for name in checkpoint_names(storage)
        if names.metadata_file("") in {entry.name for entry in storage.ls(name)}
    }


def test_without_conditions_nothing_of_other_runs_is_deleted(
    memory_root: Path, in_process: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        job = Job(in_process.url, str(memory_root / f"node{number}"))
        with job.writer(agent="thread", keep_storage=1) as writer:
            for step in (1, 2):
                save(writer, step, f"run{number}-step{step}")
                writer.wait(f"run{number}-step{step}", timeout=60)
            wait_until(
                lambda: f"run{number}-step1" not in _committed(in_process),  # noqa: B023
                "retention of its own",
            )
    assert _committed(in_process) == {"run1-step2", "run2-step2"}
    assert "has no conditional writes" in caplog.text
    assert in_process.ls(DIRECTORY)
