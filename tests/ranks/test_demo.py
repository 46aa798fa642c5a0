"""The main job, as the README runs it, at its smallest."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_mem.demo import journal, train
from dcp_mem.demo.schedule import checkpoint_id
from tests.support.checkpoints.jobs import Job
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.launch import TETHER


@needs_fsdp_on_cpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_is_killed_recovers_and_shows_identical_losses(tmp_path: Path) -> None:
    command = [
        *TETHER,
        sys.executable,
        "-m",
        "dcp_mem.demo",
        "--size",
        "small",
        "--steps",
        "5",
        "--save-every",
        "1",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=560, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "from memory" in done.stdout
    assert "from storage" in done.stdout
    assert "  no  " not in done.stdout
    cost = r"a save held it up +\d+ ms \(median of \d+; the first \d+ ms\)"
    assert re.search(cost, done.stdout)
    assert re.search(
        r"dcp_mem's part +\d+ ms; the rest is get_state_dict and DCP's calls", done.stdout
    )


class _Training:
    """What the demo saves, at its smallest."""

    step = 7

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.arange(5.0), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_demo_saves_through_plain_dcp_save_and_records_how_long_it_took(
    memory_job: Job,
) -> None:
    events: list[Any] = []
    training: Any = _Training()
    record: Any = SimpleNamespace(record=events.append)
    with (
        memory_job.writer(agent="thread") as writer,
        patch.object(dcp, "save", wraps=dcp.save) as saved,
    ):
        seconds = train.save(training, writer, record)
    name = checkpoint_id(7)
    saved.assert_called_once_with({"training": training}, checkpoint_id=name, storage_writer=writer)
    assert events == [journal.SaveBegun(name), journal.SaveReturned(name, seconds)]
    assert 0 < seconds < 60
    into = {"training": {"w": torch.zeros(5), "step": 0}}
    dcp.load(into, checkpoint_id=name, storage_reader=memory_job.reader())
    assert into["training"]["step"] == 7
