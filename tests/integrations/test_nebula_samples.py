"""The samples of Microsoft's pages on Nebula, each as a script would have it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_mem.integrations import nebula
from tests.support.checkpoints.jobs import wait_until
from tests.support.processes.forks import forked

_STEPS = 4


def _nebula(name: str) -> Any:
    nebula.install()
    return importlib.import_module(name)


# -- torch alone -----------------------------------------------------------------------------------


def _natively(place: str, name: str, tags: list[str]) -> None:
    nm = _nebula(name)
    persistent_storage_path = (f"{place}/storage",)  # the pages have a comma there
    nm.init(persistent_storage_path, persistent_time_interval=2)

    torch.manual_seed(1)
    models = {}
    for number in range(2):
        checkpoint = nm.Checkpoint(*tags[number : number + 1])
        models[checkpoint] = torch.nn.Linear(3, 3)
        checkpoint.save("model", models[checkpoint])
    model = models[checkpoint]

    latest_ckpt = nm.get_latest_checkpoint()
    assert latest_ckpt.tag == checkpoint.tag
    assert torch.equal(latest_ckpt.load("model").weight, model.weight)

    ckpts = nm.list_checkpoints()
    assert [one.tag for one in reversed(models)] == [one["tag"] for one in ckpts]
    json.dumps(ckpts, sort_keys=True)
    latest_ckpt_path = nm.get_latest_checkpoint_path("model", persistent_storage_path[0])
    assert torch.equal(torch.load(latest_ckpt_path, weights_only=False).weight, model.weight)


@pytest.mark.parametrize(
    ("name", "tags"), [("nebulaml", ["global_step500", "global_step1000"]), ("torch_nebula", [])]
)
def test_a_script_for_torch_alone(
    memory_root: Path, tmp_path: Path, name: str, tags: list[str]
) -> None:
    env = {"DCP_MEM_ROOT": str(memory_root), "AZUREML_CR_EXECUTION_WORKING_DIR_PATH": str(tmp_path)}
    forked(_natively, str(tmp_path), name, tags, env=env)
    # Azure ML shows what lies in a job's `outputs`, this among its folders.
    for place in (tmp_path / "storage", tmp_path / "outputs" / "nebula"):
        wait_until((place / "checkpointHistories.csv").exists)


# -- DeepSpeed: test_deepspeed.py trains with the same section -------------------------------------


def _section(place: str) -> dict[str, Any]:
    return {
        "enabled": True,
        "persistent_storage_path": f"{place}/storage",
        "persistent_time_interval": 100,
        "num_of_version_in_retention": 2,
        "enable_nebula_load": True,
    }


def _strategies(package: str, place: str) -> list[Any]:
    """What the strategy has taken from DeepSpeed's config, and what it has left there."""
    lightning = importlib.import_module(package)
    nm = _nebula("nebulaml")
    config = {"zero_optimization": {"stage": 2}, "nebula": _section(place)}
    Path(place, "ds_config.json").write_text(json.dumps(config))
    found = []
    for given in (config, f"{place}/ds_config.json"):
        strategy = nm.NebulaDeepspeedStrategy(config=given)
        assert isinstance(strategy, lightning.strategies.DeepSpeedStrategy)
        found.append((strategy._nebula, strategy._uses_memory, sorted(strategy.config)))
    off = {**config, "nebula": {**_section(place), "enabled": False}}
    found.append(nm.NebulaDeepspeedStrategy(config=off)._uses_memory)
    own = nm.NebulaDeepspeedStrategy(config=config, persistent_time_interval=7)
    found.append(own._nebula["persistent_time_interval"])
    assert "nebula" in config
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.variant)]
)
def test_lightnings_strategy_takes_the_section_of_deepspeeds_config(
    tmp_path: Path, package: str
) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip(package)
    *both, is_off, interval = forked(
        _strategies, package, str(tmp_path), env={"DS_ACCELERATOR": "cpu"}, timeout=120
    )
    names = ("persistent_storage_path", "persistent_time_interval", "num_of_version_in_retention")
    section = {name: _section(str(tmp_path))[name] for name in names}
    assert both == [(section, True, ["zero_optimization"])] * 2
    assert (is_off, interval) == (False, 7)


# -- Lightning -------------------------------------------------------------------------------------


