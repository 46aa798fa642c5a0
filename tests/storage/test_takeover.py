"""A lost node's part of a flush is done by holders of copies, several flushers in one process.

The roots are nodes: three of them saved together, with copies in each other's memory, and nothing
is flushed yet.
"""

import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import dcp_mem
import dcp_mem.flushing.agent_handle
import dcp_mem.flushing.flusher
import dcp_mem.runtime.session
from dcp_mem import State, every_n_saves
from dcp_mem.common import faults
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.orphans import collect_older_attempts, orphans
from dcp_mem.flushing.parts import FlushJob, drop_part
from dcp_mem.flushing.registration import Registration
from dcp_mem.format import names
from dcp_mem.format.history import from_csv
from dcp_mem.format.manifest import FlushRecord
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.locks import JobLock, RunIdentity
from dcp_mem.storage.posix import PosixStorage
from tests.support.checkpoints.jobs import Job, load, load_as_torch, save
from tests.support.checkpoints.roundtrip import through_fsspec
from tests.support.processes.forks import forked, forked_ranks, in_process
from tests.support.storage.servers import StorageRoot

_ROUNDS = 6
"""Looks in which every flusher is done that can be."""


@dataclass(frozen=True)
class Nodes:
    """Nodes' memory, and the storage that they share."""

    root: Path
    url: Path

    @property
    def stored(self) -> Path:
        return self.url / "step-1"

    def memory(self, number: int) -> JobMemory:
        return JobMemory(str(self.root / f"node{number}"), "job")

    def held(self, number: int) -> LocalCheckpoint:
        (held,) = self.memory(number).find("step-1")
        return held

    def ids(self, numbers: Collection[int]) -> frozenset[str]:
        return frozenset(self.memory(number).node for number in numbers)

    def flusher(self, number: int, running: Collection[int] | None) -> JobFlusher:
        """A node's flusher, that knows the job to run on these nodes."""
        return JobFlusher(str(self.root / f"node{number}"), self.registration(running))

    def registration(self, running: Collection[int] | None) -> Registration:
        return Registration(
            job="job",
            url=str(self.url),
            overwrite=True,
            nodes=None if running is None else self.ids(running),
        )

    def job(self, number: int) -> Job:
        return Job(str(self.url), str(self.root / f"node{number}"))

    def outcome(self, number: int) -> tuple[str, str]:
        flush = self.held(number).flush
        return flush.outcome, flush.error

    def files(self, words: str) -> set[str]:
        return {path.name for path in self.stored.rglob("*") if words in path.name}


def _save_with_copies(root: str, url: str, replicas: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = Job(url, f"{root}/node{dist.get_rank()}").writer(replicas=replicas)
        save(writer, 1)
        writer.wait("step-1", "replicated", timeout=60)
        dist.barrier()
        writer.close(flush=False)


def _saved(directory: Path, replicas: int) -> Path:
    forked_ranks(_save_with_copies, 3, str(directory), "/nowhere", replicas)
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(tmp_path_factory.mktemp("saved"), 1)


@pytest.fixture(scope="module")
def saved_thrice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved(tmp_path_factory.mktemp("saved-thrice"), 2)


def _copied(saved: Path, memory_root: Path, url: Path) -> Nodes:
    for path in saved.iterdir():
        shutil.copytree(path, memory_root / path.name)
    return Nodes(memory_root, url)


@pytest.fixture
def nodes(saved: Path, memory_root: Path, tmp_path: Path) -> Nodes:
    return _copied(saved, memory_root, tmp_path / "storage")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def _look(*flushers: JobFlusher, rounds: int = _ROUNDS) -> None:
    """Have flushers look at what is pending in turn, without the pauses between."""
    for _ in range(rounds):
        for flusher in flushers:
            flusher.retry()
            flusher.flush_next()


def _assert_durable(nodes: Nodes, numbers: Sequence[int]) -> None:
    assert [nodes.outcome(number) for number in numbers] == [("durable", "")] * len(numbers)
    assert forked(load_as_torch, nodes.stored) == 1
    elsewhere = Job(str(nodes.url), str(nodes.root / "elsewhere"))
    assert forked(_load_as_ours, elsewhere) == 1
    assert len(nodes.files(".distcp")) == 3
    assert not nodes.files(".part")
    history = (nodes.url / ".dcp_mem" / "checkpointHistories.csv").read_bytes()
    assert [line.name for line in from_csv(history)] == ["step-1"]


def _load_as_ours(job: Job) -> int:
    with job.reader() as reader:
        return load(reader, "step-1")


# -- who is lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_node_that_the_job_runs_without_has_its_part_done_and_its_commit(
    nodes: Nodes, lost: int
) -> None:
    left = [number for number in range(3) if number != lost]
    _look(*(nodes.flusher(number, left) for number in left))
    _assert_durable(nodes, left)
    (status, *_) = nodes.job(left[0]).writer().status()
    assert status.state is State.DURABLE


