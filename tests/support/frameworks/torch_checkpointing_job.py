"""A training that saves with torch_checkpointing: `torch_checkpointing_job.py ROOT STEPS HOW`.

HOW is "sync", or "async" for a process that writes. It prints which step it goes on from, and a
hash of what it has come to. Nothing of it names dcp_mem, but for one line.
"""

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.schema import ItemSpec

from dcp_mem import MemoryStorageReader
from dcp_mem.integrations.torch_checkpointing import in_memory


class Training:
    """A model, its optimizer, and a table that the ranks have parts of."""

    def __init__(self, root: str, how: str, **options: Any) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.table = torch.full((6, 50), float(self.rank))
        self.step = 0
        saver = SyncCheckpointSaverConfig if how == "sync" else AsyncCheckpointSaverConfig
        self.manager = CheckpointManager(
            CheckpointManager.Config(
                items={"table": ItemSpec(requires_copy=True)},
                save=saver(),
                **in_memory(root, **options),
            )
        )

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "table": self.table,
            "step": self.step,
        }

    def load(self, name: str) -> None:
        """Go on from a checkpoint."""
        self.train(0)  # so that the optimizer has a state to load into
        loaded = self.manager.load(name, into=self.state())
        self.step = loaded["step"]
        self.optimizer.load_state_dict(loaded["optimizer"])

    def train(self, step: int) -> None:
        """Make one step; what it learns from follows from its number."""
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 32, generator=generator)
        self.optimizer.zero_grad()
        (self.model(x) - x.flip(1)).square().mean().backward()
        with self.manager.lock():  # until the last save has its copy
            self.optimizer.step()
        self.table.add_(step)
        self.step = step

    def digest(self) -> str:
        """A hash of what this rank has."""
        hashed = hashlib.sha256(str(self.step).encode())
        for tensor in [*self.model.state_dict().values(), self.table, *self._moments()]:
            hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    def _moments(self) -> list[torch.Tensor]:
        return [
            state[name].reshape(-1)
            for state in self.optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq", "step")
        ]


def main() -> None:
    """Train; save every third step."""
    root, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    training = Training(root, how)
    with MemoryStorageReader(root) as reader:
        found = reader.recoverable()
    if found:
        training.load(found[0])
        print(f"rank {training.rank} goes on from {training.step}", flush=True)
    written = None
    for step in range(training.step + 1, steps + 1):
        training.train(step)
        if step % 3 == 0:
            written = training.manager.save(f"step-{step}", training.state())
            if written is not None and "WAIT" in os.environ:
                written.result()
    print(f"rank {training.rank} ends with {training.digest()}", flush=True)
    training.manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
