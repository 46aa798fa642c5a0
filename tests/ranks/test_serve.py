"""`dcp_mem.serve`: programs that name only a path go through dcp_mem below a root."""

import inspect
import io
import logging
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import dcp_mem
from dcp_mem import ConfigError, MemoryStorageReader, MemoryStorageWriter
from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import (
    Job,
    committed_in,
    load,
    load_as_torch,
    make_state,
    number_of,
    save_two_with_torch,
    wait_until,
)
from tests.support.processes.forks import forked, forked_ranks, in_process, on_ranks, raised_by
from tests.support.processes.launch import run_python, run_torchrun
from tests.support.storage.servers import free_port

_SECONDS = 120
_TORCHS = {"__0_0.distcp", "__1_0.distcp"}

# Nothing of dcp_mem: it saves to paths, and goes on from the newest directory with `.metadata`.
_PROGRAM = """\
import os, signal, sys
from torch.distributed.checkpoint import async_save, load, save
import torch
import torch.distributed as dist

root, begin = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
found = [
    int(name.removeprefix("step-"))
    for name in (os.listdir(root) if os.path.isdir(root) else [])
    if os.path.exists(f"{root}/{name}/.metadata")
]
newest = [max(found, default=0)]
dist.broadcast_object_list(newest)
state = {"total": torch.zeros(4), f"own-{rank}": torch.zeros(2), "step": 0}
if newest[0]:
    load(state, checkpoint_id=f"{root}/step-{newest[0]}")
    print(f"rank {rank} goes on from {state['step']}", flush=True)
for step in range(state["step"] + 1, 8):
    state["step"] = step
    state["total"] += step
    state[f"own-{rank}"] += rank
    path = os.path.join(root, f"step-{step}")
    if begin == "async":
        begun = async_save(state, checkpoint_id=path)
        getattr(begun, "upload_completion", begun).result()
    else:
        save(state, checkpoint_id=path)
    if step == 4 and rank == 1 and not newest[0]:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {rank} ends with {state['total'][0]:.0f}, {state[f'own-{rank}'][0]:.0f}", flush=True)
dist.destroy_process_group()
"""


needs_a_stager = pytest.mark.skipif(
    "async_stager" not in inspect.signature(dcp.async_save).parameters,
    reason="torch 2.6 copies nothing that is on the CPU already",
)


@contextmanager
def _serving(job: Job, **options: Any) -> Iterator[dcp_mem.Served]:
    assert job.url is not None
    options = {"agent": "thread", "memory_root": job.memory, **options}
    with dcp_mem.serve(job.url, **options) as served:
        yield served


def _save(path: str | Path, number: int) -> None:
    dcp.save(make_state(number), checkpoint_id=path)


def _load(path: str | Path) -> int:
    state = make_state(0)
    for tensor in (state["sharded"], state["replicated"], state["nested"]["scalar"]):
        tensor.fill_(-1)
    dcp.load(state, checkpoint_id=path)
    return number_of(state)


def _names(served: dcp_mem.Served) -> set[str]:
    return {one.name for one in served.writer.status()}


def _files_of_torch(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("*.distcp")}


def _torchs_functions() -> tuple[Any, ...]:
    return (
        state_dict_saver._storage_setup,
        state_dict_loader._storage_setup,
        state_dict_saver.async_save,
        state_dict_saver.save,
        state_dict_loader.load,
        dcp.async_save,
        dcp.save,
        dcp.load,
    )


