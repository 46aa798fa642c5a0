"""Trainer and Accelerate with dcp_mem: killed jobs, and the uses of resume_from_checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from packaging.version import Version
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

import dcp_mem
from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    MemoryStorageReader,
    Persist,
    UntrustedObject,
    every_n_saves,
)
from dcp_mem.integrations.accelerate import AcceleratorCheckpoints
from dcp_mem.integrations.huggingface import TrainerCheckpoints
from tests.support.checkpoints.jobs import committed_in, wait_until
from tests.support.checkpoints.training import needs_fsdp_on_cpu
from tests.support.docs import blocks
from tests.support.frameworks.huggingface_jobs import (
    BATCHES,
    STEPS,
    Account,
    Durable,
    JobDied,
    Numbers,
    Outcome,
    Spec,
    as_on_gpus,
    digest,
    make_trainer,
    running_launcher,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("default")
RESUMES_IN_ORDER = Version(accelerate.__version__) >= Version("1.15") or Version(
    transformers.__version__
) >= Version("5")
"""Older ones resume within an epoch with the order of the first, from any checkpoint."""

Launch = Callable[[Spec], list[Outcome]]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    with running_launcher(tmp_path_factory.mktemp("launcher") / "log") as launch:
        yield launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "sharding"),
    [
        pytest.param("accelerate", "ddp", marks=pytest.mark.variant),
        pytest.param("accelerate", "fsdp2", marks=needs_fsdp_on_cpu),
        ("trainer", "ddp"),
        pytest.param("trainer", "fsdp2", marks=[pytest.mark.variant, needs_fsdp_on_cpu]),
    ],
)
def test_a_training_that_is_killed_goes_on_as_if_nothing_had_been(
    loop: str, sharding: str, launch: Launch, memory_root: Path, tmp_path: Path
) -> None:
    alone = launch(
        Spec(
            str(tmp_path / "alone"),
            str(memory_root / "alone"),
            str(tmp_path / "other"),
            loop,
            sharding,
        )
    )
    assert [len(rank.losses) for rank in alone] == [STEPS, STEPS]
    url = tmp_path / "storage"
    job = Spec(str(tmp_path), str(memory_root / "job"), str(url), loop, sharding)
    with pytest.raises(JobDied):
        launch(replace(job, persist=False, killed_at=7))
    assert (tmp_path / "killed").exists()
    assert not url.exists() or not list(url.glob("step-*"))

    _goes_on(launch(job), alone, "memory")

    shutil.rmtree(memory_root / "job")
    newest = max(url.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    shutil.rmtree(newest)
    _goes_on(launch(job), alone, "storage")


def _goes_on(resumed: list[Outcome], alone: list[Outcome], source: str) -> None:
    for one, whole in zip(resumed, alone, strict=True):
        assert one.source == source
        assert one.resumed is not None
        assert 0 < one.resumed < STEPS
        assert one.batches == whole.batches[one.resumed :]
        assert one.losses == whole.losses[one.resumed :]
        assert one.digest == whole.digest


# -- the Trainer, in one process -------------------------------------------------------------------


class Runs:
    """Runs of a Trainer in one directory, one after the other, like a script started again."""

    def __init__(self, directory: Path, memory: Path) -> None:
        self.url, self.memory, self.output = (
            directory / "storage",
            memory / "job",
            directory / "output",
        )

    def run(
        self, resume: bool | str = True, *, stock: bool = False, **arguments: Any
    ) -> tuple[Any, Account]:
        """The Trainer when it has trained, and what it did; stock: without dcp_mem."""
        account = Account()
        trainer = make_trainer(str(self.output), account, **arguments)
        if not stock:
            checkpoints = TrainerCheckpoints(
                trainer, self.url, memory_root=self.memory.parent, job="job"
            )
            trainer.add_callback(Durable(checkpoints))
        trainer.train(resume_from_checkpoint=resume)
        return trainer, account

    def lose_memory(self) -> None:
        shutil.rmtree(self.memory)


@pytest.fixture
def runs(tmp_path: Path, memory_root: Path) -> Iterator[Runs]:
    yield Runs(tmp_path, memory_root)
    AcceleratorState._reset_state(True)


def test_a_first_start_with_resume_trains_from_the_beginning_and_the_next_has_nothing_left_to_do(
    runs: Runs,
) -> None:
    trainer, account = runs.run(max_steps=2 * BATCHES)
    assert len(account.losses) == 2 * BATCHES
    assert not list(runs.output.glob("*"))
    again, account = runs.run(max_steps=2 * BATCHES)
    assert account.losses == []
    assert again.state.global_step == 2 * BATCHES
    assert digest(again.model.state_dict()) == digest(trainer.model.state_dict())


@pytest.mark.parametrize(
    ("persist", "expected"),
    [(every_n_saves(10), {"step-5", "step-30"}), (True, {"step-30"}), (False, set())],
    ids=["every 10", "all", "none"],
)
def test_a_training_ends_with_its_newest_step_on_storage(
    memory_root: Path, tmp_path: Path, persist: bool | Persist, expected: set[str]
) -> None:
    """30 steps, saved each 5: six saves, of which every tenth alone is meant for storage."""
    runs = Runs(tmp_path, memory_root)
    trainer = make_trainer(str(runs.output), Account(), max_steps=30, save_steps=5)
    options: dict[str, Any] = {"memory_root": memory_root, "job": "job", "persist": persist}
    TrainerCheckpoints(trainer, runs.url, **options)
    trainer.train()
    assert trainer.state.global_step == 30
    stored = committed_in(runs.url)
    if persist is True:  # Saves that newer ones have overtaken may be among them.
        assert stored >= expected
    else:
        assert stored == expected


def test_a_second_training_of_the_same_trainer_saves_the_same_steps_again(runs: Runs) -> None:
    trainer = make_trainer(str(runs.output), Account(), max_steps=BATCHES, save_steps=BATCHES)
    checkpoints = TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
    models = []
    for _ in range(2):
        trainer.train()
        assert checkpoints.last_saved is not None
        assert checkpoints.last_saved.outcome == "complete"
        models.append(digest(trainer.model.state_dict()))
    assert models[0] != models[1]
    again, _ = runs.run(max_steps=BATCHES)
    assert digest(again.model.state_dict()) == models[1]


def test_a_step_that_is_asked_for_is_resumed_from_and_one_that_is_not_there_raises(
    runs: Runs,
) -> None:
    _, whole = runs.run()
    _, account = runs.run("step-4")
    assert account.losses == whole.losses[4:]
    with pytest.raises(CheckpointNotFound, match="step-5"):
        runs.run("step-5")


def test_a_checkpoint_of_the_trainers_own_is_resumed_from_where_there_is_no_other(
    runs: Runs,
) -> None:
    runs.run(False, stock=True, max_steps=4)
    _, account = runs.run()
    assert len(account.losses) == STEPS - 4
    _, account = runs.run(str(runs.output / "checkpoint-2"))
    assert len(account.losses) == STEPS - 2


def test_a_newest_checkpoint_that_is_damaged_is_passed_over_and_batches_count_from_the_older_one(
    runs: Runs,
) -> None:
    trainer, whole = runs.run()
    runs.lose_memory()
    for step in (8, 10):
        for segment in (runs.url / f"step-{step}").glob("*.distcp"):
            content = bytearray(segment.read_bytes())
            content[len(content) // 3 : -len(content) // 3] = bytes(
                len(content[len(content) // 3 : -len(content) // 3])
            )
            segment.write_bytes(content)
    again, account = runs.run()
    expected = whole.batches[6:], whole.losses[6:]
    if not RESUMES_IN_ORDER:
        trainer, expected = _resumed_from_the_trainers_own(runs, 6)
    assert (account.batches, account.losses) == expected
    assert digest(again.model.state_dict()) == digest(trainer.model.state_dict())


def _resumed_from_the_trainers_own(runs: Runs, step: int) -> tuple[Any, tuple[Any, Any]]:
    """The Trainer, and the batches and losses after the step."""
    runs.run(False, stock=True)
    for place in runs.output.glob("checkpoint-*"):
        if int(place.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(place)
    trainer, account = runs.run(stock=True)
    return trainer, (account.batches, account.losses)


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes what the model was at each save."""

    def __init__(self) -> None:
        self.models: dict[int, str] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.models[state.global_step] = digest(kwargs["model"].state_dict())


