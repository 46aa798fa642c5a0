"""Trainings with a Hugging Face Trainer or Accelerate, on two ranks each.

For `tests.integrations.test_huggingface`:

    with running_launcher() as launch:
        # What the ranks have come to; JobDied where one was killed.
        first, second = launch(Spec(…))

The launcher is a process that imports the frameworks once, and starts each job's ranks with
torchrun's own agent (`elastic_launch`), as forks: a fresh import takes each rank several seconds.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    extract_model_from_parallel,
    set_seed,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dcp_mem.integrations.accelerate import AcceleratorCheckpoints
from dcp_mem.integrations.huggingface import TrainerCheckpoints
from tests.support.processes.launch import TETHER

STEPS = 10
BATCHES = 4
"""Of an epoch, for each rank: steps 4 and 8 are the last ones of one."""
_SAVE_EACH = 2
_BATCH_SIZE = 2
_LOG_CHARACTERS = 16384
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """loop: "trainer" or "accelerate".

    sharding: "ddp" or "fsdp2". killed_at: the step in which rank 1 dies, 0 for none.
    """

    directory: str
    memory: str
    url: str
    loop: str
    sharding: str
    persist: bool = True
    killed_at: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rank's outcome: its source, batches and losses, and a digest of model and optimizer."""

    resumed: int | None
    source: str
    batches: list[list[int]]
    losses: list[float]
    digest: str


class JobDied(Exception):
    """A job did not end well.

    Its argument is how the first rank ended of which torchrun's agent heard.
    """


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that begin with their own number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(8) * 7 + index) % 60
        return {"input_ids": numbers, "labels": numbers}


def tiny_model(sharding: str = "ddp") -> Any:
    """Make a model with dropout, so that random numbers count, and with a tied tensor if it can."""
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=sharding == "ddp",
    )
    return GPT2LMHeadModel(config)


def digest(*states: Mapping[str, Any]) -> str:
    """Of all tensors' values, as this rank has them."""
    found = hashlib.sha256()
    for leaf in tree_leaves([dict(state) for state in states]):
        if isinstance(leaf, torch.Tensor):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _digest(spec: Spec, model: torch.nn.Module, optimizer: Mapping[str, Any]) -> str:
    assert all(isinstance(one, DTensor) for one in model.parameters()) == (spec.sharding == "fsdp2")
    return digest(model.state_dict(), optimizer)