def _saves_and_loads_by_path(job: Job) -> None:
    with _serving(job) as served:
        for number in (1, 2):
            _save(f"{job.url}/step-{number}", number)
        begun: Any = dcp.async_save(make_state(3), checkpoint_id=f"{job.url}/step-3")
        getattr(begun, "upload_completion", begun).result()
        assert [_load(f"{job.url}/step-{number}") for number in (3, 2)] == [3, 2]
        assert _names(served) >= {"step-2", "step-3"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_saves_and_loads_by_path_go_through_dcp_mem(job: Job, ranks: int) -> None:
    forked_ranks(_saves_and_loads_by_path, ranks, job)
    assert job.url is not None
    assert committed_in(Path(job.url)) == {"step-1", "step-2", "step-3"}
    assert re.match("__0_0-", min(_files_of_torch(Path(job.url, "step-1"))))
    assert load_as_torch(Path(job.url, "step-3")) == 3


@in_process
def test_what_lies_elsewhere_is_left_to_torch(job: Job, tmp_path: Path) -> None:
    directory = tmp_path / "other"
    assert job.url is not None
    with _serving(job) as served:
        elsewhere = [
            directory / "step-1",
            Path(f"{job.url}-2") / "step-1",
            Path(job.url),
            Path(job.url) / "a" / "step-1",
            Path(job.url) / "a name",
            Path(job.url) / ".hidden",
        ]
        for number, path in enumerate(elsewhere):
            _save(path, number)
            begun: Any = dcp.async_save(make_state(number), checkpoint_id=f"{path}-again")
            getattr(begun, "upload_completion", begun).result()
        assert not _names(served) - {"run-again"}
        for number, path in enumerate(elsewhere):
            assert _files_of_torch(path) == {"__0_0.distcp"}
            assert _load(path) == number


@in_process
def test_a_writer_or_reader_that_is_given_is_used(job: Job) -> None:
    assert job.url is not None
    with _serving(job) as served:
        path = f"{job.url}/step-1"
        dcp.save(make_state(1), checkpoint_id=path, storage_writer=dcp.FileSystemWriter(path))
        assert not _names(served)
        state = make_state(0)
        dcp.load(state, checkpoint_id=path, storage_reader=dcp.FileSystemReader(path))
        assert number_of(state) == 1


@in_process
def test_links_and_relative_paths_are_seen_through(job: Job, tmp_path: Path) -> None:
    assert job.url is not None
    root = Path(job.url)
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "outside").mkdir()
    (root / "to-outside").symlink_to(tmp_path / "outside")
    os.chdir(tmp_path)
    with _serving(job) as served:
        _save(os.path.relpath(root / "step-1"), 1)
        _save(tmp_path / "link" / "step-2", 2)
        _save(f"{root}/sub/../step-3/", 3)
        begun: Any = dcp.async_save(make_state(4), checkpoint_id=os.path.relpath(root / "step-4"))
        getattr(begun, "upload_completion", begun).result()
        assert _names(served) == {f"step-{number}" for number in range(1, 5)}
        assert _load(f"link/../{root.name}/step-4") == 4
        # The kernel takes `to-outside/..` for the parent of `outside`.
        _save(f"{root}/to-outside/../step-5", 5)
        assert _files_of_torch(tmp_path / "step-5") == {"__0_0.distcp"}
        served.writer.wait("step-4", timeout=60)
        (root / "latest").symlink_to(root / "step-4")
        assert _load(root / "latest") == 4
        save_two_with_torch(tmp_path / "outside")
        (root / "foreign").symlink_to(tmp_path / "outside" / "step-2")
        assert _load(root / "foreign") == 2


@in_process
def test_urls_are_served(memory_root: Path) -> None:
    memory = str(memory_root)
    options: dict[str, Any] = {"memory_root": memory, "agent": "thread"}
    with dcp_mem.serve("memory://bucket/run/", **options) as served:
        _save("memory://bucket/run/step-1", 1)
        assert _load("memory://bucket/run/step-1") == 1
        assert _names(served) == {"step-1"}
        assert served._choose("memory://bucket/run-2/step-1", False) is None
        assert served._choose("memory://bucket/run/../step-1", False) is None
        assert served._choose("/bucket/run/step-1", False) is None
        assert served._choose("no-protocol-of://bucket/run/step-1", True) is None
        assert served._choose(b"memory://bucket/run/step-1", False) is None


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_what_torch_wrote_is_loaded_and_what_is_missing_raises_as_in_torch(
    job: Job, ranks: int
) -> None:
    assert job.url is not None
    save_two_with_torch(Path(job.url))
    missing = f"{job.url}/step-7"
    with pytest.raises(dcp.CheckpointException):
        _load(missing)
    with _serving(job):
        assert _load(f"{job.url}/step-1") == 1
        with pytest.raises(dcp.CheckpointException, match="no step-7 in memory"):
            _load(missing)
        _save(f"{job.url}/step-2", 22)
        assert _load(f"{job.url}/step-2") == 22


@in_process
def test_a_root_that_is_served_gets_no_second_writer(job: Job) -> None:
    made, begin = list[MemoryStorageWriter](), MemoryStorageWriter.__init__

    def count(writer: MemoryStorageWriter, *arguments: Any, **options: Any) -> None:
        made.append(writer)
        begin(writer, *arguments, **options)

    options: Any = {"agent": "thread", "memory_root": job.memory}
    with pytest.MonkeyPatch.context() as patch, _serving(job) as served:
        patch.setattr(MemoryStorageWriter, "__init__", count)
        assert dcp_mem.serve(str(job.url), **options) is served
        with pytest.raises(ConfigError, match="other options"):
            dcp_mem.serve(str(job.url), **options, keep_memory=3)
    assert (1 + len(made)) == 1


