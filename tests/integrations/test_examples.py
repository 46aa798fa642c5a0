"""Each script of examples/ trains, and resumes where its last run ended."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.launch import TETHER
from tests.support.storage.servers import free_port
from tests.support.variants import with_variants

_EXAMPLES = Path(__file__).parents[2] / "examples"
_NAMES = sorted(path.stem for path in _EXAMPLES.glob("*.py"))
_TRAINED_ELSEWHERE = {"deepspeed_zero", "huggingface_trainer", "lightning_trainer", "megatron_core"}
"""`.ci/package` has these train, and the frameworks' own tests resume."""
_NEEDS = {
    "accelerate_loop": "accelerate",
    "deepspeed_zero": "deepspeed",
    "huggingface_trainer": "transformers",
    "lightning_trainer": "lightning",
    "megatron_core": "megatron",
}
_TWICE = """
import importlib, os, runpy, sys
script, root, needed = sys.argv[1:]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if needed:
    importlib.import_module(needed)  # Once for both runs: it takes seconds.
for steps in ("12", "20"):
    child = os.fork()
    if not child:
        sys.argv = [script, root, steps]
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the run of {steps} steps failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", with_variants(_NAMES, gate=[one for one in _NAMES if one not in _TRAINED_ELSEWHERE])
)
def test_an_example_resumes_where_its_last_run_ended(
    name: str, memory_root: Path, tmp_path: Path
) -> None:
    if name in _NEEDS:
        pytest.importorskip(_NEEDS[name])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = subprocess.run(
        [
            *(*TETHER, sys.executable, "-c", _TWICE),
            *(str(_EXAMPLES / f"{name}.py"), str(tmp_path / "run"), _NEEDS.get(name, "")),
        ],
        env={**os.environ, "DCP_MEM_ROOT": str(memory_root), **alone, **meeting},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    told = re.findall(r"^(starting|resuming after step \d+)$", run.stdout, re.MULTILINE)
    assert len(told) == 2
    assert told[0] == "starting"
    assert 5 <= int(told[1].rpartition(" ")[2]) <= 12
