"""Following a run from outside: which checkpoints come, from where, and what is held meanwhile."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import Result
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    ConfigError,
    Follower,
    MemoryRootRefused,
    MemoryStorageWriter,
    RankFailed,
    SegmentCorrupt,
    WaitTimeout,
)
from tests.support import REPOSITORY
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import (
    Job,
    committed_in,
    load,
    load_as_torch,
    make_state,
    number_of,
    save,
    wait_for_spare_slots,
    wait_until,
)
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.command import command
from tests.support.processes.forks import Forks, forked_ranks, forking, raised_by
from tests.support.processes.launch import TORCHRUN, run_python, running_python
from tests.support.storage.patience import asked_once
from tests.support.storage.servers import StorageRoot

pytestmark = pytest.mark.timeout(120)

_PATIENCE_SECONDS = 60.0
_ROWS = torch.arange(600.0).view(60, 10)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where processes of a test leave each other files."""
    directory = tmp_path / "notes"
    directory.mkdir()
    return directory


@pytest.fixture
def elsewhere(job: Job, memory_root: Path) -> Job:
    """The job as another node has it: on storage alone."""
    return Job(job.url, str(memory_root / "other"), name=None)


def _follow(job: Job, state: dict[str, Any] | None = None, **options: Any) -> Follower:
    options = {"poll_seconds": 0.02, "timeout": _PATIENCE_SECONDS} | options
    options |= {"memory_root": job.memory, "job": job.name}
    options |= {"storage_options": job.storage_options}
    return dcp_mem.follow(job.url, state, **options)


def _part() -> dict[str, Any]:
    """The part of the state that an evaluator wants, empty."""
    return {"sharded": torch.full((60, 10), -1.0), "nested": {"step": -1}}


def _columns() -> dict[str, Any]:
    """The same part on several ranks, sharded by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full_like(torch.empty(60, 10).chunk(dist.get_world_size(), 1)[0], -1)
    return {"sharded": DTensor.from_local(local, mesh, [Shard(1)]), "nested": {"step": -1}}


def _number(state: dict[str, Any]) -> int:
    """The number of the save that all of the part belongs to."""
    number: int = state["nested"]["step"]
    sharded = state["sharded"]
    whole = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
    assert torch.equal(whole, _ROWS + number), f"a mix, or not {number}"
    return number


def _names_in(job: Job) -> set[str]:
    return {path.parent.parent.name for path in job.directory.glob("*/.dcp_mem/manifest.json")}


def _links_of(job: Job) -> list[Path]:
    links = job.directory / ".links"
    return list(links.iterdir()) if links.exists() else []


# -- a trainer, in this process or in others ------------------------------------------------------


@contextlib.contextmanager
def _saving(job: Job, **options: Any) -> Iterator[Callable[..., None]]:
    """A writer in this process; saves the states of these numbers."""

    def save_all(*numbers: int) -> None:
        for number in numbers:
            _save(writer, number)

    with job.writer(**{"agent": "thread", **options}) as writer:
        yield save_all


def _save(writer: MemoryStorageWriter, number: int) -> None:
    writer.annotate_next_save(step=number, metrics={"loss": 1 / number})
    save(writer, number)
    wait_for_spare_slots()  # as a training step takes longer than these


def _train(job: Job, notes: Path, options: dict[str, Any], is_node: bool) -> None:
    """Save what the test asks for by files; end, as a run does, when it asks for that."""
    with (_on_node(job) if is_node else job).writer(**{"agent": "thread", **options}) as writer:
        done: set[str] = set()
        while not (notes / "end").exists():
            for path in sorted(notes.glob("save-*"), key=lambda one: int(one.name[5:])):
                if path.name not in done:
                    done.add(path.name)
                    _save(writer, int(path.name[5:]))
                    if not dist.is_initialized() or dist.get_rank() == 0:
                        (notes / f"saved-{path.name[5:]}").touch()
            time.sleep(0.005)


def _on_node(job: Job) -> Job:
    """The job on this rank's node: each rank has a memory root of its own here."""
    return Job(job.url, f"{job.memory}/node-{dist.get_rank()}")


class _Trainer:
    """A running trainer, and what to ask of it."""

    def __init__(self, forks: Forks[None], notes: Path) -> None:
        self.forks, self._notes = forks, notes

    def save(self, *numbers: int) -> None:
        for number in numbers:
            (self._notes / f"save-{number}").touch()
            wait_until((self._notes / f"saved-{number}").exists, f"step-{number} is saved")

    def end(self) -> None:
        (self._notes / "end").touch()
        self.forks.join()


