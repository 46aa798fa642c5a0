"""Lightning's Trainer over dcp_mem: what it saves, loads and removes, and how it resumes."""

import json
import os
import pickle
import signal
from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import dcp_mem
from dcp_mem import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointStatus,
    ConfigError,
    FlushFailed,
    MemoryStorageReader,
    every_n_saves,
)
from dcp_mem.integrations.lightning import (
    NEWEST,
    MemoryCheckpoint,
    MemoryCheckpointIO,
    MemoryFSDPStrategy,
    MemoryModelParallelStrategy,
)
from dcp_mem.integrations.lightning.paths import name_of
from tests.support.checkpoints.jobs import committed_in
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.frameworks.lightning_job import (
    BATCHES,
    EPOCHS,
    STRATEGIES,
    Model,
    assert_same,
    trainer,
)
from tests.support.nodes.cluster import Cluster
from tests.support.processes.forks import forked, forked_ranks, forking, in_process, raised_by
from tests.support.processes.launch import run_torchrun
from tests.support.storage import gated

_SECONDS = 150


# -- the plugin alone ------------------------------------------------------------------------------


def _listed(plugin: MemoryCheckpointIO) -> list[CheckpointStatus]:
    settings = plugin.settings
    return CheckpointManager(
        settings.url, memory_root=settings.memory_root, job=settings.job
    ).list()


def _steps(plugin: MemoryCheckpointIO) -> list[int | None]:
    return [one.step for one in _listed(plugin)]


def _checkpoint(step: int) -> dict[str, Any]:
    """As Lightning makes them, with what state dicts may hold besides."""
    first = nn.Linear(2, 3)
    nn.init.constant_(first.weight, step)
    model = nn.Sequential(first, nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).square().sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "global_step": step,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"sizes": (1, 2), "empty": {}, 3: None},
        "callbacks": {
            "EMA": {
                "a.b": torch.ones(2),
                "a": {"b": torch.zeros(2)},
                1: torch.ones(1),
                "1": torch.zeros(1),
            }
        },
        "lightning": {"tensor": torch.ones(1)},
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "sparse": torch.eye(2).to_sparse(),
    }


def test_what_is_saved_comes_back_as_it_was(memory_root: Path) -> None:
    saved = _checkpoint(7)
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    plugin.save_checkpoint(saved, "some.ckpt")
    loaded = plugin.load_checkpoint("some.ckpt")
    assert_same(loaded, saved)
    assert loaded["callbacks"]["EMA"].keys() == {"a.b", "a", 1, "1"}
    assert_same(loaded["callbacks"]["EMA"], saved["callbacks"]["EMA"])
    assert loaded["state_dict"]._metadata == saved["state_dict"]._metadata
    assert list(loaded["optimizer_states"][0]["state"]) == [0, 1, 2, 3]
    assert plugin.report().source == "memory"
    assert plugin.report().step == 7
    plugin.teardown()


