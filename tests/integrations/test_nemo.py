"""NeMo 2's AutoResume with the pieces for Lightning, killed and resumed.

`tests/support/frameworks/nemo_job.py` says what of NeMo is stubbed.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="needs nemo-toolkit 2"),
]


def _train(*arguments: object) -> "subprocess.CompletedProcess[str]":
    job = (sys.executable, "-m", "tests.support.frameworks.nemo_job", *map(str, arguments))
    return subprocess.run(job, capture_output=True, text=True, timeout=250, check=False)


def _resumed(root: Path, memory: Path, answer: Path) -> list[Any]:
    ended = _train(root, memory, answer)
    assert ended.returncode == 0, ended.stderr[-8000:]
    found: list[Any] = json.loads(answer.read_text())
    return found


def test_a_killed_training_goes_on_from_the_newest_of_memorys_and_nemos_own(
    memory_root: Path, tmp_path: Path
) -> None:
    root, answer = tmp_path / "ckpts", tmp_path / "answer"
    killed = _train(root, memory_root, answer, 9)
    assert killed.returncode == -9, killed.stderr[-8000:]
    # Memory's of step 8 is newer than that of the other callback, of step 6.
    found = _resumed(root, memory_root, answer)
    assert found[:3] == [8, 12, "memory"]
    assert found[3].startswith("memory-step")
    # On new nodes, the newest on storage: of step 12, where training ends at once.
    assert _resumed(root, memory_root / "others", answer)[1:3] == [12, "storage"]
