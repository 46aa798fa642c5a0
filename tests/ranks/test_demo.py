"""The main job, as the README runs it, at its smallest."""

import subprocess
import sys
from pathlib import Path

import pytest

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