@contextlib.contextmanager
def _training(
    job: Job, notes: Path, *, ranks: int | None = None, nodes: int | None = None, **options: Any
) -> Iterator[_Trainer]:
    for path in notes.glob("save*"):  # of an earlier life of the trainer
        path.unlink()
    with forking(_train, ranks or nodes, job, notes, options, nodes is not None) as forks:
        yield _Trainer(forks, notes)


# -- which checkpoints ----------------------------------------------------------------------------


def test_new_checkpoints_come_as_they_are_saved_and_a_slow_follower_skips_to_the_newest(
    memory_job: Job, notes: Path
) -> None:
    state, seen = _part(), []
    with _training(memory_job, notes) as trainer:
        trainer.save(1, 2)
        for checkpoint in _follow(memory_job, state):
            seen.append((checkpoint.name, checkpoint.step, checkpoint.metrics["loss"]))
            assert _number(state) == checkpoint.step
            assert checkpoint.report is not None
            assert checkpoint.report.source == "memory"
            if len(seen) == 3:
                break
            trainer.save(*((3,) if len(seen) == 1 else (4, 5, 6)))
        trainer.end()
    assert seen == [("step-2", 2, 1 / 2), ("step-3", 3, 1 / 3), ("step-6", 6, 1 / 6)]


def test_another_node_follows_by_storage(storage_root: StorageRoot, memory_root: Path) -> None:
    options = storage_root.storage_options
    job = Job(storage_root.url, str(memory_root), options)
    other = Job(storage_root.url, str(memory_root / "other"), options, name=None)
    state, seen = _part(), []
    with _saving(job) as save_all:
        save_all(1)
        for checkpoint in _follow(other, state):
            seen.append(_number(state))
            assert checkpoint.is_durable
            assert checkpoint.report is not None
            assert checkpoint.report.source == "storage"
            if len(seen) == 2:
                break
            save_all(2)
    assert seen == [1, 2]


def test_only_durable_leaves_out_what_stays_in_memory(job: Job) -> None:
    seen = []
    with _saving(job, persist=dcp_mem.every_n_saves(3), keep_memory=4) as save_all:
        save_all(1, 2)
        for checkpoint in _follow(job, _part(), only_durable=True):
            seen.append(checkpoint.name)
            assert checkpoint.is_durable
            assert checkpoint.report is not None
            assert checkpoint.report.source == "memory"
            if len(seen) == 2:
                break
            save_all(3, 4)
    assert seen == ["step-1", "step-4"]


def test_rejected_checkpoints_are_not_handed_out(job: Job) -> None:
    seen = []
    with CheckpointManager(
        job.url, keep_memory=3, memory_root=job.memory, job=job.name, agent="thread"
    ) as manager:
        for step in (1, 2):
            manager.save(step, make_state(step))
            manager.wait(step, progress=False)
        manager.reject(2, "the loss is NaN")
        for checkpoint in _follow(job, _part()):
            seen.append(checkpoint.step)
            if len(seen) == 2:
                break
            manager.save(3, make_state(3))
    assert seen == [1, 3]
    shutil.rmtree(job.directory)
    assert next(iter(_follow(job))).name == "step-3"


def test_what_torch_itself_has_saved_is_followed_too(job: Job) -> None:
    state = make_state(0)
    theirs = Path(job.url or "", "theirs")
    dcp.save(make_state(7), storage_writer=dcp.FileSystemWriter(str(theirs)))
    found = next(iter(_follow(job, state)))
    assert (found.name, found.step, found.save_id) == ("theirs", None, "")
    assert number_of(state) == 7


# -- ranks ----------------------------------------------------------------------------------------


def _evaluate_on_ranks(
    job: Job, notes: Path, count: int, is_node: bool
) -> list[tuple[str, int, str]]:
    state, seen = _columns(), []
    for checkpoint in _follow(_on_node(job) if is_node else job, state):
        assert checkpoint.report is not None
        seen.append((checkpoint.name, _number(state), checkpoint.report.source))
        (notes / f"rank-{dist.get_rank()}-has-{len(seen)}").touch()
        if len(seen) == count:
            break
    return seen


def _save_and_wait(trainer: _Trainer, notes: Path, numbers: Sequence[int]) -> None:
    for number in numbers:
        trainer.save(number)
        for rank in (0, 1):
            wait_until((notes / f"rank-{rank}-has-{number}").exists)