def scored(*scores: float, **arguments: Any) -> dict[str, Any]:
    """Arguments of a run with an evaluation every two steps; more of them."""
    rest = iter(scores)
    return {
        "metrics": lambda prediction: {"score": next(rest)},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "score",
        **arguments,
    }


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.variant), 1])
def test_the_best_model_is_loaded_at_the_end_and_its_checkpoint_stays(
    runs: Runs, limit: int | None
) -> None:
    watch = Watch()
    trainer, _ = runs.run(
        callbacks=[watch],
        save_total_limit=limit,
        **scored(0.1, 0.9, 0.5, 0.2, 0.3, load_best_model_at_end=True),
    )
    assert len(set(watch.models.values())) == len(watch.models) == 5
    assert digest(trainer.model.state_dict()) == watch.models[4]
    assert {"step-4", "step-10"} <= {path.name for path in runs.url.glob("step-*")}
    if limit:
        wait_until(
            lambda: len(list(runs.url.glob("step-*"))) == 2, "what isn't the best or newest goes"
        )


def test_a_best_step_that_is_not_saved_leaves_the_best_one_that_is(runs: Runs) -> None:
    found = []
    for stock in (True, False):
        watch = Watch()
        trainer, _ = runs.run(
            False,
            stock=stock,
            callbacks=[watch],
            max_steps=8,
            save_steps=4,
            **scored(0.1, 0.5, 0.9, 0.2, load_best_model_at_end=True),
        )
        assert digest(trainer.model.state_dict()) == watch.models[4] != watch.models[8]
        found.append(watch.models)
    assert found[0] == found[1]


