"""A training for `ckpt-chaos`, which kills it at each file that it makes, and starts it again.

    python -m tests.support.frameworks.chaos_training SAVER DIRECTORY

SAVER is dcp_mem, own (torch.save), or dcp.save. Each second step is saved. It prints the step that
it goes on from, and the weights' digest is in `final.txt` at the end.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

STEPS = 6
_EACH = 2


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def _batches() -> list[torch.Tensor]:
    return list(torch.rand(STEPS, 4, 8, generator=torch.Generator().manual_seed(2)))


def _loop(saver: str, out: Path) -> torch.nn.Module:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    begin, save, close = _SAVERS[saver](model, optimizer, out)
    print(f"resumed from step {begin}", flush=True)
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        model(_batches()[step]).square().mean().backward()
        optimizer.step()
        if (step + 1) % _EACH == 0:
            save(step + 1)
    close()
    return model


def _by_dcp_mem(model: Any, optimizer: Any, out: Path) -> Any:
    from dcp_mem import CheckpointManager, TrainState

    manager = CheckpointManager(out / "storage", memory_root=out / "memory")
    state = {"app": TrainState(model, optimizer)}
    begin = manager.restore(state)
    return begin or 0, lambda step: manager.save(step, state), manager.close


def _by_torch_save(model: Any, optimizer: Any, out: Path) -> Any:
    path, begin = out / "model.pt", 0
    if path.exists():
        found = torch.load(path)
        begin = found["step"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    def save(step: int) -> None:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path)

    return begin, save, lambda: None


def _by_dcp_save(model: Any, optimizer: Any, out: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = sorted(out.glob("step-*"))  # as users do: the last directory is the newest checkpoint
    begin = int(found[-1].name.partition("-")[2]) if found else 0
    if found:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save(step: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=out / f"step-{step}")

    return begin, save, lambda: None


_SAVERS: dict[str, Any] = {"dcp_mem": _by_dcp_mem, "own": _by_torch_save, "dcp.save": _by_dcp_save}


def _main(saver: str, directory: str) -> None:
    torch.set_num_threads(1)
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    model = _loop(saver, out)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (out / "final.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    _main(*sys.argv[1:])
