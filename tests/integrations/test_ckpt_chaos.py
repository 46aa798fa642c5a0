"""A stranger's crash test: `ckpt-chaos` kills trainings at the files of their checkpoints.

`pip install ckpt-chaos`; without it these are skipped.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.variants import VARIANT


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("training", "points"),
    [
        pytest.param("loop", 40, marks=VARIANT),
        pytest.param("trainer", 12, marks=VARIANT),
        pytest.param("lightning", 12, marks=VARIANT),
    ],
)
def test_every_kill_resumes_to_the_same_weights_and_loses_no_work(
    memory_root: Path, training: str, points: int
) -> None:
    """The training itself fails where it goes on from an older step than one that was saved."""
    pytest.importorskip("ckpt_chaos")
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--max-points", str(points)]
    command += ["--timeout", "500"]
    command += ["--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/final.txt"]
    command += ["--work", str(memory_root / "chaos"), "--"]
    command += [sys.executable, "-m", "tests.support.frameworks.chaos_training"]
    run = subprocess.run(
        [*command, training, "dcp_mem", "{out}"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,  # its directories lie in a memory root, which others can't look into
    )
    verdicts = re.findall(r"^(?:[A-Z_]+: \d+ *)+$", run.stdout, re.MULTILINE)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.fullmatch(r"PASS: \d+", verdicts[-1].strip()), run.stdout
