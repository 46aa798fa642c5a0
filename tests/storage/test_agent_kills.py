"""An agent killed anywhere in a flush to a real server has a successor; two commit once."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_mem.policy.persistence import every_n_saves
from tests.support.checkpoints.jobs import Job, agents, wait_until
from tests.support.processes.forks import forked, forking
from tests.support.storage.proxy import Delay, Hang
from tests.support.storage.soundness import FLUSHER_POINTS
from tests.support.storage.ways import (
    LARGE,
    NAME,
    Way,
    assert_absent,
    assert_whole,
    put_into,
    serve,
    state_of,
)

pytestmark = pytest.mark.timeout(120)

ALWAYS = 1_000_000
POINTS = [point for point in FLUSHER_POINTS if point.startswith("flush.")]
KILLS = ["flush.part:2", *(f"{point}:1" for point in POINTS)]


@pytest.mark.parametrize("kill", KILLS)
def test_an_agent_killed_in_a_flush_is_followed_by_one_that_sends_only_the_rest(
    way: Way, memory_root: Path, large: Path, kill: str
) -> None:
    put_into(memory_root, large)
    point, _, count = kill.partition(":")
    if point == "flush.part":  # keeps the others from being stored as well by then
        way.proxy.fail(way.steps["part"], Hang(), times=ALWAYS, after=int(count))
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked(serve, way.job(memory_root), f"{point}:kill:{count}")
    before = way.stored_parts()
    assert len(before) == {"flush.started": 0, "flush.part": int(count)}.get(point, 3)
    if POINTS.index(point) >= POINTS.index("flush.committed"):
        assert_whole(way, memory_root, 1, LARGE)
    else:
        assert_absent(way, memory_root)

    way.proxy.reset()
    assert forked(serve, way.job(memory_root)) == "durable"
    sent = way.stored_parts()
    assert not before & sent, "parts that were up were sent again"
    assert len(before | sent) == 3
    assert_whole(way, memory_root, 1, LARGE)


_REAL_PARTS_NBYTES = 40 << 20


def _outlive_an_agent(job: Job) -> None:
    os.environ["DCP_MEM_FAULTS"] = "flush.part:kill:2"
    with job.writer() as writer:
        dcp.save(state_of(1, _REAL_PARTS_NBYTES), checkpoint_id=NAME, storage_writer=writer)
        del os.environ["DCP_MEM_FAULTS"]
        wait_until(lambda: not agents(job.memory), "the armed agent to be killed")
        writer.wait(timeout=60)


def test_a_trainer_has_a_killed_agent_replaced_by_one_that_goes_on(
    way: Way, memory_root: Path
) -> None:
    way.proxy.fail(way.steps["part"], Delay(0.5), after=2)
    forked(_outlive_an_agent, way.job(memory_root))
    targets = [one.target for one in way.asked("part") if one.status in (200, 201)]
    assert len(targets) == len(set(targets)) == 3, "a part was sent twice"
    assert_whole(way, memory_root, 1, _REAL_PARTS_NBYTES)


# -- two agents at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("step", ["listing", "part", "completion", "node manifest", "commit"])
def test_two_agents_at_one_checkpoint_commit_it_once_and_both_know(
    way: Way, memory_root: Path, large: Path, step: str, overwrite: bool
) -> None:
    """For example the owner and a takeover: with a root each, no lock keeps them apart."""
    jobs = []
    for root in (memory_root / "one", memory_root / "other"):
        root.mkdir(mode=0o700)
        put_into(root, large)
        jobs.append(way.job(root))
    way.proxy.fail(way.steps[step], Delay(0.7))  # the second overtakes the first
    way.proxy.fail(way.steps["part"], Delay(0.2), times=3)
    with (
        forking(serve, None, jobs[0], "", overwrite) as one,
        forking(serve, None, jobs[1], "", overwrite) as other,
    ):
        assert [*one.join(), *other.join()] == ["durable", "durable"]
    commits = [one.status for one in way.asked("commit") if one.status in (200, 201)]
    assert commits
    assert overwrite or len(commits) == 1
    assert_whole(way, memory_root, 1, LARGE)


def _saves_on_after_its_agent_was_killed(job: Job) -> None:
    def save(step: int) -> None:
        state = {"w": torch.full((1 << 20,), float(step))}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)

    with job.writer(persist=every_n_saves(100), upload_limit="1MiB", keep_memory=3) as writer:
        save(1)
        wait_until(lambda: agents(job.memory), "the agent")
        wait_until(lambda: list(Path(job.url or "").rglob("*.part")), "the flush")
        for agent in agents(job.memory):
            agent.kill()
            agent.wait()
        save(2)  # stays in memory: nobody is woken for it
        wait_until(lambda: Path(job.url or "", "step-1", ".metadata").exists(), "step-1")
        assert not Path(job.url or "", "step-2").exists()


def test_an_agent_that_was_killed_has_a_successor_at_the_next_save_whatever_that_is(
    memory_root: Path, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "storage"), str(memory_root))
    forked(_saves_on_after_its_agent_was_killed, job)