@in_process
def test_roots_are_served_side_by_side_and_torch_gets_its_functions_back(
    job: Job, tmp_path: Path
) -> None:
    directory = tmp_path / "second"
    before = _torchs_functions()
    first = dcp_mem.serve(str(job.url), agent="thread", memory_root=job.memory)
    assert dcp_mem.serve(f"{job.url}/", agent="thread", memory_root=job.memory) is first
    with pytest.raises(ConfigError, match="other options"):
        dcp_mem.serve(str(job.url), agent="thread", memory_root=job.memory, keep_memory=3)
    second = dcp_mem.serve(directory, agent="thread", memory_root=job.memory, verify=False)
    assert "(served)" in repr(second)
    _save(f"{job.url}/step-1", 1)
    _save(directory / "step-2", 2)
    assert (_names(first), _names(second)) == ({"step-1"}, {"step-2"})
    first.stop()
    first.stop()
    assert "(stopped)" in repr(first)
    _save(f"{job.url}/step-3", 3)
    assert _files_of_torch(Path(str(job.url), "step-3")) == {"__0_0.distcp"}
    _save(directory / "step-4", 4)
    assert _names(second) == {"step-2", "step-4"}
    second.stop()
    assert _torchs_functions() == before
    assert committed_in(directory) == {"step-2", "step-4"}


@in_process
def test_bad_options_raise_and_nothing_is_replaced(job: Job) -> None:
    before = _torchs_functions()
    for options in ({"keep": 2}, {"keep_memory": 0}, {"on_full": "burst"}, {"transport": "pigeon"}):
        with pytest.raises(ConfigError):
            dcp_mem.serve(str(job.url), memory_root=job.memory, **options)
    with pytest.raises(ConfigError, match="root=None"):
        dcp_mem.serve(None, job="run", memory_root=job.memory)  # type: ignore[arg-type]
    assert _torchs_functions() == before


@in_process
def test_saves_under_way_are_completed_when_it_stops(job: Job) -> None:
    served = dcp_mem.serve(str(job.url), agent="thread", memory_root=job.memory)
    begun: list[Future[Any]] = []
    for number in (1, 2, 3):
        response: Any = dcp.async_save(make_state(number), checkpoint_id=f"{job.url}/s{number}")
        begun.append(getattr(response, "upload_completion", response))
    served.stop()
    for future in begun:
        future.result(timeout=60)
    assert committed_in(Path(str(job.url))) >= {"s3"}


@in_process
def test_a_replacement_of_ours_by_others_stays(job: Job) -> None:
    served = dcp_mem.serve(str(job.url), agent="thread", memory_root=job.memory)
    ours = state_dict_saver._storage_setup
    calls: list[object] = []

    def theirs(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        calls.append(checkpoint_id)
        return ours(storage, checkpoint_id, reader)

    state_dict_saver._storage_setup = theirs
    served.stop()
    assert state_dict_saver._storage_setup is theirs
    _save(f"{job.url}/step-1", 1)
    assert calls == [f"{job.url}/step-1"]
    assert _files_of_torch(Path(str(job.url), "step-1")) == {"__0_0.distcp"}


def _says_what_it_does(job: Job) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dcp_mem")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with _serving(job):
        for name in ("a/step-1", "a/step-2", ""):
            _save(f"{job.url}/{name}", 1)
    return said


def test_the_log_says_what_is_served_and_what_is_left(job: Job) -> None:
    said = "\n".join(forked(_says_what_it_does, job))
    assert f"directly below {job.url} that name only a path go through node memory" in said
    assert said.count(f"leaves {job.url}/a/step-1 to torch") == 1
    assert f"(serve {job.url}/a, if checkpoints lie directly in it)" in said
    assert f"leaves {job.url}/ to torch" in said
    assert f"{job.url} is left to torch again" in said


@needs_a_stager
@in_process
def test_the_writer_stages_asynchronous_saves(job: Job) -> None:
    imported_before: Any = dcp.async_save
    staged: list[str] = []
    stage = MemoryStorageWriter.stage

    def noted(writer: MemoryStorageWriter, state: dict[str, Any]) -> dict[str, Any]:
        staged.append("staged")
        return stage(writer, state)

    with _serving(job) as served, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStorageWriter, "stage", noted)
        for begin, name in [(dcp.async_save, "step-1"), (imported_before, "step-2")]:
            state = make_state(1)
            begun: Any = begin(state, checkpoint_id=f"{job.url}/{name}")
            state["sharded"].fill_(-7)
            getattr(begun, "upload_completion", begun).result()
            staged.append(name)
        assert _names(served) == {"step-1", "step-2"}
        assert [_load(f"{job.url}/step-{number}") for number in (1, 2)] == [1, 1]
    assert staged[:2] == ["staged", "step-1"]
    assert "step-2" in staged


