"""The job's order on storage and in memory, where clocks differ, nodes are lost and runs begin."""

import csv
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_mem import keep_last
from tests.support.checkpoints.jobs import (
    Job,
    committed_in,
    load,
    load_anew,
    make_state,
    save,
    wait_until,
)
from tests.support.command import command
from tests.support.processes.forks import forked, forked_ranks

HOUR = 3600.0


@dataclass(frozen=True)
class Run:
    """What one run of a job does, in a process of its own.

    Attributes:
        clock: Seconds that the node's clock is fast; None stands still from the first look on.
        steps: What is saved; each is waited for, but for those in `kept`.
        kept: Steps that stay in memory.
        loads: Whether it loads the newest first.
        keep: How many checkpoints stay on storage.
    """

    clock: float | None
    steps: Sequence[int]
    kept: Sequence[int] = ()
    loads: bool = True
    keep: int = 2


def _set_clock(patch: pytest.MonkeyPatch, fast_seconds: float | None) -> None:
    real, begun = time.time, time.time()
    patch.setattr(time, "time", lambda: begun if fast_seconds is None else real() + fast_seconds)


def act(job: Job, run: Run) -> tuple[int, tuple[str, ...]]:
    """Be the run; return what was loaded, and what the report says was passed over."""
    loaded, passed_over = 0, tuple[str, ...]()
    with pytest.MonkeyPatch.context() as patch:
        _set_clock(patch, run.clock)
        if run.loads:
            found = load_anew(job)
            loaded, passed_over = found.number, found.report.passed_over
        with job.writer(agent="thread", keep_storage=keep_last(run.keep)) as writer:
            for step in run.steps:
                writer.annotate_next_save(step=step)
                save(writer, step)
                writer.wait(f"step-{step}", timeout=60)
        with job.writer(agent="thread", persist=False, keep_memory=2) as writer:
            for step in run.kept:
                writer.annotate_next_save(step=step)
                save(writer, step)
    return loaded, passed_over


def _node(memory_root: Path, url: Path | str | None, number: int) -> Job:
    return Job(None if url is None else str(url), str(memory_root / f"node{number}"))


def _told(job: Job, name: str, *options: str) -> dict[str, Any]:
    """What a command tells of the job."""
    places = ["--memory-root", job.memory, "--job", str(job.name), "--json"]
    told: dict[str, Any] = json.loads(command(name, str(job.url), *options, *places).stdout)
    return told


def _listed(job: Job) -> list[str]:
    return [one["name"] for one in _told(job, "ls")["checkpoints"]]


# -- a lost node whose clock was wrong -------------------------------------------------------------


@pytest.mark.parametrize("fast", [HOUR, -HOUR, None], ids=["fast", "slow", "frozen"])
def test_durable_steps_stay_where_the_lost_nodes_clock_was_wrong(
    memory_root: Path, tmp_path: Path, fast: float | None
) -> None:
    url = tmp_path / "root"
    forked(act, _node(memory_root, url, 0), Run(fast, (1, 2, 3), loads=False))
    assert forked(act, _node(memory_root, url, 1), Run(0.0, (4, 5, 6))) == (3, ())
    wait_until(lambda: committed_in(url) == {"step-5", "step-6"}, "retention")
    assert _listed(_node(memory_root, url, 1))[:2] == ["step-6", "step-5"]
    assert forked(act, _node(memory_root, url, 2), Run(-HOUR, ())) == (6, ())


