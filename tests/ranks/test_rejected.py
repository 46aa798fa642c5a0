"""Checkpoints that are whole and not to be resumed from: rejected, not finite, crash loops."""

import logging
import os
import pickle
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dcp_mem import CheckpointManager, CheckpointNotFound
from tests.support.checkpoints.jobs import Job, wait_until
from tests.support.command import reject
from tests.support.processes import faults
from tests.support.processes.forks import forked, forked_ranks, forking

pytestmark = pytest.mark.timeout(120)


def _manager(root: Path, url: Path | None, **options: Any) -> CheckpointManager:
    return CheckpointManager(url, memory_root=root, job="job", agent="thread", **options)


def _state(value: float) -> dict[str, Any]:
    return {
        "weight": torch.full((50, 7), float(value)),
        "half": torch.zeros(9, dtype=torch.bfloat16),
    }


def _save(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        assert manager.save(step, _state(step))
        manager.wait(step, "durable" if manager.list()[0].persist else "complete", progress=False)


def _reject(root: Path, url: Path | None) -> int | None:
    with _manager(root, url, keep_memory=3) as manager:
        _save(manager, 1, 2, 3)
        manager.reject(3, "the loss is NaN")
        with pytest.raises(CheckpointNotFound):
            manager.reject(7, "there is none")
        assert manager.latest() == 2
        assert manager.restore(_state(0)) == 2
        passed_over = manager.report().passed_over
        assert any("step-3" in line and "NaN" in line for line in passed_over), passed_over
        return manager.restore(_state(0), step=3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_rejected_checkpoint_is_passed_over_and_said_so(
    memory_root: Path, tmp_path: Path, ranks: int, is_stored: bool
) -> None:
    url = tmp_path / "storage" if is_stored else None
    assert forked_ranks(_reject, ranks, memory_root, url) == [3] * ranks
    manager = _manager(memory_root, url)
    state = _state(0)
    assert manager.restore(state) == 2
    assert state["weight"][0, 0] == 2
    manager.close()


def _reject_while_older_ones_leave(root: Path) -> tuple[int | None, list[str], tuple[str, ...]]:
    """Reject step-4 between its completion and the retention that this rank then applies."""
    with _manager(root, None, keep_memory=2) as manager:
        _save(manager, 1, 2, 3)
        job = Job(None, str(root))
        rejecting = faults.at_point(
            "complete.manifest", lambda: reject(job, "step-4", "the loss is NaN")
        )
        with rejecting:
            _save(manager, 4)
        assert manager.restore(_state(0)) == 3
        passed_over = manager.report().passed_over
        named = manager.restore(_state(0), step=4)
        before = [one.name for one in manager.list()]
        _save(manager, 5)
        assert [one.name for one in manager.list()] == ["step-5", "step-3"]
        return named, before, passed_over


def test_a_checkpoint_that_is_rejected_at_once_stays_until_the_next_save(memory_root: Path) -> None:
    """Another rank, or `dcp-mem reject`, may do it before this rank has let older ones leave."""
    named, names, passed_over = forked(_reject_while_older_ones_leave, memory_root)
    assert names == ["step-4", "step-3", "step-2"]
    assert named == 4
    assert any("step-4" in line and "NaN" in line for line in passed_over), passed_over


def _restore(root: Path, url: Path | None) -> int | None:
    with _manager(root, url) as manager:
        return manager.restore(_state(0))


def test_storage_alone_knows_of_a_rejection(memory_root: Path, tmp_path: Path) -> None:
    url = tmp_path / "storage"
    forked(_reject, memory_root, url)
    shutil.rmtree(memory_root / "job")
    assert forked(_restore, memory_root, url) == 2


def _keep_one(root: Path, url: Path) -> tuple[int | None, list[str]]:
    with _manager(root, url, keep_memory=1, keep_storage=1) as manager:
        _save(manager, 1, 2)
        # The flusher deletes older ones once `wait` may return.
        wait_until(lambda: not (url / "step-1" / ".metadata").exists(), "retention")
        manager.reject(2, "it is bad")
        before = manager.latest()
        _save(manager, 3)
        manager.reject(3, "it is bad, too")
        manager.close()
        return before, sorted(path.name for path in url.glob("step-*") if any(path.iterdir()))


def test_retention_doesn_t_count_what_was_rejected(memory_root: Path, tmp_path: Path) -> None:
    """With keep_storage=1 the newest one that is good goes only for another that is good."""
    before, stored = forked(_keep_one, memory_root, tmp_path / "storage")
    assert before is None  # step-1 left for step-2 before that was rejected
    assert stored == ["step-2", "step-3"]


def _save_nan(root: Path, url: Path | None, choice: str) -> tuple[str, ...]:
    """Save step-2 with values that aren't finite; return what the next save says of it."""
    with _manager(root, url, keep_memory=3, on_nonfinite=choice, on_error="raise") as manager:
        _save(manager, 1)
        bad = _state(2)
        bad["half"][4] = float("nan")
        bad["weight"][3, 3] = -float("inf")
        manager.save(2, bad)
        if choice == "ignore":
            return ()
        wait_until(lambda: manager.latest() == 1, "the rejection")
        assert manager.restore(_state(0)) == 1
        assert any("aren't finite" in line for line in manager.report().passed_over)
        return tuple(manager.save(3, _state(3)).troubles)


@pytest.mark.parametrize("is_stored", [True, False])
def test_values_that_are_not_finite_are_found_behind_training(
    memory_root: Path, tmp_path: Path, is_stored: bool
) -> None:
    url = tmp_path / "storage" if is_stored else None
    (trouble,) = forked(_save_nan, memory_root, url, "reject")
    assert "half (1)" in trouble
    assert "weight (1)" in trouble


def test_values_that_are_not_finite_are_nobody_s_business_by_default(memory_root: Path) -> None:
    forked(_save_nan, memory_root, None, "ignore")
    assert forked(_restore, memory_root, None) == 2


# -- crash loops ----------------------------------------------------------------------------------


def _start(root: Path, url: Path | None, last: int, action: str, restores: int = 1) -> int | None:
    """Resume, and die after so many steps."""
    manager = _manager(root, url, on_crash_loop=action, crash_loop_steps=5, save_interval_steps=100)
    for _ in range(restores):
        resumed = manager.restore(_state(0))
    for step in range(resumed or 0, last):
        manager.save(step, _state(step))
    return resumed


def _save_two(root: Path, url: Path | None) -> None:
    with _manager(root, url, keep_memory=2) as manager:
        _save(manager, 1, 2)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_crash_loop_falls_back_to_the_checkpoint_before(
    memory_root: Path, tmp_path: Path, is_stored: bool
) -> None:
    url = tmp_path / "storage" if is_stored else None
    forked(_save_two, memory_root, url)
    starts = [forked(_start, memory_root, url, 4, "fall_back") for _ in range(4)]
    assert starts == [2, 2, 2, 1]
    # There is nothing before that one: it is resumed from, however often.
    assert {forked(_start, memory_root, url, 4, "fall_back") for _ in range(4)} == {1}


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_start_that_restores_twice_counts_once(
    memory_root: Path, tmp_path: Path, is_stored: bool
) -> None:
    url = tmp_path / "storage" if is_stored else None
    forked(_save_two, memory_root, url)
    starts = [forked(_start, memory_root, url, 4, "fall_back", 2) for _ in range(4)]
    assert starts == [2, 2, 2, 1]


def _start_at(root: Path, step: int) -> tuple[int | None, int | None]:
    """Restore a step that is asked for; return it, and the newest that may be resumed from."""
    manager = _manager(root, None, on_crash_loop="fall_back")
    return manager.restore(_state(0), step), manager.latest()


def test_a_step_that_is_asked_for_is_neither_counted_nor_a_reason_to_reject(
    memory_root: Path,
) -> None:
    forked(_save_two, memory_root, None)
    for _ in range(3):
        assert forked(_start, memory_root, None, 4, "fall_back") == 2
    assert forked(_start_at, memory_root, 2) == (2, 2)
    assert forked(_start_at, memory_root, 1) == (1, 2)
    assert forked(_start, memory_root, None, 4, "fall_back") == 1


def _enter_again(root: Path) -> list[int | None]:
    """Resume four times with one manager, which an exception closes each time."""
    manager, resumed = _manager(root, None, on_crash_loop="fall_back"), list[int | None]()
    for _ in range(4):
        with suppress(ZeroDivisionError), manager:
            resumed.append(manager.restore(_state(0)))
            raise ZeroDivisionError
    return resumed


def test_a_manager_that_is_entered_again_counts_again(memory_root: Path) -> None:
    forked(_save_two, memory_root, None)
    assert forked(_enter_again, memory_root) == [2, 2, 2, 1]


def test_a_job_that_gets_far_enough_is_in_no_crash_loop(memory_root: Path) -> None:
    forked(_save_two, memory_root, None)
    starts = [
        forked(_start, memory_root, None, last, "fall_back") for last in (4, 4, 9, 4, 4, 9, 4)
    ]
    assert starts == [2] * 7


class _Life(NamedTuple):
    """One start of a job: what it resumed from, what was logged, what the report says."""

    resumed: int | None
    said: list[str]
    passed_over: tuple[str, ...]


class _Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _die_after(root: Path, url: Path | None, last: int, action: str, notes: Path) -> None:
    """Resume, train up to a step, and be killed; what was said is written down."""
    said = _Said()
    logging.getLogger("dcp_mem").addHandler(said)
    manager = _manager(root, url, on_crash_loop=action, crash_loop_steps=5, save_interval_steps=100)
    resumed = manager.restore(_state(0))
    for step in range((resumed or 0) + 1, last + 1):
        manager.save(step, _state(step))
    rank = dist.get_rank() if dist.is_initialized() else 0
    life = _Life(resumed, said.texts, manager.report().passed_over)
    notes.with_suffix(f".{rank}").write_bytes(pickle.dumps(life))
    if dist.is_initialized():
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_after(
    ranks: int | None, root: Path, url: Path | None, last: int, action: str, notes: Path
) -> list[_Life]:
    """The life of each rank of a job that resumes, trains up to a step, and is killed."""
    with (
        pytest.raises(AssertionError, match="SIGKILL"),
        forking(_die_after, ranks, root, url, last, action, notes) as running,
    ):
        running.join()
    found = [notes.with_suffix(f".{rank}") for rank in range(ranks or 1)]
    lives = [pickle.loads(path.read_bytes()) for path in found]
    for path in found:
        path.unlink()
    return lives


_TEXT = "step-2: the job has resumed from it 3 times in a row, and soon died"


@pytest.mark.parametrize(("is_stored", "ranks"), [(True, None), (False, None), (False, 2)])
def test_a_job_that_falls_back_from_a_crash_loop_says_so(
    memory_root: Path, tmp_path: Path, is_stored: bool, ranks: int | None
) -> None:
    url = tmp_path / "storage" if is_stored else None
    forked_ranks(_save_two, ranks or 1, memory_root, url)
    for _ in range(3):
        for life in _killed_after(ranks, memory_root, url, 4, "fall_back", tmp_path / "notes"):
            assert life == _Life(2, [], ())
    for life in _killed_after(ranks, memory_root, url, 4, "fall_back", tmp_path / "notes"):
        assert life.resumed == 1
        assert life.said.count(f"{_TEXT}; falling back to step-1") == 1, life
        (why,) = (text for text in life.passed_over if "step-2" in text)
        assert "3 times in a row" in why
    for life in _killed_after(ranks, memory_root, url, 4, "fall_back", tmp_path / "notes"):
        assert life.resumed == 1
        assert not any("falling back" in text for text in life.said)


def test_a_crash_loop_that_is_not_to_be_left_is_said_aloud(
    memory_root: Path, tmp_path: Path
) -> None:
    forked(_save_two, memory_root, None)
    lives = [
        life
        for _ in range(5)
        for life in _killed_after(None, memory_root, None, 4, "warn", tmp_path / "notes")
    ]
    assert [life.resumed for life in lives] == [2] * 5
    assert [life.said for life in lives[:4]] == [[], [], [], [_TEXT]]
    assert lives[4].said == [_TEXT.replace("3 times", "4 times")]
    assert {life.passed_over for life in lives} == {()}


def test_a_crash_loop_from_the_only_checkpoint_says_that_there_is_no_other(
    memory_root: Path, tmp_path: Path
) -> None:
    forked(_save_one, memory_root)
    for action in ("fall_back", "fall_back", "fall_back", "fall_back", "warn"):
        (life,) = _killed_after(None, memory_root, None, 4, action, tmp_path / "notes")
    assert life.resumed == 1
    (said,) = life.said
    assert said.endswith("and soon died, and there is no other")


def test_saves_that_get_far_enough_end_a_crash_loop(memory_root: Path, tmp_path: Path) -> None:
    """`save` is called at each step, due or not; step 7 is crash_loop_steps beyond step-2."""
    forked(_save_two, memory_root, None)
    for last in (6, 6, 7, 6, 6, 7, 6):
        (life,) = _killed_after(None, memory_root, None, last, "fall_back", tmp_path / "notes")
        assert life == _Life(2, [], ())


def _save_one(root: Path) -> None:
    with _manager(root, None) as manager:
        _save(manager, 1)


@pytest.mark.parametrize("action", ["warn", "ignore"])
def test_a_crash_loop_falls_back_only_where_that_was_chosen(memory_root: Path, action: str) -> None:
    forked(_save_two, memory_root, None)
    assert [forked(_start, memory_root, None, 4, action) for _ in range(5)] == [2] * 5
