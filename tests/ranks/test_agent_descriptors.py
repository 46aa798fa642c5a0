"""The agent holds no descriptor of its trainer: who dies is noticed at once, agent or not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from dcp_mem import StorageUnavailable
from tests.support.checkpoints import jobs
from tests.support.checkpoints.jobs import Job
from tests.support.processes.kill_targets import Place, agents_of, forked, name_of, save, wait_for
from tests.support.storage.conformance import stored_source
from tests.support.storage.servers import StorageRoot
from tests.support.storage.ways import start, writing

_TIMEOUT_SECONDS = 120.0
_SOON_SECONDS = 20.0
"""Well below the time-out of the user's own group, 30 minutes."""


def _files_of(pid: int) -> set[str]:
    """The sockets, pipes and files that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return found


def _files_of_agent_and_trainer(place: Place) -> tuple[set[str], set[str]]:
    inheritable = os.open("/proc/self/status", os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    writer = place.writer()
    save(writer, 1)
    writer.wait(name_of(1), timeout=60)
    (agent,) = agents_of(place.memory)
    found = _files_of(agent.pid), _files_of(os.getpid())
    dist.barrier()
    return found


def test_the_agent_has_nothing_open_that_its_trainer_has(memory_root: Path, tmp_path: Path) -> None:
    roots = tuple(str(memory_root / str(rank)) for rank in range(2))
    place = Place(str(memory_root), str(tmp_path / "storage"), roots=roots)
    for of_agent, of_trainer in forked(_files_of_agent_and_trainer, 2, place).join():
        assert [name for name in of_trainer if name.startswith("socket:")]
        shared = of_agent & of_trainer
        assert {name for name in shared if not name.startswith(("/dev/", "anon_inode:"))} == set()


def _waits_for_a_killed_rank(place: Place) -> float:
    """Return the seconds after which a barrier of the user's own group fails."""
    group = dist.new_group(backend="gloo")
    dist.barrier(group)
    writer = place.writer()
    save(writer, 1)
    writer.wait(name_of(1), timeout=60)
    (agent,) = agents_of(place.memory)
    wait_for(lambda: agent.status() == psutil.STATUS_STOPPED, "the agent to stop")
    dist.barrier(group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.barrier(group)
    return time.monotonic() - started


def test_the_users_barrier_fails_at_once_when_a_rank_is_killed_whose_agent_lives(
    memory_root: Path, tmp_path: Path
) -> None:
    roots = tuple(str(memory_root / str(rank)) for rank in range(2))
    place = Place(str(memory_root), str(tmp_path / "storage"), roots=roots)
    env = {"DCP_MEM_FAULTS": "flush.recorded:stop:1"}  # in the agents, which live on like this
    seconds, _ = forked(_waits_for_a_killed_rank, 2, place, env=env).join(
        timeout=_TIMEOUT_SECONDS, killed={1}
    )
    assert seconds < _SOON_SECONDS
    assert len(agents_of(roots[1])) == 1


def _of_agents() -> set[str]:
    """What this process has open that is for an agent."""
    return {name for name in _files_of(os.getpid()) if "pipe:" in name or "/.agent" in name}


def test_a_start_that_fails_leaves_no_descriptor(
    job: Job, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*_: object, **__: object) -> None:
        tried.append(True)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    with writing(job, agent="process") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            jobs.save(writer, 1)
            before = _of_agents()
            for _ in range(3):
                start(writer)
        assert len(tried) > 3
        shutil.rmtree(memory_root / ".agent")
        (memory_root / ".agent").mkdir(mode=0o700)
        (memory_root / ".agent" / "agent.log").mkdir()  # it can't be opened
        start(writer)
        (memory_root / ".agent" / "agent.log").rmdir()
        assert jobs.agents(memory_root) == []
        assert _of_agents() == before


def test_an_upload_that_cannot_begin_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = StorageRoot(str(tmp_path)).storage()
    source = stored_source(storage, "before/segment", b"12345")
    opened, real = [], os.open

    def open_source_alone(path: Any, flags: int, *mode: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EDQUOT, "quota")
        opened.append(real(path, flags, *mode, **options))
        return opened[-1]

    (tmp_path / "after").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_source_alone)
        with pytest.raises(StorageUnavailable):
            storage.upload("after/segment", 5, source)
    assert opened
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