@pytest.mark.parametrize("scores", [(0.1, 0.5, 0.9, 0.7, 0.1, 0.2), (0.1, 0.5, 0.2, 0.5, 0.1, 0.5)])
def test_the_checkpoint_that_stays_is_the_trainers_choice(
    runs: Runs, scores: Sequence[float]
) -> None:
    """Step 8 is better than 4, but not than 6; or as good."""
    watch = Watch()
    trainer, _ = runs.run(
        callbacks=[watch],
        max_steps=12,
        save_steps=4,
        save_total_limit=1,
        **scored(*scores, load_best_model_at_end=True),
    )
    assert digest(trainer.model.state_dict()) == watch.models[4]
    wait_until(lambda: committed_in(runs.url) == {"step-4", "step-12"}, "the best and the newest")


def test_a_best_checkpoint_of_the_trainers_own_is_loaded_after_a_resume_and_stays(
    runs: Runs,
) -> None:
    chosen: dict[str, Any] = {"load_best_model_at_end": True, "save_total_limit": 1}
    trainer, _ = runs.run(False, stock=True, max_steps=4, **scored(0.1, 0.9, **chosen))
    best = digest(trainer.model.state_dict())
    for last, score in ((6, 0.2), (8, 0.3)):  # first from the Trainer's own, then from ours
        trainer, account = runs.run(max_steps=last, **scored(score, **chosen))
        assert len(account.losses) == 2
        assert digest(trainer.model.state_dict()) == best
        assert [path.name for path in runs.output.glob("checkpoint-*")] == ["checkpoint-4"]


def test_the_best_model_is_loaded_after_a_resume_from_a_later_step(runs: Runs) -> None:
    chosen: dict[str, Any] = {"load_best_model_at_end": True, "save_steps": 4}
    trainer, _ = runs.run(max_steps=8, **scored(0.1, 0.8, 0.9, 0.2, **chosen))
    best = digest(trainer.model.state_dict())
    trainer, account = runs.run(max_steps=12, **scored(0.3, 0.4, **chosen))
    assert len(account.losses) == 4
    assert digest(trainer.model.state_dict()) == best


