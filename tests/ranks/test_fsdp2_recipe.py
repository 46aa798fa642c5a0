"""The recipes of docs/fsdp2.md, as they stand there: trained, killed, started again."""

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

# What torchtitan's trainer has, and hands to its checkpoint manager; a step's data follow from its
# number.
_TITAN = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import \
get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Optimizers:
    def state_dict(self):
        return get_optimizer_state_dict(model, optimizer)

    def load_state_dict(self, state):
        set_optimizer_state_dict(model, optimizer, state)

class Trainer:
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])

root, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
fully_shard(model, mesh=mesh)
optimizer, trainer = torch.optim.AdamW(model.parameters(), lr=1e-3), Trainer()
config = MemoryCheckpointManager.Config(enable=True, folder="checkpoint", \
interval=10, last_save_model_only=False)
manager = config.build(
    dataloader=None, model_parts=[model], optimizers=Optimizers(), lr_schedulers=Trainer(),
    states={"train_state": trainer}, sd_adapter=None, base_folder=root,
)
is_loaded = manager.load(step=-1)
if dist.get_rank() == 0:
    print(f"step {trainer.step} is loaded" if is_loaded else "starting", flush=True)
while trainer.step < steps:
    trainer.step += 1
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(trainer.step))
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.save(trainer.step, last_step=trainer.step == steps)
if dist.get_rank() == 0:
    print(f"step {steps}, loss {loss.item():.9f}", flush=True)
manager.close()
dist.destroy_process_group()
"""


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


@needs_fsdp_on_cpu
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_torchtitan_goes_on_to_the_bit(
    tmp_path: Path, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchtitan.components.checkpointer", exc_type=ImportError)
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    script = tmp_path / "train.py"
    script.write_text(_BLOCKS[1] + _TITAN)
    assert "step 20 is loaded" in _is_resumed(script, tmp_path)