def test_tensors_are_items_of_the_checkpoint(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    plugin.save_checkpoint(_checkpoint(7), "some.ckpt")
    weights = {"state_dict": {"0.weight": torch.zeros(3, 2)}}
    dcp_mem.load(
        weights, storage_reader=MemoryStorageReader(None, memory_root=memory_root, job="job")
    )
    assert (weights["state_dict"]["0.weight"] - 7).abs().max() < 0.1


def test_the_newest_that_is_whole_is_loaded_when_memory_is_gone(
    memory_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    plugin = MemoryCheckpointIO(root, memory_root=memory_root)
    for step in (1, 2):
        plugin.save_checkpoint(_checkpoint(step), root / f"{step}.ckpt")
    plugin.teardown()
    after = MemoryCheckpointIO(root, memory_root=tmp_path / "none")
    assert after.load_checkpoint(NEWEST)["global_step"] == 2
    assert after.report().source == "storage"
    [segment] = (root / "2.ckpt").glob("*.distcp")
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    assert after.load_checkpoint(NEWEST)["global_step"] == 1
    with pytest.raises(dcp_mem.DcpMemError, match=r"2\.ckpt"):
        after.load_checkpoint(root / "2.ckpt")
    [segment] = (root / "1.ckpt").glob("*.distcp")
    segment.unlink()
    with pytest.raises(dcp_mem.NoRecoverableCheckpoint):
        after.load_checkpoint(NEWEST)


def test_a_job_without_checkpoints_has_nothing_to_restore(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    assert not plugin.load_checkpoint(NEWEST)
    with pytest.raises(dcp_mem.CheckpointNotFound):
        plugin.load_checkpoint("last.ckpt")


def test_weights_alone_are_not_what_training_goes_on_from(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    # The optimizer state is that of SGD, without tensors.
    plugin.save_checkpoint({**_checkpoint(1), "optimizer_states": [{"state": {}}]}, "whole.ckpt")
    alone = _checkpoint(2)
    del alone["optimizer_states"]
    plugin.save_checkpoint(alone, "weights.ckpt")
    assert plugin.load_checkpoint(NEWEST)["global_step"] == 1
    assert plugin.load_checkpoint("weights.ckpt")["global_step"] == 2


def test_objects_of_other_kinds_are_loaded_only_where_that_is_said(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    plugin.save_checkpoint(
        {**_checkpoint(1), "hyper_parameters": {"odd": Namespace(a=1)}}, "odd.ckpt"
    )
    with pytest.raises(dcp_mem.UntrustedObject):
        plugin.load_checkpoint("odd.ckpt")
    assert plugin.load_checkpoint("odd.ckpt", weights_only=False)["hyper_parameters"] == {
        "odd": Namespace(a=1)
    }
    trusting = MemoryCheckpointIO(None, memory_root=memory_root, job="job", weights_only=False)
    assert trusting.load_checkpoint(NEWEST)["hyper_parameters"] == {"odd": Namespace(a=1)}


def test_what_is_removed_leaves_memory_and_storage_once_it_can(
    memory_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    plugin = MemoryCheckpointIO(root, memory_root=memory_root, keep_memory=3, upload_limit="4MiB")
    for step in (1, 2):  # each takes half a second to be flushed
        large = {**_checkpoint(step), "state_dict": {"weight": torch.ones(1 << 19)}}
        plugin.save_checkpoint(large, root / f"{step}.ckpt")
    plugin.remove_checkpoint(root / "1.ckpt")  # on its way to storage, if not there
    plugin.save_checkpoint(_checkpoint(3), root / "1.ckpt")  # another one of the same name
    plugin.remove_checkpoint(root / "2.ckpt")
    plugin.teardown()
    assert _steps(plugin) == [3]
    assert (
        MemoryCheckpointIO(root, memory_root=tmp_path / "none").load_checkpoint(root / "1.ckpt")[
            "global_step"
        ]
        == 3
    )
    assert sorted(path.name for path in root.glob("[!.]*") if path.is_dir()) == ["1.ckpt"]


def test_the_newest_on_storage_is_removed_once_storage_has_a_newer_one(
    memory_root: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    plugin = MemoryCheckpointIO(root, memory_root=memory_root, persist=every_n_saves(2))
    for step, durable in ((1, True), (2, False), (3, True)):
        plugin.save_checkpoint(_checkpoint(step), root / f"{step}.ckpt")
        if durable:
            plugin.writer.wait(f"{step}.ckpt", timeout=60)
        plugin.remove_checkpoint(root / f"{step - 1}.ckpt")
        plugin._removals._under_way[f"{step - 1}.ckpt"].result(60)
        expected = "1.ckpt" if step < 3 else "3.ckpt"
        assert committed_in(root) == {expected}
    plugin.teardown()


@in_process
def test_the_newest_on_storage_stays_where_its_successor_cannot_be_flushed(
    memory_root: Path,
) -> None:
    memory = str(memory_root)
    gate = gated.install()
    root = "gated://bucket/run"
    plugin = MemoryCheckpointIO(root, memory_root=memory, persist=every_n_saves(10), agent="thread")
    plugin.save_checkpoint(_checkpoint(1), f"{root}/1.ckpt")
    plugin.writer.wait("1.ckpt", timeout=60)
    plugin.save_checkpoint(_checkpoint(2), f"{root}/2.ckpt")
    plugin.remove_checkpoint(f"{root}/1.ckpt")
    gate.failure = PermissionError("not yours")
    with pytest.raises(FlushFailed):
        plugin.teardown()
    assert [path for path in gated.files() if path.endswith("/.metadata")] == [
        "gated://bucket/run/1.ckpt/.metadata"
    ]


def test_what_a_skipped_save_was_to_replace_stays_until_one_succeeds(
    memory_root: Path, tmp_path: Path
) -> None:
    names = tmp_path / "names"
    plugin = MemoryCheckpointIO(
        None, memory_root=memory_root, job="job", on_full="skip", memory_limit="16MiB"
    )
    plugin.save_checkpoint(_checkpoint(1), names / "1.ckpt")
    too_large = {**_checkpoint(2), "state_dict": {"weight": torch.ones(8 << 20)}}
    plugin.save_checkpoint(too_large, names / "2.ckpt")
    plugin.remove_checkpoint(names / "1.ckpt")
    assert plugin.load_checkpoint(NEWEST)["global_step"] == 1
    assert os.listdir(names) == ["1.ckpt"]  # by which Lightning finds it
    plugin.save_checkpoint(_checkpoint(3), names / "3.ckpt")
    plugin.teardown()
    assert _steps(plugin) == [3]
    assert os.listdir(names) == ["3.ckpt"]


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_second_attempt_where_the_first_ones_exception_is_handled_ends_as_any(
    memory_root: Path, tmp_path: Path, breaks_off: bool
) -> None:
    root = tmp_path / "run"
    plugin = MemoryCheckpointIO(root, memory_root=memory_root)
    with suppress(ValueError):
        try:
            raise ValueError("of the first attempt")
        finally:
            plugin.save_checkpoint(_checkpoint(1), root / "1.ckpt")
            plugin.writer.wait("1.ckpt", timeout=60)
            plugin.remove_checkpoint(root / "1.ckpt")
            try:
                _fail(breaks_off)
            finally:
                plugin.teardown()
    # A training that was broken off leaves the newest.
    assert (root / "1.ckpt" / ".metadata").exists() is breaks_off


def _fail(fails: bool) -> None:
    if fails:
        raise ValueError("of the second attempt")


def test_strategies_that_spawn_their_processes_can_send_the_plugin_there(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    plugin.save_checkpoint(_checkpoint(1), "1.ckpt")
    plugin.remove_checkpoint("0.ckpt")
    assert pickle.loads(pickle.dumps(plugin)).load_checkpoint(NEWEST)["global_step"] == 1
    plugin.teardown()


def test_temporary_files_of_lightnings_stay_files(memory_root: Path, tmp_path: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    plugin.save_checkpoint({"a": 1}, tmp_path / ".temp.ckpt")
    assert (
        torch.load(tmp_path / ".temp.ckpt")
        == plugin.load_checkpoint(tmp_path / ".temp.ckpt")
        == {"a": 1}
    )
    plugin.remove_checkpoint(tmp_path / ".temp.ckpt")
    assert not (tmp_path / ".temp.ckpt").exists()


def test_a_file_of_lightnings_is_loaded_until_something_is_saved_to_its_path(
    memory_root: Path, tmp_path: Path
) -> None:
    saved, file = _checkpoint(1), tmp_path / "last.ckpt"
    torch.save(saved, file)
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    assert_same(plugin.load_checkpoint(file), saved)
    plugin.save_checkpoint(_checkpoint(2), file)
    assert plugin.load_checkpoint(file)["global_step"] == 2
    plugin.teardown()


def test_a_file_that_could_run_code_is_loaded_only_where_that_is_said(
    memory_root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "odd.ckpt"
    torch.save({"path": Path("here")}, file)
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(file)
    assert plugin.load_checkpoint(file, weights_only=False) == {"path": Path("here")}


@pytest.mark.parametrize(
    ("path", "root", "name"),
    [
        ("epoch=0-step=10.ckpt", "/r", "epoch=0-step=10.ckpt"),
        ("/r/epoch=0-step=10.ckpt", "/r", "epoch=0-step=10.ckpt"),
        ("/r/a b/loss=0.1.ckpt", "/r", "a%20b%2Floss=0.1.ckpt"),
        ("/r/100%/-1.ckpt", "/r", "100%25%2F-1.ckpt"),
        ("/r/-1.ckpt", "/r", "%2D1.ckpt"),
        ("s3://b/r/val/x.ckpt", "s3://b/r", "val%2Fx.ckpt"),
        ("dcp-mem://job/r-1234/val/x.ckpt", "/r", "val%2Fx.ckpt"),
        ("/elsewhere/x.ckpt", "/r", "x.ckpt@b660bf8d"),
        ("/elsewhere/x.ckpt", None, "x.ckpt@b660bf8d"),
    ],
)
def test_a_checkpoint_is_named_by_its_path(
    path: str, root: str | None, name: str, memory_root: Path
) -> None:
    assert name_of(path, root) == name
    reader = MemoryStorageReader(None, job="job", memory_root=memory_root)
    error = raised_by(lambda: dcp_mem.load({"x": 0}, checkpoint_id=name, storage_reader=reader))
    assert isinstance(error, CheckpointNotFound)  # and no ConfigError: the name is one


def test_files_of_one_name_from_two_directories_are_two_checkpoints() -> None:
    assert name_of("/a/last.ckpt", "/r") != name_of("/b/last.ckpt", "/r")


def test_arguments_that_cannot_work(memory_root: Path) -> None:
    plugin = MemoryCheckpointIO(None, memory_root=memory_root, job="job")
    with pytest.raises(ConfigError, match="storage_options"):
        plugin.save_checkpoint({}, "a.ckpt", storage_options={})
    with pytest.raises(ConfigError, match="map_location"):
        plugin.load_checkpoint("a.ckpt", map_location=lambda storage, place: storage)
    with pytest.raises(ConfigError, match="state_dict_type"):
        MemoryFSDPStrategy(state_dict_type="full")
    with pytest.raises(ConfigError, match="save_distributed_checkpoint"):
        MemoryModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(ConfigError, match="link"):
        MemoryCheckpoint(save_last="link")
    with pytest.raises(ConfigError, match="keep"):
        MemoryCheckpointIO(None, memory_root=memory_root, job="job", keep_memory=0)


# -- trainers in one process -----------------------------------------------------------------------


@pytest.mark.slow
@in_process
def test_lightnings_own_callback_keeps_what_it_is_told_to(
    memory_root: Path, tmp_path: Path
) -> None:
    """Train with Lightning's own ModelCheckpoint; resume, and validate the best weights."""
    root = str(tmp_path / "run")
    memory = str(memory_root)

    def checkpoints() -> ModelCheckpoint:
        return ModelCheckpoint(
            root, "{epoch}", monitor="loss", mode="max", save_top_k=2, save_last=True
        )

    plugin = MemoryCheckpointIO(root, memory_root=memory, keep_memory=2)
    trainer(plugin, checkpoints()).fit(Model(), ckpt_path="last")
    there = {one.name: one.places for one in _listed(plugin)}
    assert {name for name, places in there.items() if "storage" in places} == {
        "epoch=0.ckpt",
        "epoch=1.ckpt",
        "last.ckpt",
    }
    assert sorted(os.listdir(root)) == sorted([*there, ".dcp_mem"])

    last = plugin.load_checkpoint(os.path.join(root, "last.ckpt"))
    callback = checkpoints()
    again = trainer(MemoryCheckpointIO(root, memory_root=memory), callback, max_epochs=EPOCHS + 1)
    model = Model()
    again.fit(model, ckpt_path="last")
    assert model.first == last["global_step"] > BATCHES
    assert again.global_step == (EPOCHS + 1) * BATCHES
    assert callback.best_model_path == os.path.join(root, "epoch=0.ckpt")
    best = trainer(MemoryCheckpointIO(root, memory_root=f"{memory}/none"))
    best.validate(Model(), DataLoader(torch.ones(2, 8)), ckpt_path=callback.best_model_path)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [pytest.param(False, marks=pytest.mark.variant), True])
@in_process
def test_training_goes_on_from_a_file_that_lightning_wrote(
    memory_root: Path, tmp_path: Path, shards: bool
) -> None:
    """Train with Lightning alone, and go on from its file with the plugin."""
    root = str(tmp_path)
    memory = str(memory_root)
    stock = trainer(TorchCheckpointIO(), ModelCheckpoint(f"{root}/names", "{epoch}"), max_epochs=1)
    stock.fit(Model())
    strategy: Any = "auto"
    if shards:
        strategy = MemoryModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    plugin = MemoryCheckpointIO(f"{root}/run", memory_root=memory)
    again, model = trainer(plugin, MemoryCheckpoint(), strategy=strategy), Model(sharded=shards)
    again.fit(model, ckpt_path=f"{root}/names/epoch=0.ckpt")
    assert model.first == BATCHES
    assert again.global_step == EPOCHS * BATCHES


@pytest.mark.slow
@in_process
def test_a_signal_has_the_newest_flushed(memory_root: Path, tmp_path: Path) -> None:
    """Train with our callback: loggers get its figures, checkpoints the metrics.

    After a signal the newest checkpoint is flushed before Lightning ends.
    """
    root = str(tmp_path / "run")
    memory = str(memory_root)
    logger = CSVLogger(f"{root}-logs", name="", version="")
    plugin = MemoryCheckpointIO(root, memory_root=memory, persist=False)
    callback = MemoryCheckpoint(preemption="SIGTERM")
    with pytest.raises(SystemExit):  # Lightning's end of a training that was told to end
        trainer(plugin, callback, logger=logger).fit(
            Model(killed_at=BATCHES + 1, signal_number=signal.SIGTERM), ckpt_path="last"
        )
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    [newest] = CheckpointManager(root, memory_root=f"{memory}/none").list()
    assert newest.name == f"epoch=0-step={BATCHES}.ckpt"
    assert newest.step == BATCHES
    assert newest.metrics.keys() == {"loss", "loss_step", "loss_epoch"}
    logged = Path(logger.log_dir, "metrics.csv").read_text().split("\n")[0].split(",")
    assert {"checkpoint/seconds", "checkpoint/bytes"} <= set(logged)
    resumed = Model()
    trainer(MemoryCheckpointIO(root, memory_root=f"{memory}/none"), MemoryCheckpoint()).fit(
        resumed, ckpt_path="last"
    )
    assert resumed.first == BATCHES


@in_process
def test_the_callback_says_that_it_needs_the_plugin(tmp_path: Path) -> None:
    root = str(tmp_path)
    trainer_without = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=[MemoryCheckpoint(root)]
    )
    with pytest.raises(ConfigError, match="plugins="):
        trainer_without.fit(Model(), ckpt_path="last")


# -- names that are taken --------------------------------------------------------------------------


class _Scored(Model):
    """Logs the scores of a list, one at each validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", next(self.scores))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(2, 8))  # type: ignore[arg-type]


_SCORES = [0.1, 0.3, 0.2, 0.15]


def _kept(
    kind: type[ModelCheckpoint], plugin: CheckpointIO, root: str, **options: Any
) -> dict[str, tuple[float, int]]:
    """By name, the score that the callback knows of a checkpoint, and the step that lies there."""
    callback = kind(
        root or None, "best", monitor="score", save_top_k=2, enable_version_counter=True
    )
    chosen = {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0, **options}
    trainer(plugin, callback, **chosen).fit(_Scored(_SCORES))
    return {
        os.path.basename(path): (
            round(float(score), 2),
            plugin.load_checkpoint(path, weights_only=False)["global_step"],
        )
        for path, score in callback.best_k_models.items()
    }


@in_process
def test_a_name_that_is_taken_gets_a_version_as_with_stock(
    memory_root: Path, tmp_path: Path
) -> None:
    root = str(tmp_path)
    memory = str(memory_root)
    twice_an_epoch = {"val_check_interval": 2, "limit_train_batches": 4, "max_epochs": 2}
    runs: list[dict[str, Any]] = [{}, {"max_epochs": 1}, twice_an_epoch]
    ours, stock = [], []
    for run in runs:  # all in the same directory
        plugin = MemoryCheckpointIO(None, memory_root=memory, job="job", keep_memory=8)
        ours.append(_kept(MemoryCheckpoint, plugin, f"{root}/ours", **run))
        stock.append(_kept(ModelCheckpoint, TorchCheckpointIO(), f"{root}/stock", **run))
    assert ours == stock
    assert ours[0] == {"best.ckpt": (0.1, BATCHES), "best-v1.ckpt": (0.2, 3 * BATCHES)}
    assert len({name for run in ours for name in run}) == 5


@in_process
def test_a_name_that_storage_alone_has_is_taken(memory_root: Path, tmp_path: Path) -> None:
    root = str(tmp_path)
    memory = str(memory_root)
    names = list[str]()
    for place in ("one", "two"):  # the second run's node has nothing in memory
        plugin = MemoryCheckpointIO(root, memory_root=f"{memory}/{place}")
        names += _kept(MemoryCheckpoint, plugin, "", max_epochs=1, limit_train_batches=1)
    assert names == ["best.ckpt", "best-v1.ckpt"]


def _names_on_ranks(root: str, memory: str) -> list[list[str]]:
    rank = os.environ["FORK_RANK"]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = []
    for kind in ("ddp", "memory_ddp"):
        for _ in range(2):
            plugin = MemoryCheckpointIO(None, memory_root=memory, job=kind, keep_memory=4)
            strategy = STRATEGIES[kind]()
            kept = _kept(MemoryCheckpoint, plugin, root, strategy=strategy, devices=2)
            found.append(sorted(kept))
    return found


def test_all_ranks_give_a_checkpoint_the_same_name(memory_root: Path, tmp_path: Path) -> None:
    first, second = forked_ranks(_names_on_ranks, 2, str(tmp_path), str(memory_root))
    assert first == second
    versions = [["best-v1.ckpt", "best.ckpt"], ["best-v2.ckpt", "best-v3.ckpt"]]
    assert first == versions * 2


def _is_killed_with_links(root: str, memory: str, killed_at: int | None) -> tuple[int, list[str]]:
    """Where the training began, and what links there are at its end."""
    plugin = MemoryCheckpointIO(root, memory_root=memory, persist=killed_at is None)
    model = Model(killed_at)
    trainer(plugin, ModelCheckpoint(root, save_last="link")).fit(model, ckpt_path="last")
    return model.first, [path.name for path in Path(root).iterdir() if path.is_symlink()]


def test_after_a_kill_the_last_checkpoint_is_found_by_its_link(
    memory_root: Path, tmp_path: Path
) -> None:
    run = str(tmp_path / "run"), str(memory_root)
    with (
        forking(_is_killed_with_links, None, *run, 2 * BATCHES + 1) as job,
        pytest.raises(AssertionError, match="SIGKILL"),
    ):
        job.join()
    assert forked(_is_killed_with_links, *run, None) == (2 * BATCHES, ["last.ckpt"])


def test_a_link_is_removed_or_replaced_without_what_it_points_to(
    memory_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    root = tmp_path / "run"
    plugin = MemoryCheckpointIO(root, memory_root=memory_root, persist=False, keep_memory=4)
    plugin.save_checkpoint(_checkpoint(1), root / "1.ckpt")
    for number, directory in enumerate((root, root.resolve())):
        link = directory / f"last-{number}.ckpt"
        link.symlink_to("1.ckpt")
        assert plugin.load_checkpoint(link)["global_step"] == 1
        plugin.remove_checkpoint(link)
        assert not link.is_symlink()
        link.symlink_to("gone.ckpt")
        plugin.save_checkpoint(_checkpoint(2), link)
        assert plugin.load_checkpoint(link)["global_step"] == 2
    assert plugin.load_checkpoint(root / "1.ckpt")["global_step"] == 1
    plugin.teardown()


@in_process
def test_what_lightnings_asynchronous_plugin_wraps_has_flushed_when_fit_returns(
    memory_root: Path, tmp_path: Path
) -> None:
    root = str(tmp_path / "run")
    memory = str(memory_root)
    plugin = MemoryCheckpointIO(root, memory_root=memory)
    around = AsyncCheckpointIO(plugin)
    trainer(around, ModelCheckpoint(root), max_epochs=1).fit(Model())
    names = sorted(committed_in(Path(root)))
    assert names == [f"epoch=0-step={BATCHES}.ckpt"]


# -- what a sharded checkpoint holds is restored or named ------------------------------------------


class _Heads(Model):
    """Two heads, of which one is never used; notes its optimizer at the start and at the end."""

    def __init__(
        self,
        heads: tuple[str, ...] = ("used", "idle"),
        frozen: bool = False,
        lr: Any = 0.01,
        options: dict[str, Any] | None = None,
        is_strict: bool = True,
    ) -> None:
        super().__init__(sharded=True, lr=lr)
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4) for name in heads})
        self.net[0].requires_grad_(not frozen)
        self.options, self.strict_loading = options or {}, is_strict

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.heads["used"](self.net(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams["lr"])
        optimizer.param_groups[0].update(self.options)
        return optimizer

    def on_train_start(self) -> None:
        self.began = self._noted()

    def on_train_end(self) -> None:
        self.ended = self._noted()

    def _noted(self) -> dict[str, Any]:
        [optimizer] = self.trainer.optimizers
        noted = {
            f"{name}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, parameter in self.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        return {**noted, **options}


def _resumed_after(memory: str, job: str, saved: _Heads, fresh: _Heads) -> tuple[Any, Any]:
    """What the optimizer of `saved` had at the end of an epoch, and what `fresh` begins with."""
    for epochs, model in enumerate((saved, fresh), start=1):
        strategy = MemoryModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        plugin = MemoryCheckpointIO(None, memory_root=memory, job=job)
        trainer(
            plugin, MemoryCheckpoint(), strategy=strategy, max_epochs=epochs, limit_train_batches=1
        ).fit(model, ckpt_path="last")
    return saved.ended, fresh.began


_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # as it is saved, and at the resume
    ({"lr": torch.tensor(0.5), "options": {"flavour": "sour"}}, {"options": {"taste": "sweet"}}),
    ({"lr": 0.5}, {"lr": torch.tensor(0.25)}),
    ({"frozen": True, "heads": ("used",)}, {"is_strict": False}),
    ({}, {"frozen": True, "heads": ("used",), "is_strict": False}),
]


@needs_fsdp_on_cpu
@pytest.mark.parametrize("number", range(len(_CASES)))
@in_process
def test_a_sharded_optimizer_gets_all_that_was_saved_of_it(memory_root: Path, number: int) -> None:
    memory = str(memory_root)
    saved, fresh = _CASES[number]
    ended, began = _resumed_after(memory, f"{number}", _Heads(**saved), _Heads(**fresh))
    ended["lr"], began["lr"] = float(ended["lr"]), float(began["lr"])
    assert ended["net.2.bias.exp_avg"].any()
    assert_same({key: began.get(key) for key in ended}, ended)
    assert began.keys() - ended.keys() <= {"taste"}


@needs_fsdp_on_cpu
@in_process
def test_keys_that_a_sharded_model_or_its_checkpoint_lacks_are_named(memory_root: Path) -> None:
    memory = str(memory_root)
    texts = []
    for heads in (("used",), ("used", "idle", "new")):
        resumed = partial(_resumed_after, memory, heads[-1], _Heads(), _Heads(heads))
        said = raised_by(resumed)
        assert isinstance(said, ConfigError)
        texts.append(str(said))
    lacked, new = texts
    assert "has heads.idle.bias, heads.idle.weight, which the model lacks" in lacked
    assert "lacks heads.new.bias, heads.new.weight of the model" in new
    assert all("strict_loading=False" in text for text in (lacked, new))


# -- several nodes ---------------------------------------------------------------------------------


def _one_saves_and_all_load(directory: str) -> tuple[int, str]:
    plugin = MemoryCheckpointIO(None, job="job")
    if dist.get_rank() == 0:
        plugin.save_checkpoint(_checkpoint(5), f"{directory}/some.ckpt")
    dist.barrier()
    step = plugin.load_checkpoint(NEWEST)["global_step"]
    dist.barrier()
    return step, plugin.report().source


@pytest.mark.slow
@pytest.mark.nodes(2)
def test_what_rank_0_saves_alone_reaches_nodes_that_have_nothing_of_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.launch(_one_saves_and_all_load, str(tmp_path))
    assert job.results() == [(5, "memory and peers")] * 2


# -- a job that is killed --------------------------------------------------------------------------


def _train(*arguments: Any) -> int:
    """Run the job on two ranks; its exit code."""
    job = ("-m", "tests.support.frameworks.lightning_job", json.dumps(arguments))
    ended = run_torchrun(*job, timeout=_SECONDS)
    print(ended.stdout[-16384:])
    return ended.returncode


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_fsdp_on_cpu
def test_killed_jobs_go_on_from_memory_as_if_nothing_had_been(
    memory_root: Path, tmp_path: Path
) -> None:
    for kind in sorted(STRATEGIES):
        assert _train(str(tmp_path), str(memory_root), 2 * BATCHES + 1, kind) != 0
    assert not list(tmp_path.rglob(".metadata"))
    assert _train(str(tmp_path), str(memory_root), None, *sorted(STRATEGIES)) == 0
    resumed = [f"epoch=1-step={2 * BATCHES}.ckpt", "memory", 2 * BATCHES, 0]
    for rank in (0, 1):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said == dict.fromkeys(STRATEGIES, resumed)
    for kind in sorted(STRATEGIES):
        from_storage = MemoryCheckpointIO(
            tmp_path / kind, memory_root=tmp_path / "none"
        ).load_checkpoint(NEWEST)
        undisturbed = MemoryCheckpointIO(
            None, memory_root=memory_root, job=f"alone-{kind}"
        ).load_checkpoint(NEWEST)
        assert from_storage["global_step"] == EPOCHS * BATCHES
        assert_same(from_storage, undisturbed, kind)