@pytest.mark.parametrize(
    "is_same_node",
    [
        pytest.param(True, id="same node", marks=pytest.mark.variant),
        pytest.param(False, id="another node"),
    ],
)
def test_all_ranks_of_an_evaluator_get_the_same_checkpoint_resharded(
    job: Job, elsewhere: Job, notes: Path, is_same_node: bool
) -> None:
    """Three ranks save rows while two ranks follow, with columns."""
    follower = job if is_same_node else elsewhere
    with (
        _training(job, notes, ranks=3) as trainer,
        forking(_evaluate_on_ranks, 2, follower, notes, 2, False) as evaluator,
    ):
        _save_and_wait(trainer, notes, (1, 2))
        first, second = evaluator.join()
    source = "memory" if is_same_node else "storage"
    assert first == second == [(f"step-{number}", number, source) for number in (1, 2)]


def test_what_lies_on_several_nodes_is_put_together_by_an_evaluator_on_all_of_them(
    memory_job: Job, notes: Path
) -> None:
    with (
        _training(memory_job, notes, nodes=2) as trainer,
        forking(_evaluate_on_ranks, 2, memory_job, notes, 2, True) as evaluator,
    ):
        _save_and_wait(trainer, notes, (1, 2))
        first, second = evaluator.join()
        with pytest.raises(WaitTimeout):
            next(iter(_follow(Job(None, f"{memory_job.memory}/node-0"), timeout=0.2)))
        assert forked_ranks(_ask_for_files, 2, memory_job) == ["ConfigError"] * 2
    source = "memory and peers"
    assert first == second == [(f"step-{number}", number, source) for number in (1, 2)]


def _ask_for_files(job: Job) -> str:
    checkpoints = iter(_follow(_on_node(job)))
    checkpoint = next(checkpoints)
    return type(raised_by(checkpoint.files().__enter__)).__name__


def test_copies_make_a_checkpoint_whole_on_one_node_and_stand_in_for_what_is_damaged(
    memory_job: Job, notes: Path
) -> None:
    node = Job(None, f"{memory_job.memory}/node-0")
    with _training(memory_job, notes, nodes=2, replicas=1) as trainer:
        trainer.save(1)
        checkpoint = next(followed := iter(_follow(node)))
        with checkpoint.files() as files:
            assert load(dcp.FileSystemReader(files.path)) == 1
        state = _part()
        assert checkpoint.load(state).source == "memory"
        assert _number(state) == 1
        followed.close()  # type: ignore[attr-defined]
        _damage(node, "step-1")
        found = forked_ranks(_load_on_nodes, 2, memory_job)
        assert found == [(1, "memory and peers")] * 2


def _load_on_nodes(job: Job) -> tuple[int, str]:
    state = _part()
    for checkpoint in _follow(_on_node(job)):
        source = checkpoint.load(state).source
        return _number(state), source
    raise AssertionError("nothing has come")


def _load_what_isn_t_there(job: Job) -> list[str]:
    state = {"sharded": torch.zeros(60, 10)}
    if dist.get_rank() == 1:
        state["no-such-tensor"] = torch.zeros(3)
    error = raised_by(lambda: list(_follow(job, state, timeout=5)))
    again = _part()
    next(iter(_follow(job, again)))
    return [type(error).__name__, str(_number(again))]


def _stop_on_one_rank(job: Job) -> int:
    follower, count = _follow(job, timeout=None), 0
    for _ in follower:
        count += 1
        if dist.get_rank() == 1:
            follower.stop()
    return count


def test_what_a_rank_lacks_is_raised_on_all_and_a_stop_on_one_ends_all(memory_job: Job) -> None:
    with _saving(memory_job) as save_all:
        save_all(1)
        first, second = forked_ranks(_load_what_isn_t_there, 2, memory_job)
        assert first == ["RankFailed", "1"]
        assert second[0] != "NoneType"
        assert second[1] == "1"
        assert forked_ranks(_stop_on_one_rank, 2, memory_job) == [1, 1]


def test_a_rank_that_is_killed_leaves_none_waiting(memory_job: Job, notes: Path) -> None:
    with _saving(memory_job) as save_all:
        save_all(1)
        with forking(_wait_with_a_rank_that_dies, 2, memory_job, notes) as ranks:
            for rank in (0, 1):
                wait_until((notes / f"rank-{rank}-waits").exists)
            ranks.kill(1)
            wait_until((notes / "rank-0-raised").exists)
        assert (notes / "rank-0-raised").read_text() == RankFailed.__name__


