"""Ordinary mistakes: each is refused, at once and in words that show the right call."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
import tempfile
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    ConfigError,
    FlushFailed,
    MemoryStorageReader,
    MemoryStorageWriter,
    RankFailed,
    TrainState,
    every_n_saves,
)
from tests.support.checkpoints.jobs import agents, wait_until
from tests.support.processes.forks import forked, forked_ranks, in_process, raised_by
from tests.support.storage.file_systems import become_nobody, needs_root

# -- what is wrong in a call -----------------------------------------------------------------------


def _no_dicts() -> list[Any]:
    model = nn.Linear(2, 2)
    return [model, TrainState(model), [("model", model)], model.state_dict, "latest", 7, None]


_KINDS = ("a Linear", "a TrainState", "a list", "a method", "a str", "an int", "None")


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_state_that_is_no_dict_raises_from_each_call_of_a_manager(
    memory_root: Path, is_async: bool
) -> None:
    options: dict[str, Any] = {"memory_root": memory_root, "job": "job", "on_error": "warn"}
    with CheckpointManager(async_save=is_async, save_interval_steps=5, **options) as manager:
        for state, kind in zip(_no_dicts(), _KINDS, strict=True):
            match = rf"state: give a dict such as .*TrainState.*, not {kind}$"
            with pytest.raises(ConfigError, match=match):
                manager.restore(state)
            with pytest.raises(ConfigError, match=match):
                manager.save(1, state)
        manager.save(1, {"n": 1})
        for state in _no_dicts():
            with pytest.raises(ConfigError, match="state: give a dict"):
                manager.save(2, state)  # no save is due
            with pytest.raises(ConfigError, match="state: give a dict"):
                manager.restore(state)
        with pytest.raises(ConfigError, match="step is a dict: give the number"):
            manager.save({"n": 1}, 5)  # type: ignore[arg-type]
        assert manager.latest() == 1


def _wrong_on_rank_1(root: str) -> list[str]:
    rank, found = dist.get_rank(), []
    with CheckpointManager(memory_root=root, job="job") as manager:
        state: Any = nn.Linear(2, 2) if rank else {"x": torch.ones(2)}
        for act in (lambda: manager.restore(state), lambda: manager.save(1, state)):
            error = raised_by(act)
            found.append(type(error).__name__ if error is not None else "")
        assert manager.save(2, {"x": torch.ones(2)})
    return found


def test_a_call_that_is_wrong_on_one_rank_raises_there_and_leaves_nobody_waiting(
    memory_root: Path,
) -> None:
    assert forked_ranks(_wrong_on_rank_1, 2, str(memory_root)) == [
        [RankFailed.__name__, ""],  # a manager warns of a save that failed elsewhere
        [ConfigError.__name__] * 2,
    ]


# -- ranks that wait for each other ----------------------------------------------------------------

_SOON = {"DCP_MEM_WAIT_WARNING": "0.4", "DCP_MEM_TIMEOUT": "4"}


def _one_rank_calls(root: str, caller: int) -> tuple[str, list[str]]:
    lines: list[str] = []
    logging.getLogger("dcp_mem").addHandler(_Collecting(lines))
    error = None
    if dist.get_rank() == caller:
        manager = CheckpointManager(memory_root=root, job="job", on_error="raise")
        error = raised_by(lambda: manager.save(1, {"x": torch.ones(2)}))
    dist.barrier()
    return type(error).__name__, lines


class _Collecting(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@pytest.mark.parametrize("caller", [0, 2])
def test_a_rank_that_waits_names_the_rank_that_has_not_called(
    memory_root: Path, caller: int
) -> None:
    found = forked_ranks(_one_rank_calls, 3, str(memory_root), caller, env=_SOON)
    error, lines = found[caller]
    missing = 1 if caller == 0 else 0
    assert error == RankFailed.__name__
    assert lines[0].endswith(f": rank {missing} hasn't called save(); call it on all ranks")


def _two_of_three_call(root: str) -> list[str]:
    rank, lines = dist.get_rank(), list[str]()
    with CheckpointManager(memory_root=root, job="job", on_error="raise") as manager:
        manager.save(1, {"x": torch.ones(2)})  # the ranks have met
        logging.getLogger("dcp_mem").addHandler(_Collecting(lines))
        if rank < 2:
            raised_by(lambda: manager.delete(1))
        dist.barrier()
    return [line for line in lines if "called" in line]


def test_only_the_rank_that_is_not_there_is_named(memory_root: Path) -> None:
    env = {**_SOON, "DCP_MEM_WAIT_WARNING": "1.5"}  # what one rank notes, others read in time
    found = forked_ranks(_two_of_three_call, 3, str(memory_root), env=env)
    assert found[0]
    assert all("rank 2 hasn't called delete()" in line for line in found[0] + found[1])


def _roots_differ(root: str, url: str) -> list[str]:
    found = []
    for call in ("restore", "save"):
        manager = CheckpointManager(f"{url}-{dist.get_rank()}", memory_root=root)
        state = {"x": torch.ones(2)}
        act: partial[Any] = partial(manager.restore, state)
        if call == "save":
            act = partial(manager.save, 1, state)
        error = raised_by(act)
        found.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    return found


def test_roots_that_differ_are_both_named_by_the_first_call(memory_root: Path, url: Path) -> None:
    env = {**_SOON, "DCP_MEM_TIMEOUT": "60"}
    for texts in forked_ranks(_roots_differ, 2, str(memory_root), str(url), env=env):
        for text in texts:
            assert text.startswith(
                "ConfigError: the ranks wait for each other under different roots: "
                f"rank 0 has {url}-0, rank 1 has {url}-1 (is a time or a rank in the path?)"
            ), text


def _restore_two_roots_at_once(root: str, url: str, is_waited_for: str) -> list[str]:
    lines: list[str] = []
    logging.getLogger("dcp_mem").addHandler(_Collecting(lines))

    def restore(name: str) -> str:
        manager = CheckpointManager(f"{url}-{name}", memory_root=root)
        return str(raised_by(lambda: manager.restore({"x": torch.ones(2)})))

    rank = dist.get_rank()
    dist.barrier()
    if rank == 2:  # the others have said of both roots that they wait, and again
        wait_until(Path(is_waited_for).exists, "two waits")
    with ThreadPoolExecutor() as pool:
        restored = [pool.submit(restore, name) for name in "ab"]
        if rank == 0:
            wait_until(lambda: len(lines) >= 4 or restored[0].done(), "four lines")
            Path(is_waited_for).touch()
        assert [one.result() for one in restored] == ["None"] * 2
    return lines


def test_a_rank_that_waits_under_two_roots_at_once_is_found_under_each(
    memory_root: Path, url: Path, tmp_path: Path
) -> None:
    given = (str(memory_root), str(url), str(tmp_path / "waited"))
    env = {"DCP_MEM_WAIT_WARNING": "1.5", "DCP_MEM_TIMEOUT": "60"}
    of_rank_0, of_rank_1, _ = forked_ranks(_restore_two_roots_at_once, 3, *given, env=env)
    assert all("rank 2 hasn't called" in line for line in of_rank_0)
    assert of_rank_1 == []  # the rank that it waits for waits itself


def _settings_differ(root: str) -> str:
    keep = 2 + dist.get_rank()
    with CheckpointManager(memory_root=root, job="job", keep_memory=keep) as manager:
        assert manager.restore({"x": torch.ones(2)}) is None
        raised_by(lambda: manager.delete(7))  # which connects the ranks that save
        errors = [raised_by(lambda: manager.save(1, {"x": torch.ones(2)})) for _ in range(2)]
    assert str(errors[0]) == str(errors[1])
    return f"{type(errors[0]).__name__}: {errors[0]}"


def test_settings_that_differ_are_both_named_by_each_save(memory_root: Path) -> None:
    text = "ConfigError: the ranks save with different settings: rank 0 has keep_memory=2, "
    text += "rank 1 has keep_memory=3; give all ranks the same"
    assert forked_ranks(_settings_differ, 3, str(memory_root))[:2] == [text] * 2


# -- ranks that never met --------------------------------------------------------------------------


class _OwnPlanner(DefaultSavePlanner):
    """One that torch has to ask."""


def _saves_without_a_group(root: str, rank: str) -> list[str]:
    os.environ |= {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    options: dict[str, Any] = {"memory_root": root, "job": f"job-{rank}"}
    writer, state = MemoryStorageWriter(**options), {"x": torch.ones(2)}
    save: dict[str, Any] = {"checkpoint_id": "a", "storage_writer": writer}
    calls = [
        lambda: CheckpointManager(**options).save(1, state),
        lambda: CheckpointManager(async_save=True, **options).save(1, state),
        lambda: dcp_mem.save(state, **save),
        lambda: dcp_mem.async_save(state, **save),
        lambda: dcp.save(state, **save),
        lambda: dcp_mem.save(state, no_dist=True, **save),
        lambda: dcp_mem.save(state, no_dist=True, planner=_OwnPlanner(), **save),
        lambda: dcp_mem.async_save(state, no_dist=True, **save).result(),
        lambda: dcp.save(state, no_dist=True, **save),
    ]
    return [str(raised_by(call)).split(",")[0] for call in calls]


@in_process
def test_a_process_alone_saves_whatever_world_size_its_script_exports(memory_root: Path) -> None:
    root = str(memory_root)
    os.environ["WORLD_SIZE"] = "2"
    os.environ.pop("RANK", None)
    with CheckpointManager(memory_root=root, job="job", on_error="raise") as manager:
        assert str(raised_by(lambda: manager.save(1, {"x": torch.ones(2)}))) == "None"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_without_a_process_group_do_not_save_each_on_its_own(
    memory_root: Path, rank: int
) -> None:
    found = forked(_saves_without_a_group, str(memory_root), str(rank))
    refused = "WORLD_SIZE is 2"
    assert found == [refused] * 4 + [refused if rank else "None"] + ["None"] * 4


# -- roots that can't work -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        (Path("abfs://container/run"), "abfs://container/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
    ],
)
def test_a_url_that_has_lost_a_slash_is_refused(path: Any, meant: str) -> None:
    for make in (CheckpointManager, MemoryStorageWriter, MemoryStorageReader, dcp_mem.serve):
        with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
            make(path)


def test_a_file_url_that_has_lost_a_slash_is_told_its_path() -> None:
    for path in (Path("file:///tmp/run"), "local:/tmp/run"):
        with pytest.raises(ConfigError, match=r"give /tmp/run$"):
            CheckpointManager(path)


def test_a_directory_with_a_colon_is_a_directory(tmp_path: Path, memory_root: Path) -> None:
    for name in ("10:30/run", "run:/a", "C:/run"):
        with CheckpointManager(tmp_path / name, memory_root=memory_root) as manager:
            manager.save(1, {"n": 1})
        assert (tmp_path / name / "step-1").is_dir()


@pytest.mark.parametrize("path", ["/proc/foo", "/dev/null/run"])
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_the_first_save_names_a_root_that_cannot_be_made_and_close_ends(
    memory_root: Path, path: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"async_save": is_async, "on_error": "raise"}
    manager = CheckpointManager(path, memory_root=memory_root, **options)
    assert manager.save(1, {"n": 1})
    manager.wait(state="complete")
    assert f"path='{path}' takes no checkpoints, so they stay in this node's memory" in caplog.text
    with pytest.raises(FlushFailed, match=r"(?s)Check the path.*in this node's memory \(step-1;"):
        manager.close()


def test_the_trial_of_a_root_leaves_nothing(memory_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "a" / "run"
    with CheckpointManager(root, memory_root=memory_root, persist=every_n_saves(9)) as manager:
        manager.save(1, {"n": 1})
        assert list(tmp_path.iterdir()) == []
        root.mkdir(parents=True)
        other = CheckpointManager(
            root, memory_root=memory_root, job="other", persist=every_n_saves(9)
        )
        other.save(1, {"n": 1})
        assert list(root.iterdir()) == []
        other.close(persist_newest=False)


def test_the_trial_of_a_root_makes_no_name_that_its_user_may_make_meanwhile(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    mkdir = os.mkdir

    def noting(path: str, *options: Any, **more: Any) -> None:
        made.append(str(path))
        mkdir(path, *options, **more)

    monkeypatch.setattr(os, "mkdir", noting)
    root = tmp_path / "a" / "run"
    with CheckpointManager(root, memory_root=memory_root, persist=every_n_saves(9)) as manager:
        manager.save(1, {"n": 1})
    assert not {str(root), str(root.parent)} & set(made)


def test_a_reader_makes_no_root(memory_root: Path, tmp_path: Path) -> None:
    with MemoryStorageReader(tmp_path / "run", memory_root=memory_root) as reader:
        assert reader.recoverable() == []
    assert not (tmp_path / "run").exists()


# -- agents that can't work ------------------------------------------------------------------------


def _no_executable() -> None:
    sys.executable = "/nowhere/python"


def _ends_at_once() -> None:
    sys.executable = "/bin/false"


def _close_without_an_agent(root: str, url: str, break_agent: Callable[[], None]) -> list[str]:
    break_agent()
    manager = CheckpointManager(url, memory_root=root, on_error="raise")
    manager.save(1, {"x": torch.ones(2)})
    found = [str(raised_by(lambda: manager.wait(1))), str(raised_by(manager.close))]
    loaded = {"x": torch.zeros(2)}
    assert CheckpointManager(url, memory_root=root).restore(loaded) == 1
    return found


@pytest.mark.parametrize(
    ("break_agent", "why"),
    [
        (_no_executable, "can't be started: .*/nowhere/python"),
        (_ends_at_once, "ends, or is silent"),
    ],
)
def test_close_ends_where_no_agent_can_run_and_names_what_stays_in_memory(
    memory_root: Path, url: Path, break_agent: Callable[[], None], why: str
) -> None:
    env = {"DCP_MEM_TIMEOUT": "1"}
    for text in forked(_close_without_an_agent, str(memory_root), str(url), break_agent, env=env):
        assert re.search(
            rf"the agent {why}.*It stays in this node's memory \(step-1; .*Once an agent runs, the "
            rf"job's next start here flushes that; so does: dcp-mem flush {url}",
            text,
        ), text


def _full_without_an_agent(root: str, url: str) -> str:
    _no_executable()
    options: dict[str, Any] = {"memory_limit": "8MiB", "on_slow_storage": "all", "keep_memory": 1}
    manager, error = CheckpointManager(url, memory_root=root, on_error="raise", **options), None
    for step in range(4):
        error = error or raised_by(partial(manager.save, step, {"x": torch.ones(1 << 19)}))
    manager.close(flush=False)
    return str(error)


def test_a_save_does_not_wait_for_room_that_no_agent_makes(memory_root: Path, url: Path) -> None:
    env = {"DCP_MEM_TIMEOUT": "1"}
    text = forked(_full_without_an_agent, str(memory_root), str(url), env=env)
    assert "memory is full until a flush frees some, and the agent can't be started" in text


def _stopped_agent(root: str, url: str) -> tuple[list[float], str]:
    with CheckpointManager(url, memory_root=root) as manager:
        manager.save(1, {"x": torch.ones(2)})
        manager.wait(1)
        (agent,) = agents(root)
        agent.suspend()
        taken = [manager.save(step, {"x": torch.ones(2)}).seconds for step in range(2, 10)]
        error = raised_by(lambda: manager.wait(9))
        agent.resume()
        manager.wait(9)
    return taken, str(error)


def test_a_stopped_agent_holds_up_one_save_and_no_wait_for_ever(
    memory_root: Path, url: Path
) -> None:
    env = {"DCP_MEM_TIMEOUT": "1"}
    taken, error = forked(_stopped_agent, str(memory_root), str(url), env=env)
    assert re.search(r"the agent doesn't answer: it may be stopped.*dcp-mem flush", error), error
    assert sum(taken) < 0.5 * len(taken)  # each waited for an answer for 0.5 s


def _of_this_script() -> Any:
    """An object of a class that the agent can't import."""
    script = sys.modules["training_script"] = types.ModuleType("training_script")
    exec("class Credential: pass", script.__dict__)
    return script.Credential()


