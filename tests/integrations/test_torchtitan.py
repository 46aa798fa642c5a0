"""torchtitan's own trainer on dcp_mem: killed in the middle of a save, and started again."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_mem import NoRecoverableCheckpoint
from tests.support.checkpoints.jobs import Job, committed_in, save
from tests.support.checkpoints.plans import logged
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.command import reject
from tests.support.processes.forks import in_process, raised_by
from tests.support.processes.launch import ends, run_torchrun

_MISSING = [
    name for name in ("torchtitan", "torchdata", "tyro", "spmd_types") if find_spec(name) is None
]
pytestmark = [
    pytest.mark.skipif(bool(_MISSING), reason=f"could not import {', '.join(_MISSING)}"),
    needs_fsdp_on_cpu,
]
_SECONDS = 200
_IN_THE_THIRD_SAVE = {"DCP_MEM_FAULTS": "stage.copied:kill:3"}
_END = r"rank \d ends at 12 with [0-9a-f]{64}"
_JOB = "tests.support.frameworks.torchtitan_job"


def _train(
    folder: Path, *options: str, served: bool = False, faults: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a training on two ranks."""
    serving = ["-m", "dcp_mem.run", "--root", str(folder / "checkpoint")] if served else []
    program = [*serving, "-m", _JOB, f"--dump_folder={folder}", *options]
    return run_torchrun(*program, timeout=_SECONDS, env=faults)


@pytest.fixture
def _in_private_memory(memory_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Where a training with torchtitan's own manager has saved, and what it has come to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, ends(_train(folder, "--config=torchtitans"), _END)


@pytest.mark.slow
@pytest.mark.usefixtures("_in_private_memory")
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "mode", [pytest.param("disabled", marks=pytest.mark.variant), "async_with_pinned_mem"]
)
def test_a_killed_training_goes_on_from_memory_to_the_bit(
    mode: str, undisturbed: tuple[Path, set[str]], tmp_path: Path
) -> None:
    options = [
        "--config=memory",
        f"--checkpoint.async_mode={mode}",
        "--checkpoint.persist_every=4",
        "--checkpoint.keep_latest_k=2",
    ]
    killed = _train(tmp_path, *options, faults=_IN_THE_THIRD_SAVE)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stdout, killed.stdout
    assert "step-6" not in committed_in(tmp_path / "checkpoint")
    run = _train(tmp_path, *options)
    assert ends(run, _END) == undisturbed[1]
    assert "torchtitan goes on from step-6, loaded from memory" in run.stdout
    assert "step-12" in committed_in(tmp_path / "checkpoint")


@pytest.mark.variant
@pytest.mark.slow
@pytest.mark.usefixtures("_in_private_memory")
@pytest.mark.timeout(500)
def test_torchtitans_own_manager_goes_on_by_serve_to_the_bit(
    undisturbed: tuple[Path, set[str]], tmp_path: Path
) -> None:
    options = ["--config=torchtitans", "--checkpoint.async_mode=async"]
    killed = _train(tmp_path, *options, served=True, faults=_IN_THE_THIRD_SAVE)
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stdout, killed.stdout
    run = _train(tmp_path, *options, served=True)
    assert ends(run, _END) == undisturbed[1]
    assert f"Loading the checkpoint from {tmp_path}/checkpoint/step-6" in run.stdout
    assert committed_in(tmp_path / "checkpoint") == {f"step-{step}" for step in (3, 6, 9, 12)}