def _wait_with_a_rank_that_dies(job: Job, notes: Path) -> None:
    def exhaust() -> None:
        for _ in _follow(job, timeout=None):
            (notes / f"rank-{dist.get_rank()}-waits").touch()

    error = raised_by(exhaust)
    (notes / "raised").write_text(type(error).__name__)
    (notes / "raised").rename(notes / f"rank-{dist.get_rank()}-raised")


# -- what is held ---------------------------------------------------------------------------------


def test_retention_leaves_the_bytes_of_what_is_held_and_no_save_waits(
    memory_job: Job, notes: Path
) -> None:
    """A slow reader, and a trainer that keeps one checkpoint and saves many."""
    with _training(memory_job, notes, keep_memory=1) as trainer:
        trainer.save(1)
        for checkpoint in _follow(memory_job):
            if checkpoint.step == 1:
                trainer.save(*range(2, 7))
                assert _names_in(memory_job) == {"step-6"}
                state = _part()
                assert checkpoint.load(state).source == "memory"
                assert _number(state) == 1
            else:
                assert _links_of(memory_job)
                checkpoint.release()
            assert not _links_of(memory_job)
            with pytest.raises(ConfigError, match="held no more"):
                checkpoint.load(_part())
            with pytest.raises(ConfigError, match="held no more"), checkpoint.files():
                pass
            if checkpoint.step == 6:
                break


def test_within_a_memory_limit_a_save_waits_until_a_follower_lets_go(
    memory_job: Job, notes: Path
) -> None:
    """A slot takes little over 1 MiB here, and counts 2 until it is there: the limit has two."""
    with _training(memory_job, notes, keep_memory=1, memory_limit="4MiB") as trainer:
        trainer.save(1)
        for checkpoint in _follow(memory_job):
            trainer.save(2)
            (notes / "save-3").touch()
            time.sleep(0.5)
            assert not (notes / "saved-3").exists(), "the limit was exceeded"
            state = _part()
            checkpoint.load(state)
            assert _number(state) == 1
            break
        trainer.save(3)


def test_retention_on_storage_leaves_a_checkpoint_that_is_held(job: Job, elsewhere: Job) -> None:
    root = Path(job.url or "")
    kept: dict[str, Any] = {"keep_memory": 1, "keep_storage": 1, "on_slow_storage": "all"}
    with _saving(job, **kept) as save_all:
        save_all(1)
        for checkpoint in _follow(elsewhere):
            save_all(2, 3, 4)
            wait_until(lambda: committed_in(root) == {"step-1", "step-4"}, str(committed_in(root)))
            with checkpoint.files() as files:
                assert files.path == f"{job.url}/step-1"
                assert load(dcp.FileSystemReader(files.path)) == 1
            state = _part()
            assert checkpoint.load(state).source == "storage"
            assert _number(state) == 1
            break
        save_all(5)
        wait_until(lambda: committed_in(root) == {"step-5"})


def test_memory_of_a_dead_job_stays_while_a_follower_reads_it(memory_job: Job) -> None:
    with _saving(memory_job) as save_all:
        save_all(1)
    for checkpoint in _follow(memory_job):
        (kept,) = dcp_mem.reclaim(memory_job.memory)
        assert "being read" in kept.kept
        state = _part()
        checkpoint.load(state)
        assert _number(state) == 1
        break
    (freed,) = dcp_mem.reclaim(memory_job.memory)
    assert not freed.kept
    assert not memory_job.directory.exists()


def test_links_stay_valid_whatever_becomes_of_the_checkpoint_and_may_be_deleted(
    memory_job: Job,
) -> None:
    """All saves have one name: a lease alone wouldn't keep the first; the last one comes as new."""
    state, seen = _part(), list[int]()
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1, "newest")
        for checkpoint in _follow(memory_job):
            with checkpoint.files() as files:
                assert Path(files.path).parent.parent == memory_job.directory / ".links"
                assert Path(files.path).name == "newest"
                if not seen:
                    for number in (2, 3, 4, 5):
                        save(writer, number, "newest")
                assert load_as_torch(Path(files.path)) == (5 if seen else 1)
                shutil.rmtree(files.path)
            checkpoint.load(state)
            seen.append(_number(state))
            if len(seen) == 2:
                break
    assert seen == [1, 5]
    assert not _links_of(memory_job)


