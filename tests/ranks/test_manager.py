"""`CheckpointManager`: a training loop's saves, restores, listings and deletions."""

import json
import logging
import os
import pickle
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    CheckpointNotFound,
    ConfigError,
    FlushFailed,
    MemoryStorageWriter,
    NoRecoverableCheckpoint,
    RankFailed,
    State,
    TrainState,
    any_of,
    auto,
    every_n_saves,
    keep_best,
    keep_last,
)
from tests.support.checkpoints.hostile import json_file
from tests.support.checkpoints.jobs import make_state, wait_until
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.forks import forked, forked_ranks, killed_ranks, on_ranks, raised_by


def _manager(root: str | Path, url: str | Path | None, **options: Any) -> CheckpointManager:
    return CheckpointManager(url, memory_root=root, job="job", **options)


def _number(state: dict[str, Any]) -> int:
    [number] = {int(state["sharded"].flatten()[0]), int(state["replicated"].flatten()[0])}
    return number


# -- one process -----------------------------------------------------------------------------------


class _NotYet:
    """Has no state before the training has begun, as a data loader may."""

    def __init__(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    def state_dict(self) -> dict[str, Any]:
        if not self.is_ready:
            raise RuntimeError("not begun yet")
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def _restore_what_has_no_state(root: str, is_ready_elsewhere: bool) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    fresh = _NotYet(is_ready_elsewhere and rank == 1)
    with _manager(root, None) as manager:
        assert manager.restore({"loader": fresh}) is None
        assert "give a dict" in str(raised_by(lambda: manager.restore(fresh)))  # type: ignore[arg-type]
        manager.save(0, {"loader": _NotYet(is_ready=True)})
        return str(raised_by(lambda: manager.restore({"loader": fresh})))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_that_raises_is_none_to_restore_only_where_there_is_a_checkpoint(
    memory_root: Path, ranks: int
) -> None:
    found = forked_ranks(_restore_what_has_no_state, ranks, str(memory_root), ranks == 2)
    assert all("not begun yet" in one for one in found)


def test_a_loop_saves_when_due_and_goes_on_where_it_was(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url, save_interval_steps=3, persist=every_n_saves(2)) as manager:
        assert manager.restore({"n": 1}) is None
        assert manager.latest() is None
        outcomes = []
        for step in range(8):
            outcomes.append(manager.save(step, {"n": step}, metrics={"loss": 1 / (step + 1)}))
            if outcomes[-1].persist:
                manager.wait(step, progress=False)
        assert [saved.outcome for saved in outcomes] == [
            "complete",
            *(["not due"] * 2 + ["complete"]) * 2,
            "not due",
        ]
        assert [bool(saved) for saved in outcomes] == [
            saved.outcome == "complete" for saved in outcomes
        ]
        assert [saved.persist for saved in outcomes if saved] == [True, False, True]
        assert manager.save(8, {"n": 8}, force_persist=True).persist
        manager.wait(8, progress=False)
        listed = {one.name: one for one in manager.list()}
        assert listed["step-8"].places == ("memory", "storage")
        assert listed["step-6"].metrics == {"loss": 1 / 7}
    again = _manager(memory_root, url, save_interval_steps=3)
    state = {"n": 0}
    assert again.latest() == 8
    assert again.restore(state) == 8 == state["n"]
    assert again.report().step == 8
    assert again.save(10, state).outcome == "not due"
    assert again.restore(state, 0) == 0 == state["n"]
    assert again.save(2, state).outcome == "not due"
    assert again.save(3, state)
    again.close()
    again.close()


def test_retention_in_both_places(memory_root: Path, url: Path) -> None:
    options = {"keep_memory": keep_last(2), "keep_storage": any_of(keep_last(1), keep_best("loss"))}
    with _manager(memory_root, url, **options) as manager:
        for step, loss in enumerate((0.4, 0.1, 0.3, 0.2)):
            manager.save(step, {"n": step}, metrics={"loss": loss})
            manager.wait(step, progress=False)
        wait_until(
            lambda: not (url / "step-2").exists() and not (url / "step-0").exists(), "retention"
        )
        assert {one.step: one.places for one in manager.list()} == {
            3: ("memory", "storage"),
            2: ("memory",),
            1: ("storage",),
        }


def test_what_is_there_and_cannot_be_loaded_is_not_taken_for_a_first_start(
    memory_root: Path, url: Path
) -> None:
    with _manager(memory_root, url) as manager:
        manager.save(1, {"n": 1})
    shutil.rmtree(memory_root / "job")
    for segment in url.rglob("*.distcp"):
        segment.write_bytes(b"\xff" * segment.stat().st_size)
    with pytest.raises(NoRecoverableCheckpoint, match="step-1"):
        _manager(memory_root, url).restore({"n": 0})


def test_a_step_that_is_not_there(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url) as manager:
        manager.save(1, {"n": 1})
        with pytest.raises(CheckpointNotFound, match="step-1"):
            manager.restore({"n": 0}, 7)
        with pytest.raises(CheckpointNotFound, match="step-1"):
            manager.delete(7)


def test_a_checkpoint_that_no_manager_saved_has_the_step_of_its_name(memory_root: Path) -> None:
    with MemoryStorageWriter(memory_root=memory_root, job="job") as writer:
        dcp_mem.save({"n": 7}, checkpoint_id="epoch3-step200.ckpt", storage_writer=writer)
    state = {"n": 0}
    assert _manager(memory_root, None).restore(state) == 200
    assert state["n"] == 7


def test_deleted_is_gone_everywhere(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url) as manager:
        for step in (1, 2):
            manager.save(step, {"n": step})
        manager.wait(progress=False)
        manager.delete(2)
        assert [one.step for one in manager.list()] == [1]
        assert manager.latest() == 1
        assert not (url / "step-2").exists()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_save_that_fails(
    memory_root: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    with _manager(memory_root, None, on_error=on_error) as manager:
        assert manager.save(1, {"n": 1})
        bad = {"n": threading.Lock()}
        if on_error == "raise":
            with pytest.raises(TypeError, match="pickle"):
                manager.save(2, bad)
        else:
            saved = manager.save(2, bad)
            assert (saved.outcome, bool(saved)) == ("failed", False)
            assert "pickle" in saved.error
            assert "step-2 is not saved" in caplog.text
        assert manager.latest() == 1
        assert manager.save(3, {"n": 3})


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_flush_that_fails_is_told_once_and_costs_no_save(
    memory_root: Path, url: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    url.write_text("in the way")
    manager = _manager(memory_root, url, on_error=on_error)
    manager.save(1, {"n": 1})
    wait_until(lambda: manager.status()[0].error, "the flush fails")
    if on_error == "raise":
        with pytest.raises(FlushFailed, match="step-1"):
            manager.save(2, {"n": 2})
    else:
        assert "step-1" in manager.save(2, {"n": 2}).troubles[0]
        assert "step-1" in caplog.text
    assert manager.latest() == 2
    url.unlink()
    manager.close(progress=False)
    assert {one.state for one in manager.list()} == {State.DURABLE}


def _fail_to_flush(root: Path, url: Path) -> None:
    """Be a run that storage refuses, and end."""
    url.write_text("in the way")
    manager = _manager(root, url, agent="thread")
    manager.save(1, {"n": 1})
    wait_until(lambda: manager.status()[0].error, "the flush fails")
    manager.close(flush=False)


def test_what_failed_in_an_earlier_run_is_no_trouble_of_the_next_one(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked(_fail_to_flush, memory_root, url)
    url.unlink()
    with monkeypatch.context() as patch:  # nothing is flushed until the manager closes
        patch.setattr("dcp_mem.runtime.session.Session.wake_agent", lambda *_, **__: None)
        manager = _manager(memory_root, url, on_error="raise")
        assert manager.save(2, {"n": 2}).troubles == ()
        # The first run's agent lives for a moment longer than its trainers.
        (record,) = memory_root.glob("job/step-1/.dcp_mem/flush.json")
        known = json.loads(record.read_text())["body"]
        refused = json.dumps({**known, "outcome": "refused", "error": "taken"})
        record.write_bytes(json_file("flush", refused))
        assert manager.save(3, {"n": 3}).troubles == ()
    manager.close(progress=False)
    assert {one.state for one in manager.list()} <= {State.DURABLE, State.SKIPPED}


def test_copies_that_one_node_cannot_have_are_no_trouble(
    memory_root: Path, url: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _manager(memory_root, url, replicas=1, on_error="raise") as manager:
        assert [manager.save(step, {"n": step}).troubles for step in (1, 2, 3)] == [(), (), ()]
    assert caplog.text.count("one node") == 1


def test_memory_that_is_full_skips(memory_root: Path) -> None:
    with _manager(memory_root, None, on_full="skip", memory_limit="16MiB") as manager:
        assert manager.save(1, {"w": torch.ones(1 << 18)})
        assert manager.save(2, {"w": torch.ones(8 << 20)}).outcome == "skipped"
        assert manager.latest() == 1


def test_advice_goes_by_what_saves_take(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url) as manager:
        with pytest.raises(ConfigError, match="save at least once"):
            manager.advice("12h")
        for step in range(3):
            manager.save(step, {"n": step})
        manager.wait(progress=False)
        advice = manager.advice("12h")
        assert 0 < advice.interval_seconds < 12 * 3600
        assert advice.persist_seconds >= advice.interval_seconds
        assert "MTBF 12 h" in str(advice)


# -- several ranks ---------------------------------------------------------------------------------


class _Fails:
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("not this one")


def _life(root: str, url: str) -> None:
    """A job of two ranks, of which the second one says and does other things than the first."""
    logging.basicConfig()
    rank = dist.get_rank()
    with _manager(root, url, save_interval_steps=auto("12h"), keep_memory=3) as manager:
        assert manager.restore(make_state(0)) is None
        for step in range(3):
            manager._pace.passed(step - 5)  # due, whatever the last pause was
            manager._pace.steps_until_next = lambda step: 3 if dist.get_rank() == 0 else 7  # type: ignore[method-assign]
            assert manager.save(step, make_state(step), metrics={"loss": step + 10 * rank})
        assert [manager.save(step, make_state(step)).outcome for step in (3, 4, 5)] == [
            "not due"
        ] * 2 + ["complete"]
        saved = manager.save(
            6, {**make_state(6), "odd": _Fails() if rank else 1}, force_persist=True
        )
        assert saved.outcome == "failed"
        assert "not this one" in saved.error
        assert manager.latest() == 5
        manager.wait(progress=False)
        dist.barrier()
        assert {one.step: dict(one.metrics) for one in manager.list()}[2] == {"loss": 2}
        manager.delete(2)
        with pytest.raises(CheckpointNotFound):
            manager.delete(2)
        state = make_state(0)
        assert manager.restore(state) == 5
        if rank == 0:
            os.chmod(url, 0o700)
        dist.barrier()


def test_ranks_agree(memory_root: Path, url: Path) -> None:
    forked_ranks(_life, 2, str(memory_root), str(url))
    assert not (url / "step-2").exists()
    state = make_state(0)
    assert _manager(memory_root, url).restore(state) == 5
    assert _number(state) == 5


def _refuse(*_: Any, **__: Any) -> None:
    raise PermissionError("not on this node")


@on_ranks(2)
def test_trouble_of_one_node_is_raised_on_all(memory_root: Path, url: Path) -> None:
    """Two ranks, each a node of its own."""
    rank = dist.get_rank()
    manager = _manager(memory_root / f"node{rank}", url, on_error="raise")
    manager.save(1, make_state(1))
    if rank == 1:
        manager._behind.look = lambda: (("step-1: no room",), ())  # type: ignore[method-assign]
    with pytest.raises(FlushFailed, match=r"no room \(rank 1\)"):
        manager.save(2, make_state(2))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "unlink", _refuse)
        with pytest.raises(RankFailed, match="not on this node"):
            manager.delete(2)
    manager.delete(2)  # what was left on that node
    manager.close(progress=False)


# -- a training that is killed ---------------------------------------------------------------------


def _train(root: str, url: str, killed_at: int | None) -> list[float]:
    """Train with FSDP2 from the last run's end up to step 8; return the losses of these steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"app": TrainState(model, optimizer, scheduler)}
    losses = []
    with _manager(root, url, save_interval_steps=2, persist=every_n_saves(2)) as manager:
        last = manager.restore(state)
        for step in range(0 if last is None else last + 1, 8):
            if step == killed_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.full((4, 16), 0.1 * step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss.detach()))
            manager.save(step, state, metrics={"loss": loss.detach()})
    return losses


@pytest.mark.slow
@needs_fsdp_on_cpu
def test_a_training_that_is_killed_goes_on_as_if_nothing_had_been(
    memory_root: Path, tmp_path: Path
) -> None:
    alone = forked_ranks(_train, 2, str(memory_root / "other"), str(tmp_path / "other"), None)
    places = str(memory_root), str(tmp_path / "storage")
    killed_ranks(_train, 2, *places, 5)
    resumed = forked_ranks(_train, 2, *places, None)
    assert [len(losses) for losses in resumed] == [3, 3]  # from step 5 on
    assert resumed == [losses[5:] for losses in alone]
