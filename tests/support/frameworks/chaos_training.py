"""A training for `ckpt-chaos`, which kills it at each file that it makes, and starts it again.

    python -m tests.support.frameworks.chaos_training TRAINING SAVER DIRECTORY

TRAINING is loop, trainer (Hugging Face's) or lightning; SAVER is dcp_mem, own (torch.save, or the
framework's own checkpoints), or dcp.save (loop only). It prints the step that it goes on from, and
the weights' digest is in `final.txt` at the end. Each save that has returned is noted beside
DIRECTORY: a training that goes on from an older step fails, as work was lost.
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


def _begin(out: Path, step: int) -> None:
    """Say from where training goes on; end it where that is before a save that had returned."""
    print(f"resumed from step {step}", flush=True)
    notes = out.with_name("saved.txt")
    saved = max(map(int, notes.read_text().split()), default=0) if notes.exists() else 0
    if step < saved:
        raise SystemExit(f"lost work: step {saved} was saved")


def _note(out: Path, step: int) -> None:
    with out.with_name("saved.txt").open("a") as notes:
        notes.write(f"{step}\n")


def _loop(saver: str, out: Path) -> torch.nn.Module:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    begin, save, close = _SAVERS[saver](model, optimizer, out)
    _begin(out, begin)
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        model(_batches()[step]).square().mean().backward()
        optimizer.step()
        if (step + 1) % _EACH == 0:
            save(step + 1)
            _note(out, step + 1)
    close()
    return model


def _trainer(saver: str, out: Path) -> torch.nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _begin(out, state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _note(out, state.global_step)

    arguments = TrainingArguments(
        str(out / "trainer"),
        max_steps=STEPS,
        save_steps=_EACH,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    data: Any = [{"x": row} for row in torch.cat(_batches())]
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[Notes()])
    newest: Any = get_last_checkpoint
    resume = newest(arguments.output_dir) if (out / "trainer").exists() else None
    if saver == "dcp_mem":
        from dcp_mem.integrations.huggingface import TrainerCheckpoints

        TrainerCheckpoints(trainer, out / "storage", memory_root=out / "memory")
        resume = True
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.model is not None
    return trainer.model


def _lightning(saver: str, out: Path) -> torch.nn.Module:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_mem.integrations.lightning import MemoryCheckpoint, MemoryCheckpointIO
    from tests.support.frameworks.lightning_job import Model, trainer

    class Notes(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            _begin(out, trainer.global_step)

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.global_step:  # the epoch before was saved as it ended
                _note(out, trainer.global_step)

    plugin: Any = TorchCheckpointIO()
    checkpoint = ModelCheckpoint(out / "own", save_top_k=-1, save_last=True)
    if saver == "dcp_mem":
        plugin = MemoryCheckpointIO(out / "storage", memory_root=out / "memory")
        checkpoint = MemoryCheckpoint(every_n_epochs=1)
    model = Model()
    trainer(plugin, checkpoint, Notes(), default_root_dir=out).fit(model, ckpt_path="last")
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


_TRAININGS = {"loop": _loop, "trainer": _trainer, "lightning": _lightning}


def _main(training: str, saver: str, directory: str) -> None:
    torch.set_num_threads(1)
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    model = _TRAININGS[training](saver, out)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (out / "final.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    _main(*sys.argv[1:])