# -- kills ----------------------------------------------------------------------------------------


def _hold(job: Job, notes: Path) -> None:
    for checkpoint in _follow(job):
        with checkpoint.files() as files:
            (notes / "held").write_text(files.path)
            time.sleep(600)


def test_a_killed_follower_keeps_no_memory(memory_job: Job, notes: Path) -> None:
    with _saving(memory_job, keep_memory=1) as save_all:
        save_all(1)
        with forking(_hold, None, memory_job, notes) as follower:
            wait_until((notes / "held").exists)
            save_all(2, 3)
            wait_until((notes / "held").read_text)
            assert load_as_torch(Path((notes / "held").read_text())) == 1
            follower.kill()
        assert _links_of(memory_job)
        save_all(4, 5)
        assert not _links_of(memory_job)
        directory = memory_job.directory
        files = [*directory.rglob("*.distcp"), *directory.rglob("*.slot")]
        assert len({path.stat().st_ino for path in files}) <= 2, files  # keep_memory + 1


def test_a_follower_goes_on_when_the_trainer_is_killed_and_starts_again(
    job: Job, notes: Path
) -> None:
    state = _part()
    checkpoints = iter(_follow(job, state, until_ended=True))
    with _training(job, notes) as trainer:
        trainer.save(1)
        assert next(checkpoints).name == "step-1"
        trainer.save(2)
        trainer.forks.kill()
    assert next(checkpoints).name == "step-2"
    assert _number(state) == 2
    with _training(job, notes) as trainer:
        trainer.save(2)  # it went back, and saves this step once more
        assert next(checkpoints).name == "step-2"
        trainer.save(3)
        assert next(checkpoints).name == "step-3"
        trainer.end()
    assert [one.name for one in checkpoints] == []
    assert _number(state) == 3


# -- damage, and what passes ----------------------------------------------------------------------


def _damage(job: Job, name: str) -> None:
    """Flip a bit of a tensor that the followers here load, once there are checksums."""
    own = job.directory / name / ".dcp_mem"
    wait_until(lambda: any(own.glob("checksums-__0_0-*.json")), "checksums")
    (segment,) = (job.directory / name).glob("__0_0-*.distcp")
    _flip_row(segment, float(name[5:]))