def test_a_trial_of_a_search_ends_with_its_own_best_model(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.hp_params", dict)
    watch = Watch()
    trainer = make_trainer(
        str(runs.output),
        Account(),
        callbacks=[watch],
        max_steps=6,
        **scored(0.1, 0.9, 0.2, load_best_model_at_end=True),
    )
    TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
    trainer.train(trial={"learning_rate": 0.01})
    assert digest(trainer.model.state_dict()) == watch.models[4] != watch.models[6]


def test_a_best_checkpoint_stays_even_if_it_is_not_to_be_loaded_at_the_end(runs: Runs) -> None:
    runs.run(save_total_limit=2, **scored(0.1, 0.9, 0.5, 0.2, 0.3))
    wait_until(
        lambda: committed_in(runs.url) == {"step-4", "step-8", "step-10"},
        "the best one and the newest two stay",
    )


def test_a_metric_that_steers_the_learning_rate_alone_keeps_nothing(runs: Runs) -> None:
    runs.run(
        save_total_limit=2,
        **scored(0.1, 0.9, 0.5, 0.2, 0.3, lr_scheduler_type="reduce_lr_on_plateau"),
    )
    wait_until(lambda: committed_in(runs.url) == {"step-8", "step-10"}, "the newest two stay")


def test_a_trainer_that_loads_a_directory_alone_is_given_no_more(runs: Runs) -> None:
    runs.run(False, stock=True, max_steps=4)
    trainer = make_trainer(str(runs.output), Account())
    load, loaded = trainer._load_from_checkpoint, list[str]()

    def load_directory(resume_from_checkpoint: str) -> None:
        loaded.append(Path(resume_from_checkpoint).name)
        load(resume_from_checkpoint)

    trainer._load_from_checkpoint = load_directory
    TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
    trainer.train(resume_from_checkpoint=True)
    assert loaded == ["checkpoint-4"]
    assert trainer.state.global_step == STEPS


def test_the_trainers_state_is_saved_as_the_trainer_does(runs: Runs) -> None:
    chosen: dict[str, Any] = {
        "callbacks": [EarlyStoppingCallback(5)],
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "max_steps": 4,
    }
    runs.run(False, stock=True, **chosen)
    theirs = json.loads((runs.output / "checkpoint-4" / "trainer_state.json").read_text())
    runs.run(False, **chosen)
    saved = {"trainer": ""}
    with MemoryStorageReader(runs.url, memory_root=runs.memory.parent, job="job") as reader:
        dcp_mem.load(saved, storage_reader=reader)
    ours = json.loads(saved["trainer"])
    assert ours["stateful_callbacks"]["EarlyStoppingCallback"]
    for state in (theirs, ours):
        assert state.pop("best_model_checkpoint")
        for entry in state["log_history"]:
            for name in [name for name in entry if name.endswith(("_runtime", "_per_second"))]:
                del entry[name]
    assert ours == theirs


class _WithPath(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
    """A callback whose state is no JSON."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"path": Path("data")}}


def test_a_callbacks_state_that_the_trainer_could_not_save_is_refused_by_name(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"PosixPath is not JSON serializable, in _WithPath"):
        runs.run(False, callbacks=[_WithPath()])


def test_gradients_that_accumulate_and_saves_at_epochs_ends(runs: Runs) -> None:
    chosen: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "save_strategy": "epoch",
        "max_steps": 5,
    }
    trainer, whole = runs.run(**chosen)
    shutil.rmtree(runs.memory / "step-5", ignore_errors=True)
    shutil.rmtree(runs.url / "step-5", ignore_errors=True)
    again, account = runs.run(**chosen)
    assert account.losses == whole.losses[8:]
    assert digest(again.model.state_dict()) == digest(trainer.model.state_dict())


def test_the_scale_of_gradients_comes_back(runs: Runs) -> None:
    scales = []
    for steps in (4, 6):
        trainer = make_trainer(str(runs.output), Account(), max_steps=steps)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
        TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
        trainer.train(resume_from_checkpoint=True)
        scales.append(trainer.accelerator.scaler.get_scale())
    assert scales == [2.0**5, 2.0**7]


class Quantised(torch.nn.Module):
    """A frozen layer that saves as bitsandbytes' do.

    What belongs to the weight stands beside it: the first key is in use and torch's loading doesn't
    take it, the second is made for each save; the layer below takes its own, which is no attribute.
    """

    def __init__(self, scale: float, blocks: int = 64) -> None:
        super().__init__()
        weight: Any = torch.nn.Parameter(torch.full((2, 3), int(scale), dtype=torch.int8), False)
        weight.absmax, weight.packed = torch.full((4,), scale), torch.tensor([blocks])
        self.weight, self.rows = weight, _Rows(scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.weight.absmax.detach()
        destination[f"{prefix}weight.packed"] = self.weight.packed.clone()


class _Rows(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.kept = [torch.full((4,), scale)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}SCB"] = self.kept[0] * 1

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.kept = [state[f"{prefix}SCB"].clone()]
        super()._load_from_state_dict(state, prefix, *rest)
        unexpected = rest[-2]
        unexpected.remove(f"{prefix}SCB")


def _train_quantised(runs: Runs, scale: float, steps: int, **arguments: Any) -> Any:
    trainer = make_trainer(str(runs.output), Account(), max_steps=steps, **arguments)
    layer = trainer.model.quantised = Quantised(scale)
    TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
    trainer.train(resume_from_checkpoint=True)
    return trainer, layer


def test_a_model_with_quantised_layers_resumes_with_what_belongs_to_their_weights(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    _train_quantised(runs, 3.0, 4)
    assert "quantised.weight.packed" in caplog.text
    assert "absmax" not in caplog.text
    caplog.clear()
    trainer, layer = _train_quantised(runs, 5.0, 6)
    assert trainer.state.global_step == 6
    assert layer.weight.tolist() == [[3] * 3] * 2
    assert layer.weight.absmax.tolist() == layer.rows.kept[0].tolist() == [3.0] * 4
    assert "has other values" not in caplog.text


def test_what_a_quantised_layer_does_not_take_is_named_where_it_differs(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    _train_quantised(runs, 3.0, 2)
    trainer = make_trainer(str(runs.output), Account(), max_steps=4)
    trainer.model.quantised = Quantised(3.0, blocks=128)
    TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job")
    trainer.train(resume_from_checkpoint=True)
    [told] = [one.getMessage() for one in caplog.records if "has other values" in one.getMessage()]
    assert "quantised.weight.packed" in told


class _Odd(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler with a value that can't be unpickled without running code."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.odd = _Note("first")


class _Note:
    def __init__(self, text: str) -> None:
        self.text = text


def test_a_trainer_that_is_told_so_loads_values_of_any_class(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(steps: int, text: str, **options: Any) -> Any:
        trainer = make_trainer(str(runs.output), Account(), max_steps=steps, learning_rate=0.0)
        trainer.create_optimizer()
        trainer.lr_scheduler = _Odd(trainer.optimizer)
        trainer.lr_scheduler.odd = _Note(text)
        TrainerCheckpoints(trainer, runs.url, memory_root=runs.memory.parent, job="job", **options)
        trainer.train(resume_from_checkpoint=True)
        return trainer

    run(2, "first")
    with pytest.raises(UntrustedObject, match="scheduler"):
        run(4, "second")
    again = run(4, "second", weights_only=False)
    assert again.state.global_step == 4
    assert again.lr_scheduler.odd.text == "first"


def test_the_best_model_of_quantised_layers_is_loaded_at_the_end(runs: Runs) -> None:
    chosen = scored(0.9, 0.1, load_best_model_at_end=True)
    trainer, layer = _train_quantised(runs, 3.0, 4, **chosen)
    assert trainer.state.best_global_step == 2
    assert layer.weight.absmax.tolist() == layer.rows.kept[0].tolist() == [3.0] * 4


def test_a_trainer_that_cannot_be_taken_over_is_refused(runs: Runs) -> None:
    trainer = make_trainer(str(runs.output), Account())
    with pytest.raises(ConfigError, match="is no transformers"):
        TrainerCheckpoints(trainer.model, runs.url)
    with pytest.raises(ConfigError, match="keep_storage"):
        TrainerCheckpoints(trainer, runs.url, keep_storage="all")  # type: ignore[arg-type]
    trainer._load_scaler = None
    with pytest.raises(ConfigError, match=r"without _load_scaler: versions from 4\.52"):
        TrainerCheckpoints(trainer, runs.url)
    del trainer._load_scaler
    TrainerCheckpoints(trainer, runs.url)
    with pytest.raises(ConfigError, match="already"):
        TrainerCheckpoints(trainer, runs.url)


def test_the_guides_trainer_trains_and_resumes(
    runs: Runs, tmp_path: Path, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    # Before transformers 5, a Trainer reports to every tracker that is installed.
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", list)
    text = blocks("python")["docs/huggingface.md 1"].replace("abfs://ckpts/run-42", str(runs.url))
    for _ in range(2):
        names: dict[str, Any] = {"model": tiny_model(), "dataset": Numbers(80)}  # of ten steps
        exec(compile(text, "docs", "exec"), names)
        assert names["trainer"].state.global_step == 30
    assert (runs.url / "step-10" / ".metadata").exists()


# -- the Accelerator, in one process ---------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


class _Registered:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class _Whole:
    """An object whose state is a dict of any keys."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = dict(state)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def _prepared(accelerator: Accelerator, factor: float, *registered: Any) -> list[torch.nn.Module]:
    """Make two models, each with an optimizer and a scheduler, as for a GAN.

    What the models have learned follows from the factor.
    """
    models = []
    for _ in range(2):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=factor)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, factor)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.backward(model(torch.full((1, 3), factor)).square().sum())
        optimizer.step()
        scheduler.step()
        models.append(model)
    accelerator.register_for_checkpointing(*registered)
    return models


