"""The recipe of docs/fsdp2.md, as it stands there: trained, killed, started again."""

import re
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.launch import TORCHRUN, run_python, running_python

_BLOCKS = re.findall(
    r"```python\n(.*?)```", (REPOSITORY / "docs" / "fsdp2.md").read_text(), re.DOTALL
)
_SECONDS, _STEPS = 200, "35"
_IN_THE_THIRD_SAVE = {"DCP_MEM_FAULTS": "stage.copied:kill:3"}


def _loss(output: str) -> str:
    return output[output.index("loss ") :].splitlines()[0]


def _is_resumed(script: Path, tmp_path: Path) -> str:
    """Check that a killed run ends as an undisturbed one; return the second start's output."""
    with (
        running_python(
            *TORCHRUN, script, tmp_path / "killed", _STEPS, env=_IN_THE_THIRD_SAVE
        ) as killed,
        running_python(*TORCHRUN, script, tmp_path / "undisturbed", _STEPS) as undisturbed,
    ):
        first, _ = killed.communicate(timeout=_SECONDS)
        whole, _ = undisturbed.communicate(timeout=_SECONDS)
    assert undisturbed.returncode == 0, whole
    assert killed.returncode != 0, first
    assert "SIGKILL" in first, first
    assert "loss" not in first, first
    again = run_python(*TORCHRUN, script, tmp_path / "killed", _STEPS, timeout=_SECONDS)
    assert again.returncode == 0, again.stdout
    assert _loss(again.stdout) == _loss(whole)
    return again.stdout


@pytest.mark.variant
@needs_fsdp_on_cpu
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_plain_fsdp2_goes_on_to_the_bit(
    tmp_path: Path, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    script = tmp_path / "train.py"
    script.write_text(_BLOCKS[0])
    assert "step 10 is loaded from memory" in _is_resumed(script, tmp_path)