def _saves_in_a_process(job: Job) -> None:
    with _serving(job, agent="process"):
        begun: Any = dcp.async_save(
            make_state(1),
            checkpoint_id=f"{job.url}/step-1",
            async_checkpointer_type=state_dict_saver.AsyncCheckpointerType.PROCESS,
        )
        getattr(begun, "upload_completion", begun).result()
        assert _load(f"{job.url}/step-1") == 1
    assert not _files_of_torch(Path(str(job.url), "step-1")) & {"__0_0.distcp"}


@pytest.mark.skipif(
    not hasattr(state_dict_saver, "AsyncCheckpointerType"), reason="torch 2.6 has threads alone"
)
def test_a_save_in_another_process_is_served(job: Job) -> None:
    forked_ranks(_saves_in_a_process, 1, job)
    assert committed_in(Path(str(job.url))) == {"step-1"}


@in_process
def test_a_child_that_ends_leaves_its_parents_root_alone(job: Job) -> None:
    with _serving(job, agent="process"):
        child = multiprocessing.get_context("fork").Process(target=threading.active_count)
        child.start()
        child.join()
        assert child.exitcode == 0
        _save(f"{job.url}/step-1", 1)
        assert _load(f"{job.url}/step-1") == 1


@in_process
def test_the_last_name_in_the_root_is_the_newest_checkpoint(job: Job) -> None:
    root = str(job.url)
    with _serving(job):
        for step in ("0009", "0010"):
            _save(f"{root}/{step}", 1)
            assert _load(f"{root}/{max(os.listdir(root))}") == 1
    assert sorted(os.listdir(root)) == [".dcp_mem", "0009", "0010"]


# -- the checkpoint's directory -------------------------------------------------------------------


def _puts_files_of_its_own(job: Job) -> None:
    root = Path(str(job.url))
    with _serving(job, keep_storage=1) as served:
        for step in (1, 1, 2):
            _save(root / f"step-{step}", step)
            assert (root / f"step-{step}").is_dir(), "on every rank"
            (root / f"step-{step}" / f"of-rank-{dist.get_rank()}.json").write_text("{}")
            served.writer.wait(f"step-{step}", timeout=60)
            dist.barrier()
            assert _load(root / f"step-{step}") == step


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_program_puts_beside_survives_flush_overwriting_and_retention(
    job: Job, ranks: int
) -> None:
    forked_ranks(_puts_files_of_its_own, ranks, job)
    root, theirs = Path(str(job.url)), {f"of-rank-{rank}.json" for rank in range(ranks)}
    dcp_mem.collect_orphans(str(root), older_than=0)
    wait_until(lambda: committed_in(root) == {"step-2"}, "retention")
    assert {path.name for path in (root / "step-1").iterdir()} - {".dcp_mem"} == theirs
    assert {path.name for path in (root / "step-2").iterdir()} > theirs
    assert load_as_torch(root / "step-2") == 2


def _removes_before_the_flush(job: Job) -> None:
    root = Path(str(job.url))
    with _serving(job, persist=dcp_mem.every_n_saves(10)) as served:
        for step in (1, 2):
            _save(root / f"step-{step}", step)
        served.writer.wait("step-1", timeout=60)
        if dist.get_rank() == 0:
            shutil.rmtree(root / "step-2")
        dist.barrier()
        with pytest.raises(dcp.CheckpointException, match="removed before it got to storage"):
            _load(root / "step-2")
        assert load(MemoryStorageReader(job.url, memory_root=job.memory)) == 1
        dist.barrier()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_directory_that_is_removed_before_its_flush_stays_removed(job: Job, ranks: int) -> None:
    forked_ranks(_removes_before_the_flush, ranks, job)
    assert sorted(os.listdir(str(job.url))) == [".dcp_mem", "step-1"]