@pytest.mark.parametrize("fast", [HOUR, -HOUR, None], ids=["fast", "slow", "frozen"])
def test_the_history_follows_the_order_of_saves_where_a_clock_was_wrong(
    memory_root: Path, tmp_path: Path, fast: float | None
) -> None:
    url, names = tmp_path / "root", [f"step-{step}" for step in range(1, 8)]
    forked(act, _node(memory_root, url, 0), Run(fast, (1, 2, 3), loads=False))
    forked(act, _node(memory_root, url, 1), Run(0.0, (4, 5, 6), kept=(7,)))
    wait_until(lambda: committed_in(url) == {"step-5", "step-6"}, "retention")
    with open(url / ".dcp_mem" / "checkpointHistories.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == names[:6]
    numbers = [(generation, count) for generation in "12" for count in "123"]
    assert [(row["generation"], row["count"]) for row in rows] == numbers
    if fast == HOUR:
        assert rows[2]["created"] > rows[3]["created"]
    page = tmp_path / "report.html"
    _told(_node(memory_root, url, 1), "report", "--output", str(page))
    shown = re.findall(r"step-\d", page.read_text())
    assert list(dict.fromkeys(shown)) == names


def test_the_newest_in_memory_is_loaded_before_it_is_durable(
    memory_root: Path, tmp_path: Path
) -> None:
    url = tmp_path / "root"
    forked(act, _node(memory_root, url, 0), Run(HOUR, (1, 2, 3), loads=False))
    forked(act, _node(memory_root, url, 1), Run(0.0, (4,), kept=(5, 6)))
    assert forked(act, _node(memory_root, url, 1), Run(0.0, ())) == (6, ())


def test_memory_alone_keeps_the_order_when_its_clock_is_set_back(memory_root: Path) -> None:
    job = _node(memory_root, None, 0)
    forked(act, job, Run(HOUR, (), kept=(1, 2), loads=False))
    assert forked(act, job, Run(0.0, (), kept=(3, 4))) == (2, ())
    assert forked(act, job, Run(-HOUR, ())) == (4, ())


@pytest.mark.parametrize("stored", [True, False], ids=["first", "after one in memory"])
def test_a_run_that_loads_nothing_is_newer_than_what_storage_has(
    memory_root: Path, tmp_path: Path, stored: bool
) -> None:
    """It can't know what is there: storage's claim gives it its generation."""
    url = tmp_path / "root"
    forked(act, _node(memory_root, url, 0), Run(HOUR, (1, 2, 3), loads=False))
    forked(act, _node(memory_root, url, 0), Run(HOUR, (4, 5)))
    new = Run(0.0, (1,), kept=(2, 3), loads=False)
    if not stored:
        forked(act, _node(memory_root, url, 1), Run(0.0, (), kept=(1,), loads=False))
    forked(act, _node(memory_root, url, 1), new)
    number, passed_over = forked(act, _node(memory_root, url, 1), Run(0.0, ()))
    assert number == 3
    assert [text for text in passed_over if "later step" in text]


# -- said aloud ------------------------------------------------------------------------------------


def test_a_newest_with_an_older_step_is_said_aloud(
    memory_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = _node(memory_root, tmp_path / "root", 0)
    with job.writer(agent="thread", keep_memory=5) as writer:
        for number in (5, 6, 3):
            writer.annotate_next_save(step=number)
            save(writer, number)
    with caplog.at_level(logging.WARNING):
        found = load_anew(job)
    assert found.number == 3
    said = (
        "step-3 (step 3) is the newest by the job's order, but step-6 has a later step (6), "
        "and 1 more"
    )
    assert said in found.report.passed_over
    assert said in caplog.text
    assert load_anew(job, "step-6").report.passed_over == ()


# -- DCP's own checkpoints -------------------------------------------------------------------------


def test_what_torch_has_put_comes_behind_what_was_there(job: Job) -> None:
    url = Path(str(job.url))
    with job.writer(agent="thread") as writer:
        save(writer, 1)
        writer.wait("step-1", timeout=60)
    dcp.save(make_state(2), checkpoint_id=url / "by-torch")
    assert _listed(job) == ["by-torch", "step-1"]
    assert load_anew(job).number == 2
    with job.writer(agent="thread") as writer:
        save(writer, 3)
        writer.wait("step-3", timeout=60)
    assert _listed(job) == ["step-3", "by-torch", "step-1"]
    assert load_anew(job).number == 3


# -- ranks whose memories differ -------------------------------------------------------------------


def _save_on_nodes(root: str, url: str, lost: bool) -> list[tuple[int, int]]:
    """Each rank is a node; the second is new, with an empty memory and a clock of its own."""
    with pytest.MonkeyPatch.context() as patch:
        rank = dist.get_rank()
        _set_clock(patch, -HOUR * rank)
        job = Job(url, f"{root}/node{rank}{'-new' if lost and rank == 1 else ''}")
        if lost:
            with job.reader() as reader:
                assert load(reader) == 2
        with job.writer(replicas=1) as writer:
            for number in (3, 4) if lost else (1, 2):
                save(writer, number)
                writer.wait(f"step-{number}", timeout=60)
                writer.wait(f"step-{number}", "replicated", timeout=60)
                dist.barrier()
            return [(one.generation, one.count) for one in writer.status()]


@pytest.mark.timeout(120)
def test_a_node_with_an_empty_memory_learns_the_count_from_the_others(
    memory_root: Path, tmp_path: Path
) -> None:
    arguments = str(memory_root), str(tmp_path / "root")
    for numbers in forked_ranks(_save_on_nodes, 2, *arguments, False):
        assert numbers[0] == (1, 2)
    for numbers in forked_ranks(_save_on_nodes, 2, *arguments, True):
        assert numbers[0] == (2, 2)
