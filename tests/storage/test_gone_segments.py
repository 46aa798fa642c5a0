"""Segments that leave storage during their flush, as `dcp-mem gc` may have it: nothing is torn."""

from pathlib import Path

import psutil
import pytest

from dcp_mem import State
from tests.support.checkpoints.jobs import Job, agents, load_as_torch, wait_until
from tests.support.processes.forks import forked
from tests.support.storage.ways import save_two_unflushed, start


@pytest.mark.parametrize("name", ["step-2", "step-1"])  # step-1 comes when step-2 is durable
def test_a_checkpoint_that_has_lost_a_segment_is_committed_once_it_is_whole(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    forked(save_two_unflushed, str(memory_root))
    stored = tmp_path / name
    turn = {"step-2": 1, "step-1": 2}[name]
    # It stops once all is uploaded, before its node says so.
    monkeypatch.setenv("DCP_MEM_FAULTS", f"flush.segments:stop:{turn}")
    with Job(str(tmp_path), str(memory_root)).writer(reuse_stored=False, keep_memory=2) as writer:
        start(writer)
        wait_until(lambda: [one.status() for one in agents(memory_root)] == [psutil.STATUS_STOPPED])
        (segment,) = stored.glob("*.distcp")
        segment.unlink()
        assert not (stored / ".metadata").exists()
        (agent,) = agents(memory_root)
        agent.resume()
        writer.wait(name, timeout=60)
        status = {one.name: one for one in writer.status()}[name]
        assert (status.state, status.error) == (State.DURABLE, "")
    assert forked(load_as_torch, stored) == int(name[-1])
