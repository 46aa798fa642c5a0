"""`CheckpointManager(async_save=True)` and `overlap=`: saves that end behind training."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_mem
from dcp_mem import CheckpointManager
from tests.support.processes import faults
from tests.support.processes.forks import on_ranks


def _manager(root: str | Path, url: str | Path | None = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(url, memory_root=root, job="job", async_save=True, **options)


def test_a_save_returns_at_once_and_every_other_call_waits_for_it(
    memory_root: Path, url: Path
) -> None:
    state: dict[str, Any] = {"w": torch.zeros(1000), "n": 0}
    outcomes = []
    with _manager(memory_root, url, keep_memory=3) as manager:
        for step in range(4):
            state["w"].fill_(step)
            state["n"] = step
            outcomes.append(manager.save(step, state, metrics={"loss": 1.0 / (step + 1)}))
            state["w"].fill_(-1)  # training goes on
        manager.wait(3, progress=False)
        into: dict[str, Any] = {"w": torch.zeros(1000), "n": 0}
        assert manager.restore(into) == 3 == into["n"]
        assert torch.equal(into["w"], torch.full((1000,), 3.0))
        assert manager.restore(into, 2) == 2
        assert torch.equal(into["w"], torch.full((1000,), 2.0))
        manager.save(4, state)
        manager.delete(4)
        assert manager.latest() == 3
        listed = {one.name: one for one in manager.list()}
        assert listed["step-3"].metrics == {"loss": 0.25}
        state["w"].fill_(5)
        manager.save(5, state)
    assert {saved.outcome for saved in outcomes} == {"begun"}
    assert all(outcomes)
    # The last save of a run is durable when close has returned.
    again = CheckpointManager(url, memory_root=memory_root / "elsewhere", job="job")
    (memory_root / "elsewhere").mkdir(mode=0o700)
    assert again.restore(into) == 5
    assert torch.equal(into["w"], torch.full((1000,), 5.0))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_save_that_fails_is_told_by_the_next_call(
    memory_root: Path,
    on_error: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("dcp_mem"), "propagate", True)
    manager = _manager(memory_root, on_error=on_error)
    assert manager.save(1, {"n": 1})
    manager.wait(1, "complete", progress=False)
    faults.arm("save.agreed:raise:1")
    assert manager.save(2, {"n": 2}).outcome == "begun"
    if on_error == "raise":
        with pytest.raises(Exception, match=r"save\.agreed"):
            manager.save(3, {"n": 3})
        assert manager.save(3, {"n": 3})
    else:
        saved = manager.save(3, {"n": 3})
        assert saved
        assert "step-2" in saved.troubles[0]
        assert "step-2 is not saved" in caplog.text
    state = {"n": 0}
    assert manager.restore(state) == 3 == state["n"]
    manager.close()


def test_memory_that_is_full_skips(memory_root: Path) -> None:
    with _manager(memory_root, keep_memory=1, memory_limit="32MiB", on_full="skip") as manager:
        assert manager.save(1, {"n": 1})
        assert manager.save(2, {"w": torch.zeros(16 << 20)})
        manager.wait(1, "complete", progress=False)
        assert manager.latest() == 1


@on_ranks(2)
def test_overlapped_saves_have_what_there_was_when_they_were_called(memory_root: Path) -> None:
    root = str(memory_root)
    torch.manual_seed(0)
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(
        memory_root=root, job="job", overlap=dcp_mem.Overlap(optimizer, validate=True)
    ) as manager:
        for step in range(5):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            assert manager.save(step, state).outcome == "begun"
            model(torch.randn(4, 50)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        into = {"model": {key: torch.zeros_like(one) for key, one in model.state_dict().items()}}
        assert manager.restore(into) == 4
        for one, other in zip(into["model"].values(), before, strict=True):
            assert torch.equal(one, other)
    dist.barrier()