def _frozen_state(rank: int, step: int) -> dict[str, torch.Tensor]:
    base = torch.arange(1 << 19, dtype=torch.int32) * (rank + 2)
    return {f"base.{rank}": base, f"adapter.{rank}": torch.full((9,), step)}


def _save_frozen_with_copies(nodes: Nodes) -> None:
    rank = dist.get_rank()
    state = _frozen_state(rank, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        writer = nodes.job(rank).writer(replicas=1, frozen="base.*", keep_memory=2, persist=False)
        for step in (0, 1):  # the second checkpoint shares what the first one has
            state[f"adapter.{rank}"].fill_(step)
            writer.annotate_next_save(persist=step == 1)
            name = f"step-{step}"
            dcp_mem.save(state, checkpoint_id=name, storage_writer=writer)
            writer.wait(name, "replicated", timeout=60)
        dist.barrier()
        writer.close(flush=False)


def test_what_was_frozen_on_a_lost_node_goes_up_from_a_shared_copy(
    memory_root: Path, tmp_path: Path
) -> None:
    nodes = Nodes(memory_root, tmp_path / "storage")
    forked_ranks(_save_frozen_with_copies, 3, nodes)
    shutil.rmtree(memory_root / "node0")
    _look(*(nodes.flusher(number, (1, 2)) for number in (1, 2)))
    assert [nodes.outcome(number) for number in (1, 2)] == [("durable", "")] * 2
    expected = {name: one for rank in range(3) for name, one in _frozen_state(rank, 1).items()}
    out = {name: torch.zeros_like(one) for name, one in expected.items()}
    dcp.load(out, checkpoint_id=str(nodes.stored), no_dist=True)
    assert all(torch.equal(out[name], one) for name, one in expected.items())
    assert len(nodes.files(".distcp")) == 6


@pytest.mark.parametrize("running", [(0, 1, 2), None])
def test_nobody_stands_in_for_a_node_that_the_job_may_run_on(
    nodes: Nodes, running: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_mem.flushing.flusher, "_OWNER_GRACE", -1.0)
    flushers = [nodes.flusher(number, running) for number in (0, 2)]
    locks = [
        JobLock(nodes.memory(number).directory, "job", RunIdentity("run", "")) for number in (0, 2)
    ]
    _look(*flushers)
    assert not nodes.files("segment-")
    assert len(nodes.files(".distcp")) == 2
    assert nodes.held(0).pending
    for lock in locks:
        lock.close()
    _look(*flushers)
    _assert_durable(nodes, (0, 2))


def test_without_trainers_an_owner_has_its_time(nodes: Nodes) -> None:
    flushers = [nodes.flusher(number, (0, 1, 2)) for number in (0, 2)]
    _look(*flushers)
    assert not nodes.files("segment-")
    _look(nodes.flusher(1, (0, 1, 2)), *flushers)
    _assert_durable(nodes, (0, 1, 2))
    assert not nodes.files("segment-")


def test_an_owner_whose_time_is_long_is_taken_over_all_the_same(nodes: Nodes) -> None:
    flushers = [nodes.flusher(number, (0, 1, 2)) for number in (0, 2)]
    _look(*flushers, rounds=2)
    states = [
        flusher.queue.known_state(nodes.held(number))
        for flusher, number in zip(flushers, (0, 2), strict=True)
    ]
    for seconds in (3700.0, 1200.0):
        for state in states:
            state.own_part_seconds = 2400.0
            state.waiting_since -= seconds
            state.without_trainer_since -= seconds
        assert all(flusher.is_needed() for flusher in flushers)
        assert nodes.held(0).pending
        _look(*flushers)
    _assert_durable(nodes, (0, 2))


def test_what_failed_while_trainers_lived_is_tried_for_an_hour_after_them(nodes: Nodes) -> None:
    flusher = nodes.flusher(0, (0, 1, 2))
    trainer = JobLock(nodes.memory(0).directory, "job", RunIdentity("run", ""))
    _look(flusher, rounds=1)
    queue = flusher.queue
    queue.known_state(nodes.held(0)).waiting_since -= 4000.0
    assert queue.is_needed()
    trainer.close()
    assert queue.is_needed()
    queue._last_live -= 4000.0
    assert not queue.is_needed()


def test_who_doesnt_know_the_nodes_makes_nobody_forget_them(nodes: Nodes) -> None:
    flushers = [nodes.flusher(number, (0, 2)) for number in (0, 2)]
    for flusher in flushers:
        flusher.register(nodes.registration(None))
    _look(*flushers)
    _assert_durable(nodes, (0, 2))


def test_who_has_waited_long_gives_the_holders_of_copies_their_time(nodes: Nodes) -> None:
    (holder,) = (number for number in (0, 2) if _copies(nodes, number, 1))
    memory, waiter = nodes.memory(2 - holder), nodes.flusher(2 - holder, (0, 1, 2))
    newer = replace(nodes.held(0).manifest, name="step-2", save_id="ffffffff", count=9)
    memory.make_checkpoint_directory("step-2")
    memory.publish(newer)
    memory.record_flush(
        memory.find("step-2")[0], FlushRecord(save_id=newer.save_id, outcome="durable")
    )
    _look(waiter, rounds=1)
    state = waiter.queue.known_state(nodes.held(2 - holder))
    state.waiting_since -= 500.0
    waiter.register(nodes.registration((0, 2)))
    _look(waiter, nodes.flusher(holder, (0, 2)))
    assert nodes.outcome(2 - holder) == nodes.outcome(holder) == ("durable", "")


def _hears(
    heard: list[frozenset[str] | None], registration: Registration, *, is_waiting: bool
) -> str:
    heard.append(registration.nodes)
    return ""


@pytest.mark.parametrize("pending", [True, False])
@in_process
def test_a_run_tells_the_agent_once_where_it_runs_and_only_where_something_is_pending(
    memory_root: Path, tmp_path: Path, pending: bool
) -> None:
    job = Job(str(tmp_path / "run"), str(memory_root))
    heard: list[frozenset[str] | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_mem.runtime.session.Session, "wake_agent", lambda *_, **__: None)
        before = job.writer(persist=pending)
        save(before, 1)
        before.close(flush=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dcp_mem.flushing.agent_handle.AgentHandle,
            "wake",
            staticmethod(partial(_hears, heard)),
        )
        patch.setattr(dcp_mem.flushing.agent_handle.AgentHandle, "is_gone", lambda _: False)
        writer = job.writer(persist=False, keep_memory=4)
        for number in (2, 3, 4):
            save(writer, number)
        writer.close(flush=False)
    assert heard == [frozenset({JobMemory(str(memory_root), "job").node})] * pending


def _save_in_parts(job: Job) -> list[frozenset[str] | None]:
    heard: list[frozenset[str] | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dcp_mem.flushing.agent_handle.AgentHandle,
            "wake",
            staticmethod(partial(_hears, heard)),
        )
        writer = Job(job.url, f"{job.memory}/node{dist.get_rank()}").writer(
            persist=every_n_saves(1)
        )
        group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        name = f"alone-{dist.get_rank()}"
        dcp_mem.save(
            {"a": dist.get_rank()}, checkpoint_id=name, storage_writer=writer, process_group=group
        )
        save(writer, 1)
        writer.close(flush=False)
    return heard


def test_ranks_that_save_without_the_others_dont_take_those_for_lost(
    memory_root: Path, tmp_path: Path
) -> None:
    heard = forked_ranks(_save_in_parts, 2, Job(str(tmp_path / "run"), str(memory_root)))
    everywhere = frozenset(
        JobMemory(str(memory_root / f"node{number}"), "job").node for number in range(2)
    )
    # The run registers before its first checkpoint is there, and wakes the agent after each.
    assert heard == [[None, None, everywhere]] * 2


@pytest.mark.parametrize(
    "broken_off",
    [
        "flush.part:raise:2",
        "flush.parts:raise:2",
        "flush.segment:raise:2",
        "flush.manifest:raise:1",
        "flush.commit:raise:1",
        "flush.committed:raise:1",
    ],
)
def test_a_stand_in_that_is_broken_off_goes_on(nodes: Nodes, broken_off: str) -> None:
    (holder,) = (number for number in (1, 2) if _copies(nodes, number, 0))
    flushers = [nodes.flusher(number, (1, 2)) for number in (holder, 3 - holder)]
    _look(flushers[1], rounds=1)
    faults.arm(broken_off)
    _look(flushers[0], rounds=1)
    assert not faults.is_armed(broken_off.partition(":")[0])
    assert nodes.outcome(holder)[0] == "failed"
    _look(*flushers)
    assert [nodes.outcome(number)[0] for number in (1, 2)] == ["durable"] * 2
    assert forked(load_as_torch, nodes.stored) == 1
    assert not nodes.files(".part")


# -- nothing goes wrong with two at it -------------------------------------------------------------


@pytest.mark.parametrize("stopped", ["flush.part:raise:1", "flush.segments:raise:1"])
def test_an_owner_that_lives_after_all_does_no_harm(nodes: Nodes, stopped: str) -> None:
    owner = nodes.flusher(1, (0, 1, 2))
    faults.arm(stopped)
    owner.flush_next()
    _look(*(nodes.flusher(number, (0, 2)) for number in (0, 2)))
    there = {path: path.read_bytes() for path in nodes.stored.rglob("*") if path.is_file()}
    _look(owner)
    _assert_durable(nodes, (0, 1, 2))
    assert {path: path.read_bytes() for path in nodes.stored.rglob("*") if path.is_file()} == there


def test_an_owner_and_all_holders_may_work_at_the_same_time(
    saved_thrice: Path, memory_root: Path, tmp_path: Path
) -> None:
    nodes = _copied(saved_thrice, memory_root, tmp_path / "storage")
    # Each of them takes all other nodes for lost.
    flushers = [nodes.flusher(number, (number,)) for number in range(3)]
    _at_once(flushers)
    _assert_durable(nodes, (0, 1, 2))


def _load_from(root: StorageRoot) -> int:
    return load(through_fsspec(FsspecReader, f"{root.url}/run/step-1", root.storage_options))


def test_holders_get_along_on_every_kind_of_storage(
    saved_thrice: Path, memory_root: Path, storage_root: StorageRoot, tmp_path: Path
) -> None:
    nodes = _copied(saved_thrice, memory_root, tmp_path)
    registration = Registration(
        job="job",
        url=f"{storage_root.url}/run",
        overwrite=True,
        storage_options=storage_root.storage_options,
        nodes=nodes.ids((1, 2)),
    )
    flushers = [JobFlusher(str(memory_root / f"node{one}"), registration) for one in (1, 2)]
    _at_once(flushers)
    assert [nodes.outcome(number) for number in (1, 2)] == [("durable", "")] * 2
    assert forked(_load_from, storage_root) == 1
    assert len([name for name in storage_root.names() if name.endswith(".distcp")]) == 3


def _at_once(flushers: Sequence[JobFlusher]) -> None:
    threads = [threading.Thread(target=_look, args=[flusher]) for flusher in flushers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _look(*flushers)


def test_an_owner_that_drops_its_part_leaves_what_others_have_put_for_it(nodes: Nodes) -> None:
    holder = next(number for number in (0, 2) if _copies(nodes, number, 1))
    _look(nodes.flusher(holder, (holder,)), rounds=1)
    (node_manifest,) = nodes.files(f"-{nodes.memory(1).node}.json")
    # As if the holder had been killed before it put its manifest.
    (nodes.stored / names.OWN / node_manifest).unlink()
    there = nodes.files(".distcp")
    drop_part(
        FlushJob(
            checkpoint=nodes.held(1),
            node=nodes.memory(1).node,
            storage=PosixStorage(str(nodes.url)),
            overwrite=True,
        )
    )
    assert nodes.files(".distcp") == there
    assert any(name.startswith("__1_0-") for name in there)


def test_a_segment_that_went_away_again_is_put_again(nodes: Nodes) -> None:
    holder = next(number for number in (0, 2) if _copies(nodes, number, 1))
    _look(nodes.flusher(holder, (0, 2)), rounds=1)
    for name in (
        *nodes.files("__1_0-"),
        f"{names.OWN}/{next(iter(nodes.files(nodes.memory(1).node)))}",
    ):
        (nodes.stored / name).unlink()
    _look(*(nodes.flusher(number, (0, 2)) for number in (0, 2)))
    _assert_durable(nodes, (0, 2))


def test_a_newer_save_of_that_name_isnt_replaced_by_what_others_finish(
    nodes: Nodes, saved_thrice: Path, memory_root: Path
) -> None:
    newer, url = memory_root / "newer", nodes.url
    newer.mkdir(mode=0o700)
    late = _copied(saved_thrice, newer, url)
    early = nodes
    _look(*(late.flusher(number, (0, 1, 2)) for number in range(3)))
    committed = (late.stored / ".metadata").read_bytes()
    _look(*(early.flusher(number, (0, 2)) for number in (0, 2)))
    outcome, error = early.outcome(0)
    assert outcome == "refused"
    assert "a newer run has taken it (generation 1" in error
    assert (late.stored / ".metadata").read_bytes() == committed
    assert forked(load_as_torch, late.stored) == 1


# -- copies that are of no use ---------------------------------------------------------------------


def _copies(nodes: Nodes, number: int, rank: int) -> list[Path]:
    return list(Path(nodes.held(number).directory).glob(f"__{rank}_0-*.distcp"))


def _flip_bits(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(0, 16 << 10, 64):
        data[place] ^= 1
    path.write_bytes(data)


def _lose_checksums(path: Path) -> None:
    (path.parent / names.checksums_file(path.name)).unlink()


def _lose_copy(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [_flip_bits, _lose_checksums, _lose_copy])
def test_a_copy_that_isnt_what_was_saved_doesnt_go_up(
    nodes: Nodes, harm: Callable[[Path], None]
) -> None:
    (copy,) = (path for number in (0, 2) for path in _copies(nodes, number, 1))
    harm(copy)
    flushers = [nodes.flusher(number, (0, 2)) for number in (0, 2)]
    _look(*flushers)
    assert not nodes.files("__1_0-")
    assert not nodes.files("segment-")
    assert nodes.held(0).pending
    assert nodes.held(0).flush.outcome == ""


def test_where_nobody_has_the_segment_the_reason_names_the_node(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy,) = (path for number in (0, 2) for path in _copies(nodes, number, 1))
    copy.unlink()
    monkeypatch.setattr(dcp_mem.flushing.flusher, "_PEER_GRACE", -1.0)
    flushers = [nodes.flusher(number, (0, 2)) for number in (0, 2)]
    _look(*flushers, rounds=1)
    lost = nodes.memory(1).node
    for number in (0, 2):
        outcome, error = nodes.outcome(number)
        assert outcome == "failed"
        assert (
            f"node {lost} is lost, and no other has put a copy of the segments of ranks 1 yet"
            in error
        )


def test_another_holder_does_what_a_damaged_copy_keeps_one_from(
    saved_thrice: Path, memory_root: Path, tmp_path: Path
) -> None:
    nodes = _copied(saved_thrice, memory_root, tmp_path / "storage")
    (copy,) = _copies(nodes, 0, 1)
    _flip_bits(copy)
    flushers = [nodes.flusher(number, (0, 2)) for number in (0, 2)]
    _look(flushers[0], rounds=2)
    assert not nodes.files("__1_0-")
    _look(*flushers)
    _assert_durable(nodes, (0, 2))


# -- what is left on storage -----------------------------------------------------------------------


def test_what_others_have_put_for_a_lost_node_goes_with_the_attempt(nodes: Nodes) -> None:
    holder = next(number for number in (0, 2) if _copies(nodes, number, 1))
    _look(nodes.flusher(holder, (0, 2)), rounds=1)
    (table,) = nodes.files("segment-")
    storage = PosixStorage(str(nodes.url))
    assert f"step-1/{names.OWN}/{table}" in {one.key for one in orphans(storage, -60)}
    manifest = nodes.held(0).manifest
    newer = replace(manifest, save_id="ffffffff", count=manifest.count + 1)
    storage.put(f"step-1/{names.stored_manifest(newer.save_id)}", newer.to_json())
    collect_older_attempts(storage, newer)
    assert {path.name for path in nodes.stored.rglob("*") if path.is_file()} == {
        "manifest-ffffffff.json"
    }
