"""The last save of a run, and optimizers and managers that are used as few are."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import dcp_mem
from dcp_mem import CheckpointManager, ConfigError, MemoryStorageReader, MemoryStorageWriter
from tests.support.checkpoints.copies import held_copies
from tests.support.processes.forks import forked

pytestmark = pytest.mark.timeout(200)

_SCRIPT = """
    import torch
    import torch.distributed.checkpoint as dcp
    import dcp_mem

    writer = dcp_mem.MemoryStorageWriter({url!r}, memory_root={root!r}, job="job")
    state = {{f"x{{n}}": torch.full((1 << 20,), 1.0) for n in range(24)}}
    {call}(state, checkpoint_id="last", storage_writer=writer)
"""


@pytest.mark.parametrize(
    "call", ["dcp.async_save", pytest.param("dcp_mem.async_save", marks=pytest.mark.variant)]
)
def test_the_last_save_of_a_script_that_just_ends_is_complete(
    memory_root: Path, tmp_path: Path, call: str
) -> None:
    url = str(tmp_path / "storage")
    script = textwrap.dedent(_SCRIPT.format(url=url, root=str(memory_root), call=call))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr, ended.stderr
    forked(_load_last, str(memory_root))


def test_a_process_that_ends_does_not_wait_for_the_whole_of_a_slow_upload(
    memory_root: Path, tmp_path: Path
) -> None:
    script = f"""
        import torch
        import torch.distributed.checkpoint as dcp
        import dcp_mem
        from dcp_mem.flushing import loop

        loop._DRAIN_SECONDS = 1.0
        writer = dcp_mem.MemoryStorageWriter(
            {str(tmp_path)!r}, memory_root={str(memory_root)!r}, job="job",
            agent="thread", upload_limit="1MiB",
        )
        state = {{"x": torch.ones(64 << 20)}}  # four minutes
        dcp.save(state, checkpoint_id="last", storage_writer=writer)
        raise SystemExit(3)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 3, ended.stderr


def _load_last(root: str) -> None:
    into = {f"x{number}": torch.zeros(1 << 20) for number in range(24)}
    dcp.load(into, storage_reader=MemoryStorageReader(None, memory_root=root, job="job"))
    assert all(bool((one == 1).all()) for one in into.values())


# -- optimizers ------------------------------------------------------------------------------------


class _Wrapper(torch.optim.Optimizer):
    """As accelerate's: it has another one step, and none of the base class's hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


def test_an_optimizer_whose_step_calls_no_hooks_has_everything_copied_at_once(
    memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.ones(400_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state = {"model": {"p": parameter}}
    with MemoryStorageWriter(None, memory_root=memory_root, job="job", keep_memory=4) as writer:

        def save(name: str) -> Any:
            wrapped = _Wrapper(optimizer)
            return dcp_mem.async_save(
                state, checkpoint_id=name, storage_writer=writer, overlap=wrapped
            )

        save("first").result()
        for number in range(3):
            with held_copies() as may_go_on, caplog.at_level(logging.WARNING):
                begun = save(f"step-{number}")
                saved = parameter[0].item()
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                may_go_on.set()
                begun.result()
            into = {"model": {"p": torch.zeros(400_000)}}
            reader = MemoryStorageReader(None, memory_root=memory_root, job="job")
            dcp.load(into, checkpoint_id=f"step-{number}", storage_reader=reader)
            assert into["model"]["p"].unique().tolist() == [saved]
    assert "overlap= has no effect: the step of _Wrapper calls no hooks" in caplog.text


def test_an_optimizer_that_could_not_be_hooked_is_hooked_the_next_time(memory_root: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter])
    with MemoryStorageWriter(None, memory_root=memory_root, job="job") as writer:

        def save(name: str) -> None:
            dcp_mem.async_save(
                {"p": parameter}, checkpoint_id=name, storage_writer=writer, overlap=optimizer
            ).result()

        save("known")
        hooks = optimizer._optimizer_step_pre_hooks
        hooks.clear()
        with (
            patch.object(optimizer, "register_step_pre_hook", side_effect=KeyboardInterrupt),
            suppress(KeyboardInterrupt, CheckpointException),
        ):
            save("broken off")
        save("next")
        save("last")
    assert len(hooks) == 1


# -- what torch plans ------------------------------------------------------------------------------


class _Subclass(torch.Tensor):
    pass


def _planned_by_torch() -> dict[str, Any]:
    return {"x": torch.ones(4).as_subclass(_Subclass)}


def test_the_interval_holds_for_asynchronous_saves_that_torch_plans(memory_root: Path) -> None:
    with CheckpointManager(
        None, memory_root=memory_root, job="job", async_save=True, save_interval_steps=10
    ) as manager:
        begun = [step for step in range(25) if manager.save(step, _planned_by_torch())]
    assert begun == [0, 10, 20]


class _Unsaveable:
    def __reduce__(self) -> Any:
        raise OSError("it can't be pickled")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_manager_goes_on_after_a_save_that_torch_planned_has_failed(
    memory_root: Path, is_async: bool
) -> None:
    with CheckpointManager(
        None, memory_root=memory_root, job="job", async_save=is_async
    ) as manager:
        found = [manager.save(0, {**_planned_by_torch(), "y": _Unsaveable()})]
        found.append(manager.save(1, _planned_by_torch()))
    if not is_async:
        assert [one.outcome for one in found] == ["failed", "complete"]
        assert "can't be pickled" in found[0].error
    assert manager.latest() == 1


# -- what is said of a save ------------------------------------------------------------------------


@pytest.mark.parametrize("save", [dcp.save, dcp_mem.save])
def test_what_is_said_of_a_save_that_fails_is_not_said_of_the_next_one(
    memory_root: Path, save: Any
) -> None:
    with MemoryStorageWriter(None, memory_root=memory_root, job="job") as writer:
        writer.annotate_next_save(step=1, metrics={"loss": 9.0})
        with pytest.raises((ConfigError, CheckpointException)):
            save({"x": torch.ones(2)}, checkpoint_id="../outside", storage_writer=writer)
        save({"x": torch.ones(2)}, checkpoint_id="next", storage_writer=writer)
        (entry,) = writer.status()
    assert (entry.name, entry.step, dict(entry.metrics)) == ("next", None, {})


def test_what_fails_behind_a_complete_checkpoint_is_logged_alone(
    memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MemoryStorageWriter(None, memory_root=memory_root, job="job") as writer:
        for where in ("complete.apply_retention", "pipeline._prefault_spare_slots"):
            caplog.clear()
            with patch(f"dcp_mem.saving.{where}", side_effect=OSError("no more descriptors")):
                dcp.save({"x": torch.ones(2)}, checkpoint_id=where, storage_writer=writer)
            assert f"{where} is complete, but" in caplog.text
            assert "no more descriptors" in caplog.text


def test_a_wait_for_a_save_that_goes_on_ends_with_its_time(memory_root: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(400_000))
    optimizer = torch.optim.SGD([parameter])
    with CheckpointManager(
        None, memory_root=memory_root, job="job", overlap=optimizer, save_interval_steps=1
    ) as manager:
        manager.save(0, {"p": parameter})
        manager.wait(0, dcp_mem.State.COMPLETE)
        with held_copies() as may_go_on:
            manager.save(1, {"p": parameter})
            with pytest.raises(dcp_mem.WaitTimeout, match="step-1 is not complete after"):
                manager.wait(1, dcp_mem.State.COMPLETE, 0.2)
            may_go_on.set()
        manager.wait(1, dcp_mem.State.COMPLETE)
        assert manager.latest() == 1