# -- what others put in a checkpoint's place -------------------------------------------------------


def _is_overwritten(job: Job) -> tuple[str, ...]:
    root = Path(str(job.url))
    with _serving(job) as served:
        _save(root / "step-1", 1)
        served.writer.wait("step-1", timeout=60)
        dist.barrier()
        writer = dcp.FileSystemWriter(root / "step-1")
        dcp.save(make_state(7), checkpoint_id=root / "step-1", storage_writer=writer)
        assert _load(root / "step-1") == 7
        reader = MemoryStorageReader(job.url, memory_root=job.memory)
        assert [load(reader), load(reader, "step-1")] == [7, 7]
        return reader.report().passed_over


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_writer_has_put_in_a_checkpoints_place_is_loaded(job: Job, ranks: int) -> None:
    for passed_over in forked_ranks(_is_overwritten, ranks, job):
        assert any("another checkpoint of that name is in its place" in why for why in passed_over)
    assert load_as_torch(Path(str(job.url), "step-1")) == 7


def _is_overwritten_before_its_flush(job: Job) -> None:
    root = Path(str(job.url))
    save_two_with_torch(root)
    with _serving(job, persist=dcp_mem.every_n_saves(10)):
        for step in (1, 2):
            _save(root / f"step-{step}", 10 + step)
        assert _load(root / "step-2") == 12, "saved after torch's"
        assert load_as_torch(root / "step-2") == 2, "storage has torch's until a flush"
        writer = dcp.FileSystemWriter(root / "step-2")
        dcp.save(make_state(7), checkpoint_id=root / "step-2", storage_writer=writer)
        assert _load(root / "step-2") == 7


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_two_writers_the_last_one_stays_also_before_the_flush(job: Job, ranks: int) -> None:
    forked_ranks(_is_overwritten_before_its_flush, ranks, job)
    assert load_as_torch(Path(str(job.url), "step-2")) == 7


# -- programs that don't know of each other ------------------------------------------------------


def _save_twice(root: Path, own: str) -> None:
    for step in (1, 2):
        _save(root / f"{own}-{step}", step)


def _saves_beside(job: Job, root: Path, own: str, other: str) -> str:
    """Save twice; the roots are served side by side until both programs have saved."""
    signs = Path(str(job.url)).parent
    with dcp_mem.serve(root, agent="thread", memory_root=job.memory):
        if own == "b":
            wait_until((signs / other).exists)
        error = raised_by(lambda: _save_twice(root, own))
        (signs / own).touch()
        wait_until((signs / other).exists)
    return str(error)


@pytest.mark.parametrize("are_apart", [False, True])
def test_programs_beside_each_other_need_directories_of_their_own_and_are_told_so(
    job: Job, are_apart: bool
) -> None:
    base = Path(str(job.url))
    roots = {own: base / own if are_apart else base for own in "ab"}
    with ThreadPoolExecutor() as programs:
        first = programs.submit(forked, _saves_beside, job, roots["a"], "a", "b")
        second = programs.submit(forked, _saves_beside, job, roots["b"], "b", "a")
        said = [first.result(), second.result()]
    assert said[0] == "None"
    if are_apart:
        assert said[1] == "None"
        assert [committed_in(base / own) for own in "ab"] == [{"a-1", "a-2"}, {"b-1", "b-2"}]
    else:
        assert "have each program serve a directory of its own" in said[1]


# -- ranks that a served program starts -----------------------------------------------------------


