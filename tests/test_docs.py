"""The Python in README and docs runs, with storage in a directory."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_mem import MemoryStorageReader
from tests.forks import forked

_REPOSITORY = Path(__file__).parents[1]
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)

LOOP = """
from tests.test_docs import training
model, optimizer, scheduler, dataloader, train = training()
steps = 25
"""
WRITER = """
import torch
import torch.distributed.checkpoint as dcp
from dcp_mem import MemoryStorageWriter
root, step, loss, state = "abfs://ckpts/run-42", 100, 0.5, {"w": torch.ones(3)}
"""
FIRST_SAVE = """
import dcp_mem, torch
state, first_step, last_step, train = {"w": torch.ones(3)}, 0, 25, lambda step: None
with dcp_mem.MemoryStorageWriter("abfs://ckpts/run-42") as writer:
    dcp_mem.save(state, checkpoint_id="step-0", storage_writer=writer)
"""
TRAINER = """
from tests.lightning_job import Model
model = Model()
"""
BEFORE = {
    "README.md 1": LOOP,
    "README.md 2": FIRST_SAVE,
    "docs/lightning.md 1": TRAINER,
    "docs/manager.md 1": LOOP,
    "docs/replication.md 1": WRITER,
    "docs/storage.md 1": WRITER,
}
"""What a block takes for given."""
AFTER = {
    "README.md 1": "assert manager.latest() == 20",
    "docs/lightning.md 1": "assert trainer.global_step == 120",
    "docs/manager.md 1": "assert manager.latest() == 20",
    "docs/storage.md 1": "dcp.save(state, checkpoint_id='a', storage_writer=writer); writer.close()",
}
"""What must hold then, or is still to be done."""
ELSEWHERE = {"docs/training-state.md 1"}
"""What has a test of its own."""


def training() -> tuple[Any, ...]:
    """What a training script has before it thinks of checkpoints."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train(step: int) -> torch.Tensor:
        loss = model(torch.full((2, 4), 0.1 * step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss.detach()  # type: ignore[no-any-return]

    return model, optimizer, scheduler, None, train


def _blocks() -> dict[str, str]:
    pages = [_REPOSITORY / "README.md", *sorted((_REPOSITORY / "docs").glob("*.md"))]
    return {
        f"{page.relative_to(_REPOSITORY)} {number}": text
        for page in pages
        for number, text in enumerate(_BLOCK.findall(page.read_text()), 1)
    }


def _run(text: str, url: str, memory: str) -> None:
    os.environ["DCP_MEM_ROOT"] = memory
    exec(compile(text.replace("abfs://ckpts/run-42", url), "docs", "exec"), {"__name__": "__main__"})


def test_every_block_is_run() -> None:
    assert set(_blocks()) == set(BEFORE) | ELSEWHERE


@pytest.mark.parametrize("name", BEFORE)
def test_a_block_runs(name: str, memory_root: Path, tmp_path: Path) -> None:
    text = _blocks()[name]
    if "replication" in name:  # one rank has nobody to replicate to
        text = text.replace('writer.wait("step-100", "replicated", timeout=60)', "writer.close()")
    url = str(tmp_path / "run-42")
    forked(_run, "\n".join([BEFORE[name], text, AFTER.get(name, "")]), url, str(memory_root))
    assert MemoryStorageReader(url, memory=tmp_path / "none").recoverable()
