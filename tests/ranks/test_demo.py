"""The main job, as the README runs it, at its smallest."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.launch import TETHER

_DEMO = (sys.executable, "-m", "dcp_mem.demo", "--size", "small", "--steps", "5", "--save-every=1")
_PLACES = ("memory", "storage")


@needs_fsdp_on_cpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_is_killed_recovers_and_shows_identical_losses(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TETHER, *_DEMO], cwd=tmp_path, capture_output=True, text=True, timeout=560, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "resumed step-2 from memory" in done.stdout
    assert "resumed step-4 from storage" in done.stdout
    assert done.stdout.count("\n  yes  ") == 7
    assert done.stdout.count("  next: ") == 2
    assert len(re.findall(r"^  done in \d+ s$", done.stdout, re.MULTILINE)) == 3
    assert "\n  NO " not in done.stdout
    waited = re.search(
        r"a save held it up +(\d+) ms \(median of 5; the first \d+ ms\)", done.stdout
    )
    part = re.search(
        r"dcp_mem's part +(\d+) ms; the rest is get_state_dict and DCP's calls", done.stdout
    )
    assert waited is not None
    assert part is not None
    assert int(part[1]) <= int(waited[1])


@needs_fsdp_on_cpu
@pytest.mark.slow
def test_a_demo_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*TETHER, *_DEMO], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        output = ""
        while "  step 1/5" not in output:
            line = demo.stdout.readline()
            assert line, f"it ended early: {output}"
            output += line
        demo.send_signal(signal.SIGTERM)
        demo.stdout.read()
    assert demo.returncode == 128 + signal.SIGTERM
    memory, storage = (Path(re.findall(rf"{name} +(\S+)", output)[0]) for name in _PLACES)
    assert not memory.exists()
    assert not storage.parent.exists()
