"""A training under torchft: replicas that may be killed, and heal from each other."""

from __future__ import annotations

import hashlib
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_mem.integrations.torchft import MemoryCheckpointTransport, pulling

TIMEOUT = timedelta(seconds=20)
_LAST = "last"


class Notes:
    """What a life of a replica notes, a line for each step that it has committed."""

    def __init__(self, directory: Path, replica: int, life: int) -> None:
        self._path = directory / f"{replica}-{life}"

    def add(self, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def all(self) -> list[dict[str, Any]]:
        """Return the notes by now, without a line that a kill has cut."""
        if not self._path.exists():
            return []
        return [
            json.loads(line)
            for line in self._path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]


class _Counting(MemoryCheckpointTransport[dict[str, Any]]):
    """Counts what it has sent and received."""

    sent = received = 0

    def send_checkpoint(self, *args: Any, **named: Any) -> None:
        super().send_checkpoint(*args, **named)
        self.sent += 1

    def recv_checkpoint(self, *args: Any, **named: Any) -> dict[str, Any]:
        state = super().recv_checkpoint(*args, **named)
        self.received += 1
        return state


def digest_of(model: torch.nn.Module) -> str:
    """Return a hash of all parameters, to the bit."""
    return hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    ).hexdigest()


def train(
    lighthouse: str,
    directory: str,
    memory_root: str,
    replica: int,
    life: int,
    is_near: bool,
    async_quorum: bool,
) -> None:
    """Train one replica until its manager has committed the last step, once that is known."""
    import torchft
    from torchft.process_group import ProcessGroupGloo

    torch.set_num_threads(1)
    if not is_near:  # as if the others were on other machines
        pulling._opened = lambda offer: None
    notes = Notes(Path(directory), replica, life)
    # Every life begins with other values: what is equal at the end has come by healing.
    torch.manual_seed(100 * replica + life)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport = _Counting(memory_root=memory_root)
    manager = torchft.Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: _load(state, model, inner),
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=async_quorum,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        checkpoint_transport=transport,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    try:
        while not _is_over(Path(directory), manager.current_step()):
            generator = torch.Generator().manual_seed(1000 * replica + manager.current_step())
            optimizer.zero_grad()
            wrapped(torch.randn(8, 64, generator=generator)).square().mean().backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() != before:
                notes.add(
                    step=manager.current_step(),
                    digest=digest_of(model),
                    participants=manager.num_participants(),
                    sent=transport.sent,
                    received=transport.received,
                )
            time.sleep(0.05)
    finally:
        manager.shutdown(wait=False)


def end_at(directory: Path, step: int) -> None:
    """Have all replicas end after this step."""
    (directory / "last.part").write_text(str(step))
    (directory / "last.part").rename(directory / _LAST)


def _is_over(directory: Path, step: int) -> bool:
    last = directory / _LAST
    return last.exists() and step >= int(last.read_text())


def _load(state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
