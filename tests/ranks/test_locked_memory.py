"""Loads of memory that a stopped process has locked: another copy, storage, or an older one."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checkpoints.jobs import Job, load, save
from tests.support.processes.forks import forked, forked_ranks, raised_by
from tests.support.processes.stops import stop

_LOCK = """
import fcntl, os, sys, time
for path in sys.argv[1:]:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@contextmanager
def locked(*paths: Path) -> Iterator[None]:
    """Have a stopped process hold exclusive locks on these files."""
    command = [sys.executable, "-c", _LOCK, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            stop(process.pid)
            yield
        finally:
            process.kill()


def _segments(job: Job, name: str) -> list[Path]:
    return list((job.directory / name).glob("__*.distcp"))


def _manifest(job: Job, name: str) -> list[Path]:
    return list((job.directory / name / ".dcp_mem").glob("manifest*.json"))


def _save_two(job: Job) -> None:
    with job.writer(agent="thread", keep_memory=2) as writer:
        for number in (1, 2):
            save(writer, number)


def _load(job: Job) -> tuple[int, list[str], str, tuple[str, ...]]:
    with job.reader() as reader:
        names = reader.recoverable()
        number = load(reader)
        report = reader.report()
        return number, names, report.source, report.passed_over


@pytest.mark.parametrize("which", [_segments, _manifest])
def test_an_older_checkpoint_is_taken_where_the_newest_is_locked(
    memory_root: Path, which: Callable[[Job, str], list[Path]]
) -> None:
    job = Job(None, str(memory_root))
    forked(_save_two, job)
    with locked(*which(job, "step-2")):
        number, names, source, passed_over = forked(_load, job)
    assert (number, source) == (1, "memory")
    assert names == ["step-2", "step-1"]  # a lock shows when the checkpoint is opened
    assert "step-2" in passed_over[0]
    assert forked(_load, job)[0] == 2


@pytest.mark.parametrize("which", [_segments, _manifest])
def test_storage_is_read_where_memory_is_locked(
    memory_root: Path, tmp_path: Path, which: Callable[[Job, str], list[Path]]
) -> None:
    job = Job(str(tmp_path / "root"), str(memory_root))
    forked(_save_two, job)
    with locked(*which(job, "step-2")):
        number, _, source, _ = forked(_load, job)
    assert (number, source) == (2, "storage")


def test_a_named_checkpoint_that_is_locked_is_refused_with_the_reason(memory_root: Path) -> None:
    job = Job(None, str(memory_root))
    forked(_save_two, job)
    with locked(*_segments(job, "step-2")):
        text = forked(_refusal, job)
    assert "checkpoint 'step-2' can't be loaded from memory" in text
    assert "loadable, newest first: step-1" in text


def _refusal(job: Job) -> str:
    with job.reader() as reader:
        return str(raised_by(lambda: load(reader, "step-2")))


# -- copies ----------------------------------------------------------------------------------------


def _node(root: str) -> Job:
    return Job(None, f"{root}/node{dist.get_rank()}")


def _save_with_copies(root: str) -> None:
    with _node(root).writer(replicas=1, keep_memory=2) as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", "replicated", timeout=60)


def _load_on_nodes(root: str) -> tuple[int, str]:
    with _node(root).reader() as reader:
        return load(reader), reader.report().source


def test_another_nodes_copy_is_read_where_a_nodes_own_segment_is_locked(memory_root: Path) -> None:
    forked_ranks(_save_with_copies, 2, str(memory_root))
    own = Job(None, f"{memory_root}/node1")
    (segment,) = [one for one in _segments(own, "step-2") if one.name.startswith("__1_")]
    with locked(segment):
        found = forked_ranks(_load_on_nodes, 2, str(memory_root))
    assert found == [(2, "memory and peers")] * 2
