"""TRL's SFTTrainer with adapters of peft: killed within a step, it goes on with the same bits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import REPOSITORY

pytest.importorskip("trl")
pytestmark = [pytest.mark.timeout(280), pytest.mark.slow]


def _run(directory: Path, memory: Path, name: str, killed_at: int = 0) -> Any:
    """Run the program; return what it printed, or the signal that ended it."""
    (memory / name).mkdir(mode=0o700, exist_ok=True)
    spec = {
        "output": str(directory / f"{name}-output"),
        "url": str(directory / name),
        "memory": str(memory / name),
        "killed_at": killed_at,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.support.frameworks.sft_job",
            json.dumps(spec),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode < 0:
        return signal.Signals(-done.returncode)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.variant
def test_a_fine_tuning_that_is_killed_goes_on_and_sends_its_base_once(
    memory_root: Path, tmp_path: Path
) -> None:
    whole = _run(tmp_path, memory_root, "whole")
    assert whole["resumed"] == 0
    assert len(whole["losses"]) == 8
    assert _run(tmp_path, memory_root, "in-two", killed_at=5) is signal.SIGKILL
    again = _run(tmp_path, memory_root, "in-two")
    assert again["resumed"] == 4
    assert again["losses"] == whole["losses"]
    sent = {name: nbytes for name, (_, nbytes) in whole["status"].items() if name != "step-1"}
    assert sent
    for name, nbytes in sent.items():  # the adapters and their optimizer's two averages
        assert nbytes < 3.2 * whole["training"] + (1 << 20), name
        assert nbytes < whole["everything"] / 2, name
