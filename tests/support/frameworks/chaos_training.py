"""A training for `ckpt-chaos`, which kills it at each file that it makes, and starts it again.

    python -m tests.support.frameworks.chaos_training FRAMEWORK SAVER DIRECTORY

FRAMEWORK is loop, huggingface or lightning; SAVER is dcp_mem, or what the framework has itself: own
(of the loop: torch.save), or dcp.save of a loop. Each second step is saved. It prints the step that
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


def _huggingface(saver: str, out: Path) -> torch.nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dcp_mem.integrations.huggingface import TrainerCheckpoints

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Says(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            print(f"resumed from step {state.global_step}", flush=True)

    arguments = TrainingArguments(
        str(out / "trainer"),
        max_steps=STEPS,
        save_steps=_EACH,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    rows: Any = [{"x": row} for row in torch.cat(_batches())]
    model = Model()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Says()])
    if saver == "dcp_mem":
        TrainerCheckpoints(trainer, out / "storage", memory_root=out / "memory")
    is_there = saver == "dcp_mem" or any((out / "trainer").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=is_there)
    return model


def _lightning(saver: str, out: Path) -> torch.nn.Module:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcp_mem.integrations.lightning import MemoryCheckpoint, MemoryCheckpointIO

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def on_train_start(self) -> None:
            print(f"resumed from step {self.trainer.global_step}", flush=True)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    if saver == "dcp_mem":
        plugins: list[Any] = [MemoryCheckpointIO(out / "storage", memory_root=out / "memory")]
        callback: Any = MemoryCheckpoint(every_n_train_steps=_EACH)
    else:
        plugins = []
        callback = ModelCheckpoint(out / "own", every_n_train_steps=_EACH, save_last=True)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        plugins=plugins,
        callbacks=[callback],
    )
    model = Model()
    # The same batch at each step: this loader has no state, so a resume begins its epoch again.
    same = torch.cat(_batches()[:1] * STEPS)
    loader: Any = torch.utils.data.DataLoader(same, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(model, loader, ckpt_path="last")
    return model


def _main(framework: str, saver: str, directory: str) -> None:
    torch.set_num_threads(1)
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    model = {"loop": _loop, "huggingface": _huggingface, "lightning": _lightning}[framework](
        saver, out
    )
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (out / "final.txt").write_text(digest.hexdigest())


if __name__ == "__main__":
    _main(*sys.argv[1:])