def _module_class(pl: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module


def _trainer(pl: Any, steps: int, **options: Any) -> Any:
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _data() -> Any:
    data = torch.utils.data.TensorDataset(torch.ones(2 * _STEPS, 4))
    return torch.utils.data.DataLoader(data, batch_size=1)


def _with_callback(package: str, place: str) -> None:
    """The callback in the place of ModelCheckpoint; it calls `init`."""
    pl = importlib.import_module(package)
    nm = _nebula("nebulaml")
    config_params = {"persistent_storage_path": f"{place}/storage"}
    config_params |= {"persistent_time_interval": 10}  # type: ignore[dict-item]
    nebula_checkpoint_callback = nm.NebulaCallback(
        dirpath=f"{place}/names",
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=-1,
        config_params=config_params,
    )
    assert isinstance(nebula_checkpoint_callback, pl.callbacks.ModelCheckpoint)
    trainer = _trainer(
        pl,
        _STEPS,
        default_root_dir=place,
        plugins=[nm.NebulaCheckpointIO()],
        callbacks=[nebula_checkpoint_callback],
    )
    model = _module_class(pl)()
    trainer.fit(model, _data())
    assert nm.get_latest_checkpoint().tag == f"step={_STEPS}.ckpt"
    assert Path(place, "storage", f"step={_STEPS}.ckpt", ".metadata").exists()

    again = _trainer(
        pl,
        2 * _STEPS,
        default_root_dir=place,
        plugins=[nm.NebulaCheckpointIO()],
        callbacks=[nebula_checkpoint_callback],
    )
    again.fit(_module_class(pl)(), _data(), ckpt_path=f"{place}/names/step=2.ckpt")
    assert again.fit_loop.epoch_loop.batch_progress.total.completed == 2 * _STEPS


def _by_hand(package: str, place: str) -> None:
    """`init`, the plugin, and `trainer.save_checkpoint` to another root."""
    pl = importlib.import_module(package)
    nm = _nebula("torch_nebula")
    nm.init(persistent_storage_path=f"{place}/storage")
    persist_path = f"{place}/tier3/checkpoint"
    trainer = _trainer(pl, _STEPS, plugins=[nm.NebulaCheckpointIO()], enable_checkpointing=False)
    model = _module_class(pl)()
    trainer.fit(model, _data())
    storage_options = {"is_best": True, "persist_path": persist_path}
    trainer.save_checkpoint("example.ckpt", storage_options=storage_options)

    latest_ckpt_path = nm.get_latest_checkpoint_path("checkpoint", persist_path)
    loaded = type(model).load_from_checkpoint(latest_ckpt_path)
    assert torch.equal(loaded.layer.weight, model.layer.weight)

    for path in ("example.ckpt", f"{persist_path}/example.ckpt", latest_ckpt_path):
        assert _steps_taken(pl, nm, path) == 1
    nm._shutdown()
    assert not Path(latest_ckpt_path).exists()


def _elsewhere(package: str, place: str) -> None:
    """A later process, by the path under the other root."""
    pl = importlib.import_module(package)
    nm = _nebula("torch_nebula")
    nm.init(persistent_storage_path=f"{place}/storage")
    assert _steps_taken(pl, nm, f"{place}/tier3/checkpoint/example.ckpt") == 1


def _steps_taken(pl: Any, nm: Any, path: str) -> int:
    """How many steps are left of one more than those that the checkpoint has."""
    steps = []
    counting = pl.callbacks.LambdaCallback(
        on_train_batch_start=lambda *args: steps.append(args[-1])
    )
    trainer = _trainer(
        pl,
        _STEPS + 1,
        plugins=[nm.NebulaCheckpointIO()],
        callbacks=[counting],
        enable_checkpointing=False,
    )
    trainer.fit(_module_class(pl)(), _data(), ckpt_path=path)
    return len(steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "scripts"),
    [
        pytest.param("lightning.pytorch", [_with_callback], marks=pytest.mark.variant),
        ("lightning.pytorch", [_by_hand, _elsewhere]),
        ("pytorch_lightning", [_with_callback]),
        pytest.param("pytorch_lightning", [_by_hand, _elsewhere], marks=pytest.mark.variant),
    ],
    ids=["lightning, callback", "lightning, by hand", "old name, callback", "old name, by hand"],
)
def test_a_script_for_lightning(
    memory_root: Path, tmp_path: Path, package: str, scripts: list[Any]
) -> None:
    pytest.importorskip(package)
    for script in scripts:
        env = {"DCP_MEM_ROOT": str(memory_root)}
        forked(script, package, str(tmp_path), env=env, timeout=120)