def _flip_row(segment: Path, number: float) -> None:
    flip(segment, segment.read_bytes().index(_ROWS[5:9].add(number).numpy().tobytes()))


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one_that_is_new_or_the_next(
    memory_job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    state = _part()
    with _saving(memory_job, keep_memory=3) as save_all:
        save_all(1)
        _damage(memory_job, "step-1")
        with pytest.raises(WaitTimeout):
            list(_follow(memory_job, state, timeout=0.3))
        assert "waiting for the next checkpoint" in caplog.text
        for checkpoint in _follow(memory_job):
            if checkpoint.step == 2:
                break
            with pytest.raises(SegmentCorrupt):
                checkpoint.load(state)
            save_all(2)
        followed = iter(_follow(memory_job, state))
        assert (next(followed).step, _number(state)) == (2, 2)
        save_all(3, 4)
        _damage(memory_job, "step-4")
        assert (next(followed).step, _number(state)) == (3, 3)
        assert "step-4 is damaged" in caplog.text


@pytest.mark.parametrize("trouble", ["opening", "reading", "damage"])
def test_what_can_t_be_opened_or_read_just_now_comes_later_and_what_is_damaged_does_not(
    job: Job, elsewhere: Job, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    with _saving(job, on_slow_storage="all") as save_all:
        save_all(1, 2)
    (segment,) = (Path(job.url or "") / "step-2").glob("__0_0-*.distcp")
    (catalog,) = segment.parent.rglob("catalog-*")
    aside, preadv, is_failing = catalog.with_name("aside"), os.preadv, True

    def read_or_fail(descriptor: int, *given: Any) -> int:
        if is_failing and Path(f"/proc/self/fd/{descriptor}").resolve() == segment:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *given)

    if trouble == "opening":
        catalog.rename(aside)
    elif trouble == "reading":
        monkeypatch.setattr(os, "preadv", read_or_fail)
    else:
        _flip_row(segment, 2.0)
    state, seen = _part(), []
    for _ in _follow(elsewhere, state, timeout=1):
        seen.append(_number(state))
        is_failing = False
        if aside.exists():
            aside.rename(catalog)
    assert seen == ([1] if trouble == "damage" else [1, 2])


def _follow_with_an_outage(job: Job) -> tuple[int, list[str]]:
    """Storage doesn't answer to a rank's first reads of segments, for longer than it is asked."""
    said: list[str] = []
    failures: list[str] = []
    preadv = os.preadv

    def read_or_fail(descriptor: int, *given: Any) -> int:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
        if dist.get_rank() == 0 and len(failures) < 2 and file.endswith(".distcp"):
            failures.append(file)
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return preadv(descriptor, *given)

    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dcp_mem").addHandler(handler)
    os.preadv = read_or_fail
    state = _columns()
    with asked_once():
        next(iter(_follow(job, state)))
    return _number(state), [one for one in said if "trying again" in one]


def test_a_storage_that_doesn_t_answer_during_a_load_is_asked_again_by_all_ranks(
    job: Job, elsewhere: Job
) -> None:
    with _saving(job) as save_all:
        save_all(1)
    first, second = forked_ranks(_follow_with_an_outage, 2, elsewhere)
    assert (first[0], second[0]) == (1, 1)
    assert first[1], "storage was not missed"
    assert len(first[1]) == len(second[1])


# -- the end, and wrong input ---------------------------------------------------------------------


def test_it_waits_for_a_run_that_doesn_t_exist_yet_and_ends_with_it(job: Job, notes: Path) -> None:
    with forking(_follow_to_the_end, None, job, notes) as follower:
        wait_until((notes / "following").exists)
        with _saving(job, persist=dcp_mem.every_n_saves(2)) as save_all:
            for number in (1, 2):
                save_all(number)
                wait_until((notes / f"has-{number}").exists)
        assert follower.join() == [[1, 2]]


def _follow_to_the_end(job: Job, notes: Path) -> list[int]:
    (notes / "following").touch()
    state, seen = _part(), []
    for _ in _follow(job, state, until_ended=True):
        seen.append(_number(state))
        (notes / f"has-{seen[-1]}").touch()
    return seen


def test_the_last_checkpoint_of_a_run_comes_and_then_the_end_though_storage_was_silent(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _saving(job) as save_all:
        save_all(1, 2)
    ended: dict[str, Any] = {"until_ended": True, "timeout": None}
    assert [one.name for one in _follow(job, **ended)] == ["step-2"]
    failures: list[str] = []

    scandir = os.scandir

    def scan_or_fail(path: Any = ".") -> Any:
        is_root = isinstance(path, str) and os.path.realpath(path) == job.url
        if is_root and len(failures) < 3:
            failures.append(str(path))
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan_or_fail)
    with asked_once():
        assert [one.name for one in _follow(job, only_durable=True, **ended)] == ["step-2"]
    assert failures


def test_memory_of_an_earlier_run_doesn_t_end_the_one_that_goes_on_elsewhere(
    job: Job, memory_root: Path
) -> None:
    with _saving(job) as save_all:
        save_all(1)
    with _saving(Job(job.url, str(memory_root / "other"))) as save_all:
        save_all(2)
        wait_until(lambda: "step-2" in committed_in(Path(job.url or "")))
        begun = time.monotonic()
        follower = _follow(job, until_ended=True, timeout=0.5)
        assert [one.name for one in follower] == ["step-2"]
        assert time.monotonic() - begun >= 0.5, "it has ended with the earlier run"


def test_nothing_in_time_is_said_once_and_an_error_that_says_where_it_looked(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with _saving(Job(None, job.memory, name="neighbour")) as save_all:
        save_all(1)
        with pytest.raises(WaitTimeout) as error:
            list(_follow(job, timeout=0.5))
    for part in (str(job.url), job.memory, "job job", "neighbour", "memory_root="):
        assert part in str(error.value)
    assert not job.directory.exists()
    said = [one for one in caplog.records if "waiting for it" in one.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.variant), 2])
def test_surveys_at_each_look_keep_no_follower_from_its_end(job: Job, ranks: int) -> None:
    ends = forked_ranks(_follow_with_a_survey_each_time, ranks, job, timeout=60)
    assert ends == ["step-1"] * ranks