def _be_started(rank: int, root: str, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    _save(f"{root}/step-1", 1)
    assert _load(f"{root}/step-1") == 1
    dist.destroy_process_group()


def _starts_ranks(job: Job) -> None:
    with _serving(job):
        torch.multiprocessing.spawn(_be_started, (str(job.url), free_port()), nprocs=2)


def test_ranks_that_a_served_program_starts_are_served(job: Job) -> None:
    forked(_starts_ranks, job, timeout=180)
    assert committed_in(Path(str(job.url))) == {"step-1"}
    assert not _files_of_torch(Path(str(job.url), "step-1")) & _TORCHS


# -- unmodified programs ---------------------------------------------------------------------------


def _run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_python(*command, timeout=_SECONDS, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("begin", [pytest.param("sync", marks=pytest.mark.variant), "async"])
def test_an_unmodified_program_is_killed_and_goes_on(
    tmp_path: Path, memory_root: Path, begin: str
) -> None:
    script, root = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_PROGRAM)
    command = ["-m", "dcp_mem.run", str(script), str(root), begin]
    places = {"DCP_MEM_ROOT": str(memory_root), "DCP_MEM_SERVE": str(root)}
    killed = run_torchrun(*command, timeout=_SECONDS, env=places)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stdout, killed.stdout
    ended = run_torchrun(*command, timeout=_SECONDS, env=places)
    assert ended.returncode == 0, ended.stdout
    resumed = set(re.findall(r"goes on from (\d+)", ended.stdout))
    assert resumed == {"4"}, ended.stdout  # What was complete in memory is durable by then.
    assert "rank 0 ends with 28, 0" in ended.stdout
    assert "rank 1 ends with 28, 7" in ended.stdout
    assert "step-7" in committed_in(root)
    assert not [path for path in root.rglob("*.distcp") if path.name in _TORCHS], "torch wrote it"


def test_the_newest_checkpoint_is_durable_when_a_program_ends(
    tmp_path: Path, memory_root: Path
) -> None:
    script, root = tmp_path / "train.py", tmp_path / "run"
    script.write_text(
        "import sys, torch, dcp_mem\n"
        "import torch.distributed.checkpoint as dcp\n"
        "dcp_mem.serve(sys.argv[1], persist=dcp_mem.every_n_saves(10))\n"
        "for step in range(1, 4):\n"
        "    dcp.save({'w': torch.ones(3)}, checkpoint_id=f'{sys.argv[1]}/step-{step}')\n"
    )
    ended = _run(str(script), str(root), DCP_MEM_ROOT=str(memory_root))
    assert ended.returncode == 0, ended.stdout
    assert "step-3" in committed_in(root)


def test_an_error_of_the_program_is_its_own_and_ends_it_without_a_flush(
    tmp_path: Path, memory_root: Path
) -> None:
    script, root = tmp_path / "train.py", tmp_path / "run"
    script.write_text(
        "import sys, torch\n"
        "import torch.distributed.checkpoint as dcp\n"
        "dcp.save({'w': torch.ones(3)}, checkpoint_id=f'{sys.argv[1]}/step-1')\n"
        "raise LookupError('no such shard')\n"
    )
    ended = _run(
        "-m", "dcp_mem.run", "--root", str(root), str(script), str(root),
        DCP_MEM_ROOT=str(memory_root),
    )  # fmt: skip
    assert ended.returncode == 1
    assert "LookupError: no such shard" in ended.stdout
    # The agent goes on.
    wait_until(lambda: committed_in(root) == {"step-1"})


def test_the_launcher_runs_scripts_and_modules_as_python_does(
    tmp_path: Path, memory_root: Path
) -> None:
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("NAME = 'beside'\n")
    shows = "import sys, __main__\nprint([__name__, sys.argv[1:], NAME, __main__.NAME])\n"
    (package / "script.py").write_text(f"from beside import NAME\n{shows}")
    (package / "__main__.py").write_text(f"from .beside import NAME\n{shows}")
    serve = ("-m", "dcp_mem.run", "--root", str(tmp_path / "run"))
    places = {"DCP_MEM_ROOT": str(memory_root)}
    script = _run(*serve, str(package / "script.py"), "--root", "x", "-m", **places)
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    module = _run(*serve, "-m", "program", "--root", "x", "-m", **places, PYTHONPATH=paths)
    for ended in (script, module):
        assert ended.stdout.endswith("['__main__', ['--root', 'x', '-m'], 'beside', 'beside']\n"), (
            ended.stdout
        )


def _refused(arguments: list[str]) -> tuple[object, str]:
    said = io.StringIO()
    sys.argv[1:] = arguments
    with redirect_stderr(said), pytest.raises(SystemExit) as ended:
        runpy.run_module("dcp_mem.run", run_name="__main__", alter_sys=True)
    return ended.value.code, said.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: program"),
        (["--root", "run", "none.py"], "can't open none.py"),
        (["--root", "run", "-m", "no.such"], "No module named 'no'"),
        (["--root", "run", "-m", "tests.no_such"], "no module tests.no_such to run"),
        (["none.py"], "DCP_MEM_SERVE"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str], said: str, memory_root: Path
) -> None:
    code, text = forked(_refused, arguments, env={"DCP_MEM_ROOT": str(memory_root)})
    assert code == 2
    assert said in text