def _all_of(accelerator: Accelerator) -> str:
    optimizers = [one.state_dict() for one in accelerator._optimizers]
    schedulers = [one.state_dict() for one in accelerator._schedulers]
    return digest(*(one.state_dict() for one in accelerator._models), *optimizers) + repr(
        schedulers
    )


def test_all_that_an_accelerator_has_comes_back(
    accelerator: Accelerator, memory_root: Path
) -> None:
    registered = _Registered({"notes": [1, "two"]}), _Registered(torch.arange(3))
    _prepared(accelerator, 0.1, *registered)
    accelerator.step = 7
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        assert checkpoints.restore() is None
        assert checkpoints.save(5, metrics={"loss": 0.3})
        saved, numbers = _all_of(accelerator), torch.rand(3)
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        fresh = _Registered({}), _Registered(torch.zeros(3, dtype=torch.int64))
        _prepared(accelerator, 0.2, *fresh)
        accelerator.step = 0
        assert _all_of(accelerator) != saved
        assert checkpoints.restore() == 5
        assert torch.equal(torch.rand(3), numbers)
    assert _all_of(accelerator) == saved
    assert accelerator.step == 7
    assert fresh[0].value == {"notes": [1, "two"]}
    assert torch.equal(fresh[1].value, torch.arange(3))