def _follow_with_a_survey_each_time(job: Job) -> str:
    """A run that has ended, one that never comes, and one of which nothing becomes durable."""
    with job.writer(agent="thread") as writer:
        save(writer, 1)
    (followed,) = _follow(job, timeout=None, until_ended=True, poll_seconds=1e-9)
    nothing = Job(None, job.memory, name="none")
    with pytest.raises(WaitTimeout):
        list(_follow(nothing, timeout=0.3, until_ended=True, poll_seconds=1e-9))
    kept = Job(f"{job.url}-kept", job.memory, name="kept")
    with kept.writer(persist=False) as writer:
        save(writer, 1)
        with pytest.raises(WaitTimeout):
            list(_follow(kept, only_durable=True, timeout=0.3, poll_seconds=1e-9))
    return followed.name


def test_a_job_of_another_root_is_refused(job: Job, tmp_path: Path) -> None:
    with _saving(job) as save_all:
        save_all(1)
    other = Job(str(tmp_path / "another-run"), job.memory, name=job.name)
    with pytest.raises(ConfigError, match=r"is that of .*/run, not of .*/another-run"):
        list(_follow(other))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert next(iter(_follow(Job(f"{link}/run", job.memory)))).name == "step-1"


def test_a_memory_root_that_others_may_write_to_is_refused(memory_job: Job) -> None:
    with _saving(memory_job) as save_all:
        save_all(1)
        os.chmod(memory_job.memory, 0o777)
        try:
            with pytest.raises(MemoryRootRefused):
                list(_follow(memory_job))
        finally:
            os.chmod(memory_job.memory, 0o700)


def test_a_file_in_the_place_of_a_root_is_refused(memory_root: Path) -> None:
    path = memory_root / "file"
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(dcp_mem.DcpMemError, match="file"):
        list(_follow(Job(str(path), str(memory_root))))


# -- the command ----------------------------------------------------------------------------------

_LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
state = {"sharded": torch.zeros(60, 10)}
dcp.load(state, checkpoint_id=sys.argv[1])
with open(sys.argv[2], "a") as file:
    print(sys.argv[3], int(state["sharded"][0, 0]), file=file)