class Account(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes what a run does, and ends it in the middle of a step."""

    def __init__(self, killed_at: int = 0, directory: str = "") -> None:
        self._killed_at, self._directory = killed_at, directory
        self.batches: list[list[int]] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_begins(state.global_step + 1)

    def step_begins(self, number: int) -> None:
        if number == self._killed_at and int(os.environ.get("RANK", "0")) == 1:
            Path(self._directory, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def saw(self, inputs: Mapping[str, torch.Tensor], loss: torch.Tensor) -> None:
        self.batches.append(inputs["input_ids"][:, 0].tolist())
        self.losses.append(float(loss.detach()))


def as_on_gpus(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make Accelerate use FSDP on CPUs as well: by itself it does so on accelerators only."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


class Durable(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """A callback that waits until storage has each checkpoint.

    Where training is faster, a newer checkpoint replaces one that awaits its flush.
    """

    def __init__(self, checkpoints: TrainerCheckpoints) -> None:
        self._checkpoints = checkpoints

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._checkpoints.manager.wait(state.global_step, progress=False)


class _Recorded(Trainer):  # type: ignore[misc, unused-ignore]
    account: Account

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            as_on_gpus(self.accelerator, FullyShardedDataParallelPlugin(fsdp_version=2))
            self.is_fsdp_enabled = True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.account.saw(inputs, loss)
        return loss


def make_trainer(
    output: str,
    account: Account,
    sharding: str = "ddp",
    callbacks: Sequence[Any] = (),
    metrics: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer as people write one.

    metrics: its compute_metrics. arguments: more of TrainingArguments.
    """
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}} if sharding == "fsdp2" else {}
    chosen = {
        "max_steps": STEPS,
        "save_steps": _SAVE_EACH,
        "per_device_train_batch_size": _BATCH_SIZE,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **fsdp,
        **arguments,
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    set_seed(7)
    trainer = _Recorded(
        model=tiny_model(sharding),
        args=TrainingArguments(output, **chosen),
        train_dataset=Numbers(BATCHES * _BATCH_SIZE * world),
        eval_dataset=Numbers(_BATCH_SIZE * world),
        callbacks=[account, *callbacks],
        compute_metrics=metrics,
    )
    trainer.account = account
    return trainer


def _with_trainer(spec: Spec) -> Outcome:
    account = Account(spec.killed_at, spec.directory)
    trainer = make_trainer(f"{spec.directory}/output", account, spec.sharding)
    checkpoints = TrainerCheckpoints(
        trainer, spec.url, memory_root=spec.memory, job="job", persist=spec.persist
    )
    if spec.persist:
        trainer.add_callback(Durable(checkpoints))
    trainer.train(resume_from_checkpoint=True)
    resumed = STEPS - len(account.losses)
    source = checkpoints.manager.report().source if resumed else ""
    final = _digest(spec, trainer.model, trainer.optimizer.state_dict())
    return Outcome(resumed or None, source, account.batches, account.losses, final)


class _Counter:
    """Something of the user's."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def _with_accelerate(spec: Spec) -> Outcome:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if spec.sharding == "fsdp2" else None
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    if plugin is not None:
        as_on_gpus(accelerator, plugin)
    set_seed(7)
    model = tiny_model(spec.sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Numbers(BATCHES * _BATCH_SIZE * accelerator.num_processes)
    loader = torch.utils.data.DataLoader(data, batch_size=_BATCH_SIZE, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.1, STEPS * accelerator.num_processes
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = _Counter()
    accelerator.register_for_checkpointing(counter)
    account = Account(spec.killed_at, spec.directory)
    options: dict[str, Any] = {
        "memory_root": spec.memory,
        "job": "job",
        "persist": spec.persist,
        "save_interval_steps": _SAVE_EACH,
    }
    with AcceleratorCheckpoints(accelerator, spec.url, **options) as checkpoints:
        last = checkpoints.restore()
        step = last or 0
        for epoch in range(step // BATCHES, STEPS // BATCHES + 1):
            loader.set_epoch(epoch)
            for batch in checkpoints.skip_first_batches(loader, step % BATCHES):
                if step == STEPS:
                    break
                step += 1
                loss = model(**batch).loss
                account.saw(batch, loss)
                accelerator.backward(loss)
                account.step_begins(step)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                counter.seen += len(batch["input_ids"])
                if checkpoints.save(step) and spec.persist:
                    checkpoints.manager.wait(step, progress=False)
        source = "" if last is None else checkpoints.manager.report().source
    assert counter.seen == STEPS * _BATCH_SIZE
    final = _digest(spec, model, optimizer.state_dict())
    return Outcome(last, source, account.batches, account.losses, final)


def _rank(spec: Spec) -> dict[str, Any]:
    """The life of one rank."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    outcome = {"trainer": _with_trainer, "accelerate": _with_accelerate}[spec.loop](spec)
    dist.barrier()
    dist.destroy_process_group()
    return dataclasses.asdict(outcome)


# -- the launcher ----------------------------------------------------------------------------------


@contextlib.contextmanager
def running_launcher(log: Path) -> Iterator[Callable[[Spec], list[Outcome]]]:
    """Start jobs of two ranks, one after the other, and log what they print.

    Raises JobDied where a rank dies.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*TETHER, sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            text=True,
        )
    questions, answers = process.stdin, process.stdout
    assert questions is not None
    assert answers is not None

    def launch(spec: Spec) -> list[Outcome]:
        print(json.dumps(dataclasses.asdict(spec)), file=questions, flush=True)
        answer = json.loads(answers.readline() or '{"died": "the launcher has ended"}')
        if "died" in answer:
            raise JobDied(answer["died"])
        return [Outcome(**one) for one in answer["ranks"]]

    try:
        yield launch
    finally:
        process.kill()
        process.communicate()
        print(log.read_text(errors="replace")[-_LOG_CHARACTERS:])


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    # This imports DeepSpeed, if it is installed, which takes seconds.
    extract_model_from_parallel(torch.nn.Identity())
    for line in sys.stdin:
        print(json.dumps(_launched(Spec(**json.loads(line)))), file=answers, flush=True)


def _launched(spec: Spec) -> dict[str, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        ranks = elastic_launch(config, _rank)(spec)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return {"died": f"exit code {failure.exitcode}: {failure.message}"}
    return {"ranks": [ranks[rank] for rank in sorted(ranks)]}


if __name__ == "__main__":
    _main()