def _close_with_unreadable_options(root: str, url: str) -> str:
    options = {"credential": _of_this_script()}
    manager = CheckpointManager(url, memory_root=root, storage_options=options, on_error="raise")
    manager.save(1, {"x": torch.ones(2)})
    return str(raised_by(manager.close))


def test_close_ends_where_the_agent_cannot_read_the_storage_options(
    memory_root: Path, url: Path
) -> None:
    env = {"DCP_MEM_TIMEOUT": "1"}
    text = forked(_close_with_unreadable_options, str(memory_root), str(url), env=env, timeout=30)
    assert re.search(r"the agent can't read this job's storage_options: .*agent='thread'", text)
    assert "stays in this node's memory (step-1;" in text


def _briefly_silent(root: str, url: str) -> list[str]:
    lines: list[str] = []
    logging.getLogger("dcp_mem").addHandler(_Collecting(lines))
    manager = CheckpointManager(url, memory_root=root)
    manager.save(1, {"x": torch.ones(2)})
    manager.wait(1)
    (agent,) = agents(root)
    agent.suspend()
    manager.save(2, {"x": torch.ones(2)})
    assert lines == []  # it may only be busy
    raised_by(lambda: manager.wait(2, timeout=5))
    agent.resume()
    manager.close()
    return lines