def test_batches_that_are_skipped_later_leave_random_numbers_alone(
    accelerator: Accelerator, memory_root: Path
) -> None:
    _prepared(accelerator, 0.1)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Numbers(8), batch_size=2))
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        checkpoints.save(1)
        numbers = torch.rand(3)
        assert checkpoints.restore() == 1
        for _ in range(2):  # two loaders may go on together
            next(iter(checkpoints.skip_first_batches(loader, 1)))
            assert torch.equal(torch.rand(3), numbers)
        checkpoints.save(2)
        next(iter(checkpoints.skip_first_batches(loader, 1)))
        assert not torch.equal(torch.rand(3), numbers)


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ({"seen": 3}, {}),
        ({"seen": 3, "mean": torch.arange(3.0)}, {}),
        ({"mean": torch.arange(3.0)}, {"seen": 0}),
        ({"mean": torch.arange(3.0)}, {"mean": torch.zeros(3), "more": torch.zeros(2)}),
        ({"mean": torch.arange(3.0), "more": torch.ones(2)}, {"mean": torch.zeros(5)}),
        ({}, {"seen": 0, "mean": torch.zeros(3)}),
    ],
    ids=["values", "tensors", "tensors for values", "fewer", "more", "none"],
)
def test_a_registered_object_comes_back_whatever_a_fresh_one_has(
    accelerator: Accelerator, memory_root: Path, saved: dict[str, Any], fresh: dict[str, Any]
) -> None:
    registered = _Whole(saved)
    _prepared(accelerator, 0.1, registered)
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        checkpoints.save(1)
        registered.state = dict(fresh)
        assert checkpoints.restore() == 1
    assert registered.state.keys() == saved.keys()
    assert all(
        torch.equal(torch.as_tensor(registered.state[key]), torch.as_tensor(value))
        for key, value in saved.items()
    )