@pytest.mark.slow
@pytest.mark.usefixtures("_in_private_memory")
@pytest.mark.timeout(500)
@pytest.mark.variant
def test_what_torchtitans_own_manager_saved_is_gone_on_from(
    undisturbed: tuple[Path, set[str]], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    run = _train(tmp_path, "--config=memory", "--checkpoint.load_step=9")
    assert ends(run, _END) == undisturbed[1]
    assert "torchtitan goes on from step-9, loaded from storage" in run.stdout
    missing = _train(tmp_path, "--config=memory", "--checkpoint.load_step=5")
    assert missing.returncode != 0
    assert "--checkpoint.load_step=5 not found" in missing.stdout


@in_process
def test_copies_and_parity_together_are_refused() -> None:
    from dcp_mem.integrations.torchtitan import MemoryCheckpointManager

    error = raised_by(lambda: MemoryCheckpointManager.Config(replicas=1, parity=2))
    assert "give one of them" in str(error)


def _manager(
    folder: Path,
    memory: Path,
    states: dict[str, Any] | None = None,
    model: torch.nn.Module | None = None,
    optimizers: Any = None,
    **options: Any,
) -> Any:
    from dcp_mem.integrations.torchtitan import MemoryCheckpointManager

    return MemoryCheckpointManager(
        MemoryCheckpointManager.Config(enable=True, interval=1, memory_root=str(memory), **options),
        dataloader=None,
        model_parts=[model or torch.nn.Linear(3, 2)],
        optimizers=optimizers,
        lr_schedulers=None,
        states=states or {},
        sd_adapter=None,
        base_folder=str(folder),
    )


def _weights(manager: Any) -> list[list[float]]:
    weights: list[list[float]] = manager.states["model"].state_dict()["weight"].tolist()
    return weights


def _saved(folder: Path, memory: Path) -> list[list[float]]:
    """Save step-2, wait for storage, and return the weights."""
    manager = _manager(folder, memory)
    assert not manager.load()  # nothing at all
    assert manager.save(2)
    manager.close()
    return _weights(manager)


def _forget(memory: Path) -> None:
    for job in memory.glob("[!.]*"):
        shutil.rmtree(job)


@in_process
def test_a_rejected_checkpoint_is_loaded_by_its_step_alone(
    tmp_path: Path, memory_root: Path
) -> None:
    saved = _saved(tmp_path, memory_root)
    reject(Job(str(tmp_path / "checkpoint"), str(memory_root), name=None), "step-2")
    for is_on_storage_alone in (False, True):
        if is_on_storage_alone:
            _forget(memory_root)
        manager = _manager(tmp_path, memory_root)
        error = raised_by(manager.load)
        assert isinstance(error, NoRecoverableCheckpoint), repr(error)
        assert "rejected: nan" in str(error)
        assert manager.load(2)
        assert _weights(manager) == saved


class _Note:
    """Of a class that torch doesn't unpickle by itself."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Noted:
    def __init__(self, text: str) -> None:
        self.note = _Note(text)

    def state_dict(self) -> dict[str, Any]:
        return {"note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.note = state["note"]


@in_process
def test_a_state_of_any_class_is_loaded_where_that_is_said(
    tmp_path: Path, memory_root: Path
) -> None:
    manager = _manager(tmp_path, memory_root, {"train_state": _Noted("saved")})
    assert manager.save(2)
    manager.close()
    fresh = _Noted("fresh")
    error = raised_by(_manager(tmp_path, memory_root, {"train_state": fresh}).load)
    assert "train_state.note" in str(error)
    assert _manager(tmp_path, memory_root, {"train_state": fresh}, weights_only=False).load()
    assert fresh.note.text == "saved"


def _idle(folder: Path, memory: Path, **options: Any) -> tuple[Any, Any]:
    """A manager whose model has a part that is never used, and its optimizers."""
    from torchtitan.components.optimizer import default_adamw

    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "idle": torch.nn.Linear(3, 2)})
    optimizers = default_adamw(lr=0.1).build(model_parts=[model])
    return _manager(folder, memory, model=model, optimizers=optimizers, **options), optimizers


@in_process
def test_a_parameter_that_has_never_had_a_gradient_comes_back_without_optimizer_state(
    tmp_path: Path, memory_root: Path
) -> None:
    manager, optimizers = _idle(tmp_path, memory_root)
    [optimizer] = optimizers.optimizers
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name.startswith("used"):
                parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    [group, *_] = optimizer.param_groups
    del group["maximize"]  # as of a torch that doesn't know it yet
    assert manager.save(2)
    saved = optimizers.state_dict()
    manager.close()
    manager, again = _idle(tmp_path, memory_root)
    with logged() as told:
        assert manager.load()
    loaded = again.state_dict()
    assert {key for key in loaded if key.startswith("state.")} == {
        f"state.used.{name}.{entry}"
        for name in ("weight", "bias")
        for entry in ("step", "exp_avg", "exp_avg_sq")
    }
    assert all(torch.equal(loaded[key], saved[key]) for key in saved if key.startswith("state."))
    assert not any(parameter.grad is not None for parameter in again.param_groups[0]["params"])
    assert any("idle.bias, idle.weight had no optimizer state yet" in line for line in told)
    assert any("lacks the optimizer's maximize: kept" in line for line in told)


@in_process
def test_a_checkpoint_of_the_model_alone_is_refused_by_name(
    tmp_path: Path, memory_root: Path
) -> None:
    manager, _ = _idle(tmp_path, memory_root)
    manager.last_save_model_only = True
    assert manager.save(2, last_step=True)
    manager.close()
    manager, _ = _idle(tmp_path, memory_root, exclude_from_loading=["dataloader", "lr_scheduler"])
    assert "last_save_model_only" in str(raised_by(manager.load))


def _lose_the_manifest(folder: Path, memory: Path) -> str:
    _saved(folder, memory)
    _forget(memory)
    [manifest] = folder.glob("checkpoint/step-2/*/manifest-*")
    manifest.unlink()
    return "its manifest is missing"


def _lose_a_segment(folder: Path, memory: Path) -> str:
    job = Job(str(folder / "checkpoint"), str(memory), name=None)
    with job.writer(persist=False, agent="thread") as writer:
        save(writer, 2, "step-2")
        [segment] = memory.glob("*/step-2/*.distcp")
        segment.unlink()
    return "no node has the segments of ranks 0"


def _lose_storage(folder: Path, memory: Path) -> str:
    _saved(folder, memory)
    _forget(memory)
    stored = folder / "checkpoint"
    shutil.rmtree(stored)
    stored.symlink_to(stored)
    return "Too many levels of symbolic links"


@in_process
def test_no_training_starts_anew_over_what_cannot_be_loaded(
    tmp_path: Path, memory_root: Path
) -> None:
    for lose in (_lose_the_manifest, _lose_a_segment, _lose_storage):
        folder = tmp_path / lose.__name__
        reason = lose(folder, memory_root)
        error = raised_by(_manager(folder, memory_root).load)
        assert isinstance(error, NoRecoverableCheckpoint), repr(error)
        assert reason in error.reasons[0]
        _forget(memory_root)
