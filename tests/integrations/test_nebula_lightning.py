"""Nebula's classes for Lightning: a training that is killed goes on with them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from dcp_mem import CheckpointNotFound, ConfigError
from dcp_mem.integrations import nebula
from dcp_mem.integrations.nebula import run
from tests.support.checkpoints.jobs import committed_in
from tests.support.processes.forks import forked, killed_ranks, raised_by
from tests.support.storage import gated

pytest.importorskip("lightning")

_STEPS = 6
_KILLED_AFTER = 4


def _module(killed_after: int) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            if self.global_step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            # The data follow from the step: this loader doesn't resume where it was.
            generator = torch.Generator().manual_seed(self.global_step)
            loss: torch.Tensor = self.layer(torch.randn(1, 4, generator=generator)).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    torch.manual_seed(3)
    return Module()


def _fit(
    place: str, killed_after: int, resumes: bool, with_nebula: bool = True
) -> tuple[str | None, torch.Tensor]:
    """The path that it went on from, and the weights at the end."""
    from lightning.pytorch import Trainer

    nebula.install()
    import nebulaml  # type: ignore[import-not-found]

    options: dict[str, Any] = {"enable_checkpointing": False}
    if with_nebula:
        nebulaml.init(persistent_storage_path=f"{place}/storage", persistent_time_interval=3600)
        callback = nebulaml.NebulaCallback(
            dirpath=f"{place}/names", every_n_train_steps=1, save_top_k=-1
        )
        options = {"callbacks": [callback], "plugins": [nebulaml.NebulaCheckpointIO()]}
    trainer = Trainer(
        max_steps=_STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = _module(killed_after)
    data = torch.utils.data.DataLoader(TensorDataset(torch.zeros(_STEPS, 1)), batch_size=1)
    path = nebulaml.get_latest_checkpoint_path("checkpoint") if resumes else None
    trainer.fit(module, data, ckpt_path=path, weights_only=False)
    return path, module.layer.weight.detach().clone()


def _resume(place: str) -> tuple[str | None, bool]:
    """The path that it went on from, and whether it ended as an undisturbed run does."""
    path, weights = _fit(place, -1, True)
    return path, torch.equal(weights, _fit(place, -1, False, False)[1])


@pytest.mark.slow
def test_a_lightning_training_that_was_killed_goes_on_from_nebulas_memory(
    memory_root: Path, tmp_path: Path
) -> None:
    env = {"DCP_MEM_ROOT": str(memory_root)}
    killed_ranks(
        _fit,
        None,
        str(tmp_path),
        _KILLED_AFTER,
        False,
        env=env,
        timeout=120,
    )
    newest = f"epoch=0-step={_KILLED_AFTER}.ckpt"
    assert not (tmp_path / "storage" / newest).exists()  # it is in memory alone
    path, is_equal = forked(_resume, str(tmp_path), env=env, timeout=120)
    assert path is not None
    assert path.endswith(f"/{newest}/checkpoint")
    assert not os.path.exists(path)  # it went with the process
    assert is_equal
    # The checkpoint of the end of training is on storage.
    assert (tmp_path / "storage" / f"epoch=0-step={_STEPS}.ckpt" / ".metadata").exists()


def _saves_loads_and_removes(place: str) -> list[Any]:
    root = Path(place)
    nebula.init(root / "storage", persistent_time_interval=3600, num_of_version_in_retention=5)
    plugin = nebula.NebulaCheckpointIO()
    for number in range(3):
        plugin.save_checkpoint({"number": number}, root / "names" / f"n={number}.ckpt")
    plugin.save_checkpoint({"number": 3}, root / "n=3.ckpt", {"is_best": True})
    plugin.save_checkpoint({"number": 4}, root / "n=4.ckpt", {"persist_path": root / "elsewhere"})
    run.current().writer.wait("n=3.ckpt")
    found = [
        plugin.load_checkpoint(root / "anywhere" / "n=2.ckpt"),
        plugin.load_checkpoint(nebula.get_latest_checkpoint_path("checkpoint")),
        nebula.get_checkpoint("n=4.ckpt", root / "elsewhere").load("checkpoint"),
    ]
    plugin.remove_checkpoint(root / "n=3.ckpt")
    plugin.teardown()
    refused = raised_by(lambda: plugin.save_checkpoint({}, root / "n=5.ckpt", {"best": True}))
    return [*found, raised_by(lambda: plugin.load_checkpoint(root / "n=3.ckpt")), refused]


def test_the_plugin_saves_loads_and_removes(memory_root: Path, tmp_path: Path) -> None:
    *found, gone, refused = forked(
        _saves_loads_and_removes, str(tmp_path), env={"DCP_MEM_ROOT": str(memory_root)}
    )
    assert [one["number"] for one in found] == [2, 3, 4]
    assert not (tmp_path / "storage" / "n=3.ckpt" / ".metadata").exists()
    assert isinstance(gone, CheckpointNotFound)
    assert "n=2.ckpt" in str(gone)
    assert isinstance(refused, ConfigError)
    assert "is_best" in str(refused)


def _removes_what_is_durable(place: str) -> list[set[str]]:
    """The checkpoints on storage after the removal, and at the end of training."""
    storage = Path(place, "storage")
    nebula.init(storage, persistent_time_interval=3600)
    plugin = nebula.NebulaCheckpointIO()
    plugin.save_checkpoint({"number": 0}, "n=0.ckpt", {"is_best": True})
    run.current().writer.wait("n=0.ckpt")
    plugin.save_checkpoint({"number": 1}, "n=1.ckpt")
    plugin.remove_checkpoint("n=0.ckpt")
    plugin.save_checkpoint({"number": 2}, "n=2.ckpt")
    plugin.remove_checkpoint("n=1.ckpt")
    run.current().removals.wait_for("n=1.ckpt")
    found = [committed_in(storage)]
    plugin.teardown()
    return [*found, committed_in(storage)]


def test_the_newest_on_storage_stays_until_storage_has_its_successor(
    memory_root: Path, tmp_path: Path
) -> None:
    env = {"DCP_MEM_ROOT": str(memory_root)}
    found = forked(_removes_what_is_durable, str(tmp_path), env=env)
    assert found == [{"n=0.ckpt"}, {"n=2.ckpt"}]


def _removes_what_is_being_flushed() -> list[str]:
    gate = gated.install()
    nebula.init("gated://bucket/run", 0, agent="thread")
    plugin = nebula.NebulaCheckpointIO()
    gate.close()
    plugin.save_checkpoint({"number": 0}, "n=0.ckpt")
    gate.wait_for_arrival()
    plugin.remove_checkpoint("n=0.ckpt")
    plugin.save_checkpoint({"number": 1}, "n=1.ckpt")
    gate.open()
    plugin.teardown()
    run.shut_down()
    return [path for path in gated.files() if path.endswith("/.metadata")]


def test_what_is_removed_while_it_is_flushed_is_gone_in_the_end(memory_root: Path) -> None:
    env = {"DCP_MEM_ROOT": str(memory_root)}
    assert forked(_removes_what_is_being_flushed, env=env) == [
        "gated://bucket/run/n=1.ckpt/.metadata"
    ]


def _tries_again(place: str) -> set[str]:
    storage = Path(place, "storage")
    nebula.init(storage, persistent_time_interval=3600)
    plugin = nebula.NebulaCheckpointIO()
    try:
        raise ValueError("of the first attempt")
    except ValueError:
        for number in range(2):
            plugin.save_checkpoint({"number": number}, f"n={number}.ckpt")
        plugin.teardown()
    return committed_in(storage)


def test_a_second_attempt_where_an_exception_is_handled_is_flushed_at_its_end(
    memory_root: Path, tmp_path: Path
) -> None:
    env = {"DCP_MEM_ROOT": str(memory_root)}
    assert "n=1.ckpt" in forked(_tries_again, str(tmp_path), env=env)