def test_an_agent_that_stays_silent_is_an_error_that_names_what_stays(
    memory_root: Path, url: Path
) -> None:
    lines = forked(_briefly_silent, str(memory_root), str(url))
    (line,) = [one for one in lines if one.startswith("nothing reaches storage")]
    assert re.search(r"the agent doesn't answer.*stays.*\(step-2;.*dcp-mem flush", line), line


# -- colleagues on a shared file system ------------------------------------------------------------


def _save_with_umask(root: str, url: str, umask: int, options: dict[str, Any]) -> None:
    os.umask(umask)
    with CheckpointManager(url, memory_root=root, **options) as manager:
        manager.save(1, {"x": torch.ones(2)})


def _load_as_a_colleague(url: str, root: str) -> str:
    become_nobody()
    state = {"x": torch.zeros(2)}
    error = raised_by(partial(CheckpointManager(url, memory_root=root).restore, state))
    return str(error or state["x"].tolist())


@needs_root
def test_what_is_on_storage_is_for_those_whom_the_umask_or_storage_mode_admits(
    memory_root: Path,
) -> None:
    cases: list[tuple[int, dict[str, Any], set[int]]] = [
        (0o022, {}, {0o755, 0o644}),
        (0o077, {"storage_mode": 0o664}, {0o775, 0o664}),
        (0o022, {"storage_mode": 0o640}, {0o750, 0o640}),
        (0o077, {}, {0o700, 0o600}),
    ]
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        for number, (umask, options, modes) in enumerate(cases):
            url = f"{place}/run-{number}"
            forked(_save_with_umask, str(memory_root), url, umask, options)
            found = {stat.S_IMODE(path.stat().st_mode) for path in Path(url).glob("step-1/**/*")}
            assert found == modes, oct(umask)
            told = forked(_load_as_a_colleague, url, f"{place}/absent")
            if modes & {0o644, 0o664}:
                assert told == "[1.0, 1.0]"
            else:
                assert "that you may read there" in told
                assert "write" not in told