def test_registered_objects_of_any_kind_are_loaded_where_that_is_said(
    accelerator: Accelerator, memory_root: Path
) -> None:
    registered = _Registered(_Note("data"))
    _prepared(accelerator, 0.1, registered)
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        checkpoints.save(1)
        registered.value = None
        with pytest.raises(UntrustedObject):
            checkpoints.restore()
        assert checkpoints.restore(weights_only=False) == 1
        assert registered.value.text == "data"


def _without_bias(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
    del state[f"{prefix}bias"]


def test_what_a_models_state_dict_leaves_out_stays_as_it_is_and_is_named(
    accelerator: Accelerator, memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(3, 2)
    model.register_state_dict_post_hook(_without_bias)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        checkpoints.save(1)
        weight, bias = model.weight.detach().clone(), torch.tensor([7.0, 8.0])
        with torch.no_grad():
            model.weight.zero_()
            model.bias.copy_(bias)
        assert checkpoints.restore() == 1
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)
    assert "leaves out bias" in caplog.text


def test_hooks_of_an_accelerators_own_checkpoints_are_named_once_as_not_called(
    accelerator: Accelerator, memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _prepared(accelerator, 0.1)
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        checkpoints.save(1)
        assert "hooks" not in caplog.text
        accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
        checkpoints.save(2)
        checkpoints.restore()
    assert caplog.text.count("register_save_state_pre_hook") == 1


def test_an_accelerator_without_a_model_or_with_other_schedulers_is_told(
    accelerator: Accelerator, memory_root: Path
) -> None:
    with AcceleratorCheckpoints(accelerator, memory_root=memory_root, job="job") as checkpoints:
        with pytest.raises(ConfigError, match="prepare"):
            checkpoints.save(1)
        _prepared(accelerator, 0.1)
        checkpoints.save(1)
        accelerator._schedulers.pop()
        with pytest.raises(ConfigError, match="2 schedulers"):
            checkpoints.restore()


def test_fsdp1_and_engines_are_refused(accelerator: Accelerator) -> None:
    as_on_gpus(accelerator, FullyShardedDataParallelPlugin(fsdp_version=1))
    with pytest.raises(ConfigError, match="fsdp_version=2"):
        AcceleratorCheckpoints(accelerator)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(ConfigError, match="DEEPSPEED"):
        AcceleratorCheckpoints(accelerator)


def test_the_guides_accelerator_trains_and_resumes(
    accelerator: Accelerator, tmp_path: Path, memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    text = blocks("python")["docs/huggingface.md 2"].replace(
        "abfs://ckpts/run-42", str(tmp_path / "storage")
    )
    for epochs in (2, 3):
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        loader = torch.utils.data.DataLoader(Numbers(16), batch_size=2, shuffle=True)
        names: dict[str, Any] = {"epochs": epochs, "model": model, "optimizer": optimizer}
        names.update(scheduler=scheduler, loader=loader)
        exec(compile(text, "docs", "exec"), names)
        assert scheduler.last_epoch == names["step"] == 8 * epochs
    assert names["checkpoints"].manager.report().step == 11
