"""Registrations of a job with its flusher: who saves nothing brings only the way to storage."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_mem import CheckpointManager, MemoryStorageWriter
from dcp_mem.flushing import agent_handle
from dcp_mem.flushing.agent_handle import AgentHandle
from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration, registration_of
from dcp_mem.runtime.states import AgentPatience
from tests.support.checkpoints.jobs import agents
from tests.support.processes.forks import forked, raised_by

OF_RUN = Registration(
    job="job",
    url="/storage",
    overwrite=False,
    upload_limit=5,
    persists_all=True,
    on_nonfinite="reject",
    nodes=frozenset({"one"}),
    run="r1",
)


def test_who_saves_nothing_brings_only_the_way_to_storage(memory_root: Path) -> None:
    flusher = JobFlusher(str(memory_root), OF_RUN)
    way = {"url": "/mnt/storage", "storage_options": {"key": 1}, "now": True}
    flusher.register(Registration(job="job", overwrite=True, **way))  # type: ignore[arg-type]
    assert flusher.registration == replace(OF_RUN, **way)  # type: ignore[arg-type]


def test_the_next_run_brings_all(memory_root: Path) -> None:
    flusher = JobFlusher(str(memory_root), OF_RUN)
    of_next = Registration(job="job", url="/storage", overwrite=True, run="r2")
    flusher.register(of_next)
    assert flusher.registration == replace(of_next, nodes=OF_RUN.nodes)


# -- an agent that answers late --------------------------------------------------------------------


def _answers(late: float) -> Callable[..., bytes | None]:
    return lambda root, message, seconds=0.5: b"+" if seconds > late else None


def test_an_agent_that_was_silent_once_is_given_time_again(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = registration_of(MemoryStorageWriter(url, memory_root=memory_root).settings)
    handle = AgentHandle(str(memory_root))
    monkeypatch.setattr(agent_handle, "send", _answers(late=1.0))
    assert handle.wake(registration)
    monkeypatch.setattr(agent_handle, "send", _answers(late=0.04))
    assert not all(handle.wake(registration) for _ in range(10))


def _full_beside_a_slow_agent(root: str, url: str) -> str:
    options: dict[str, Any] = {"memory_limit": "8MiB", "on_slow_storage": "all", "keep_memory": 1}
    state = {"x": torch.ones(1 << 19)}
    with CheckpointManager(url, memory_root=root, on_error="raise", **options) as manager:
        manager.save(0, state)
        manager.wait(0)
        (agent,) = agents(root)
        agent.suspend()
        answers = iter([None])
        slow = _answers(late=0.04)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agent_handle, "send", lambda *given: next(answers, slow(*given)))
            threading.Timer(4, agent.resume).start()
            return str(raised_by(lambda: [manager.save(step, state) for step in range(1, 4)]))


def test_a_save_waits_for_room_beside_an_agent_that_answers_late(
    memory_root: Path, url: Path
) -> None:
    env = {"DCP_MEM_TIMEOUT": "1"}
    assert forked(_full_beside_a_slow_agent, str(memory_root), str(url), env=env) == "None"


def test_an_agent_is_given_up_after_some_tries_however_long_they_take(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MemoryStorageWriter(url, memory_root=memory_root).settings
    now = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    patience = AgentPatience(settings, lambda _: "is gone")
    assert [patience.ended_by() for _ in range(6)] == [""] * 5 + ["is gone"]