"""


def _command(job: Job, *arguments: str) -> list[str]:
    places = ["--memory-root", job.memory, "--job", job.name or ""]
    return ["follow", job.url or "-", *places, "--every", "0.05", *arguments]


@contextlib.contextmanager
def _started(job: Job, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "dcp_mem.cli.main", *_command(job, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(job: Job, *arguments: str) -> Result:
    return command(*_command(job, *arguments))


@pytest.mark.parametrize(
    "is_same_node",
    [
        pytest.param(True, id="same node"),
        pytest.param(False, id="another node", marks=pytest.mark.variant),
    ],
)
def test_exec_runs_a_program_on_each_new_checkpoint_that_torch_s_readers_load(
    job: Job, memory_root: Path, notes: Path, is_same_node: bool
) -> None:
    follower = job if is_same_node else Job(job.url, str(memory_root / "other"))
    script, found = notes / "evaluate.py", notes / "found"
    script.write_text(_LOAD)
    command = f"{sys.executable} -W ignore {script} {{path}} {found} {{name}}/{{step}}"
    with _saving(job) as save_all:
        save_all(1)
        with _started(follower, "--exec", command, "--times", "2") as process:
            wait_until(found.exists)
            save_all(2)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert found.read_text().splitlines() == ["step-1/1 1", "step-2/2 2"]
    assert [line.split()[0] for line in out.splitlines()] == ["step-1", "step-2"]
    assert not _links_of(job)


def test_exec_that_fails_is_said_and_the_next_checkpoint_comes(
    memory_job: Job, notes: Path
) -> None:
    command = f"sh -c 'test \"$2\" = step-2 || exit 3; touch {notes}/done' sh {{path}} {{name}}"
    with memory_job.writer() as writer:
        writer.annotate_next_save(step=1, metrics={"loss": float("nan"), "accuracy": 0.5})
        save(writer, 1)
        told = _run(memory_job, "--exec", "false {path}", "--times", "1")
        with _started(memory_job, "--exec", command, "--times", "2", "--json") as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            save(writer, 2)
            second = json.loads(process.stdout.readline())
            process.wait(60)
    assert "step-1: false ended with exit code 1" in told.stderr
    assert (first["name"], first["exit_code"]) == ("step-1", 3)
    assert first["metrics"] == {"loss": None, "accuracy": 0.5}, "JSON has no NaN"
    assert (second["name"], second["exit_code"]) == ("step-2", 0)
    assert (notes / "done").exists()
    assert told.exit_code == process.returncode == 1


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.variant), signal.SIGTERM]
)
def test_a_signal_ends_the_command_and_the_follower_and_leaves_nothing(
    memory_job: Job, notes: Path, number: signal.Signals
) -> None:
    command = (
        f'sh -c \'trap "touch {notes}/told; exit 0" INT TERM; echo $$ > {notes}/pid; '
        "while :; do sleep 0.05; done' {path}"
    )
    with memory_job.writer() as writer:
        save(writer, 1)
        with _started(memory_job, "--exec", command) as process:
            wait_until((notes / "pid").exists)
            wait_until((notes / "pid").read_text)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert (notes / "told").exists()
        assert not _links_of(memory_job)


def test_a_signal_ends_a_follower_that_waits(memory_job: Job) -> None:
    with memory_job.writer() as writer:
        save(writer, 1)
        with _started(memory_job) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("step-1")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    assert "Traceback" not in err


def test_links_outlive_a_killed_follower_for_as_long_as_its_command_runs(
    memory_job: Job, notes: Path
) -> None:
    command = (
        f'sh -c \'echo "$1" > {notes}/path.part; mv {notes}/path.part {notes}/path; '
        f"while ! test -e {notes}/over; do sleep 0.05; done' sh {{path}}"
    )
    with memory_job.writer(keep_memory=1) as writer:
        save(writer, 1)
        with _started(memory_job, "--exec", command) as process:
            wait_until((notes / "path").exists)
            process.kill()
            process.wait()
        for number in range(2, 6):
            save(writer, number)
        assert _names_in(memory_job) == {"step-5"}
        assert load_as_torch(Path((notes / "path").read_text().strip())) == 1
        (notes / "over").touch()

        def has_gone() -> bool:
            save(writer, 6)
            return not _links_of(memory_job)

        wait_until(has_gone, "the links of a command that has ended")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--exec", "no-such-program {path}"], 2, "there is no such command"),
        pytest.param(["--exec", "'"], 2, "--exec", marks=pytest.mark.variant),
        (["--timeout", "0.1"], 1, "no checkpoint that can be taken"),
        pytest.param(
            ["--durable", "--timeout", "0.1"], 1, "no durable checkpoint", marks=pytest.mark.variant
        ),
    ],
)
def test_wrong_input_is_one_line(job: Job, arguments: Sequence[str], code: int, said: str) -> None:
    result = _run(job, *arguments)
    assert result.exit_code == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr


# -- the guide, under torchrun --------------------------------------------------------------------

_MODEL = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

@torch.no_grad()
def evaluate(model):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(7))
    return (model(x) - x.flip(1)).square().mean().item()
"""
_TRAINER = """
import sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from dcp_mem import CheckpointManager, TrainState
from model import evaluate, make_model

root, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group()
model = make_model()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"app": TrainState(model, optimizer)}
with CheckpointManager(root, keep_memory=2) as manager:
    last = manager.restore(state) or 0
    for step in range(last + 1, steps + 1):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step, state)
        loss = evaluate(model)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
        time.sleep(seconds)
dist.destroy_process_group()
"""


def _losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss (\S+)", output)}


@needs_fsdp_on_cpu
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_guide_s_evaluator_follows_a_training_that_is_killed_and_started_again(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    guide = (REPOSITORY / "docs" / "following.md").read_text()
    (tmp_path / "evaluate.py").write_text(guide.split("```python\n")[1].split("```")[0])
    (tmp_path / "model.py").write_text(_MODEL)
    (tmp_path / "train.py").write_text(_TRAINER)
    root = str(tmp_path / "run")
    with running_python(*TORCHRUN, tmp_path / "evaluate.py", root) as evaluator:
        killed = {"DCP_MEM_FAULTS": "stage.copied:kill:4"}
        trainer = (*TORCHRUN, tmp_path / "train.py", root)
        first = run_python(*trainer, "30", "0.3", timeout=150, env=killed)
        assert first.returncode != 0, first.stdout
        second = run_python(*trainer, "8", "0.3", timeout=150)
        assert second.returncode == 0, second.stdout
        evaluated, _ = evaluator.communicate(timeout=60)
    assert evaluator.returncode == 0, evaluated
    found, trained = _losses(evaluated), _losses(first.stdout) | _losses(second.stdout)
    assert found == {step: trained[step] for step in found}
    assert max(found) == 8
    assert min(found) <= max(_losses(first.stdout)), "it followed the second life alone"
