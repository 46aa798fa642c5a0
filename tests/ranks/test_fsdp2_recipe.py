"""The recipe of docs/fsdp2.md, as it stands there: trained, killed, started again."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.processes.launch import TETHER

_BLOCKS = re.findall(
    r"```python\n(.*?)```", (REPOSITORY / "docs" / "fsdp2.md").read_text(), re.DOTALL
)
_SECONDS = 200
_IN_THE_THIRD_SAVE = {"DCP_MEM_FAULTS": "stage.copied:kill:3"}


@contextmanager
def _torchrun(
    script: Path, root: Path, faults: dict[str, str]
) -> Iterator["subprocess.Popen[str]"]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    with subprocess.Popen(
        [*TETHER, *command, str(root), "35"],
        env={**environment, **faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks; SIGKILL would leave them
            process.wait()


def _outputs(*running: "subprocess.Popen[str]") -> list[str]:
    return [process.communicate(timeout=_SECONDS)[0] for process in running]


def _loss(output: str) -> str:
    return output[output.index("loss ") :].splitlines()[0]


def _is_resumed(script: Path, tmp_path: Path) -> str:
    """Check that a killed run ends as an undisturbed one; return the second start's output."""
    with (
        _torchrun(script, tmp_path / "killed", _IN_THE_THIRD_SAVE) as killed,
        _torchrun(script, tmp_path / "undisturbed", {}) as undisturbed,
    ):
        first, whole = _outputs(killed, undisturbed)
    assert undisturbed.returncode == 0, whole
    assert killed.returncode != 0, first
    assert "SIGKILL" in first, first
    assert "loss" not in first, first
    with _torchrun(script, tmp_path / "killed", {}) as again:
        [second] = _outputs(again)
    assert again.returncode == 0, second
    assert _loss(second) == _loss(whole)
    return second


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
