"""Train a small language model with FSDP2, checkpointing through dcp_mem every few steps.

The script that the demo runs under torchrun. What it does with dcp_mem is what any training does:
`resume` loads the newest checkpoint that is whole, `save` takes one, and the writer is closed at
the end.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_mem import MemoryStorageReader, MemoryStorageWriter, NoRecoverableCheckpoint, State
from dcp_mem.common import faults
from dcp_mem.demo import journal
from dcp_mem.demo.journal import Journal
from dcp_mem.demo.model import SIZES, ByteModel, Size, measure
from dcp_mem.demo.schedule import KILLED_RANK, checkpoint_id
from dcp_mem.demo.text import Text

SEED: Final = 1599
LEARNING_RATE: Final = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one run of the script; `save_every` 0 means no checkpoints at all."""

    steps: int
    stop_after: int
    save_every: int
    size: Size
    path: str
    memory_root: str
    journal: Path
    kill_in_save: int


class TrainingState(Stateful):
    """Everything that a checkpoint holds: the model, the optimizer and the steps taken."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded state, as DCP saves it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a loaded state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]


def main() -> None:
    """Run the training that the command line asks for."""
    options = parse_options()
    with process_group(), recording(options) as record:
        arm_fault(options)
        training = build(options.size)
        record.record(journal.Started(*measure(training.model)))
        if options.save_every:
            train_with_checkpoints(training, options, record)
        else:
            train(training, options, record)
            finish(training, record)


def train_with_checkpoints(training: TrainingState, options: Options, record: Journal) -> None:
    """Resume where the last run was, train and save; on return all checkpoints are on storage."""
    resume(training, options, record)
    writer = MemoryStorageWriter(options.path, memory_root=options.memory_root)
    train(training, options, record, writer)
    writer.close(flush=True)
    record_stored(writer, record)
    finish(training, record)


def resume(training: TrainingState, options: Options, record: Journal) -> None:
    """Load the newest checkpoint that is whole, if there is one."""
    if journal.current_attempt() > 0:
        say("torchrun has restarted all ranks")
    reader = MemoryStorageReader(options.path, memory_root=options.memory_root)
    begun = time.perf_counter()
    try:
        dcp.load({"training": training}, storage_reader=reader)
    except CheckpointException as error:
        if not nothing_to_recover(error):
            raise
        # Asking a fresh AdamW for its state makes torch take an empty step; forget that step.
        training.optimizer.state.clear()
        say("no checkpoint yet: starting from scratch")
        return
    seconds = time.perf_counter() - begun
    found = reader.report()
    passed_over = [str(reason) for reason in found.passed_over]
    record.record(journal.Recovered(found.checkpoint_id, found.source, seconds, passed_over))
    say(f"resumed {found.checkpoint_id} from {found.source} in {seconds:.2f} s")


def nothing_to_recover(error: CheckpointException) -> bool:
    """Tell whether a load failed on every rank because there is no checkpoint."""
    return all(isinstance(cause, NoRecoverableCheckpoint) for cause, _ in error.failures.values())


def train(
    training: TrainingState,
    options: Options,
    record: Journal,
    writer: MemoryStorageWriter | None = None,
) -> None:
    """Take the steps that are left, saving every `save_every` of them through the writer.

    `writer`: saves the checkpoints; None for a run without.
    """
    text = Text()
    for step in range(training.step + 1, options.stop_after + 1):
        begun = time.perf_counter()
        loss = take_step(training, text, step, options.size)
        record.record(journal.StepTaken(step, loss.hex(), time.perf_counter() - begun))
        line = f"step {step:>{len(str(options.steps))}}/{options.steps}  loss {loss:.4f}"
        if writer is not None and step % options.save_every == 0:
            seconds = save(training, writer, record)
            line += f"  saved {checkpoint_id(step)}, training waited {seconds * 1000:.0f} ms"
        say(line)


def take_step(training: TrainingState, text: Text, step: int, size: Size) -> float:
    """Take one optimizer step; return the loss averaged over all ranks."""
    inputs, targets = text.batch(step, dist.get_rank(), size.rows, size.context)
    loss = training.model(inputs, targets)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step = step
    return average(loss.detach())


def save(training: TrainingState, writer: MemoryStorageWriter, record: Journal) -> float:
    """Save a checkpoint; return the seconds for which training was blocked."""
    name = checkpoint_id(training.step)
    record.record(journal.SaveBegun(name))
    begun = time.perf_counter()
    dcp.save({"training": training}, checkpoint_id=name, storage_writer=writer)
    seconds = time.perf_counter() - begun
    record.record(journal.SaveReturned(name, seconds))
    return seconds


def record_stored(writer: MemoryStorageWriter, record: Journal) -> None:
    """Record what became of the saves."""
    for found in writer.status():
        if found.state is State.DURABLE:
            record.record(journal.Stored(found.name, found.stage_seconds, found.flush_seconds))


def finish(training: TrainingState, record: Journal) -> None:
    """Record where the run ended and what its state was, bit for bit."""
    record.record(journal.Finished(training.step, digest(training)))


def build(size: Size) -> TrainingState:
    """Make the model, sharded over all ranks, and its optimizer; the same in every run."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = ByteModel(size)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return TrainingState(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True))


def average(loss: Tensor) -> float:
    """Compute the mean of a value over all ranks."""
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest(training: TrainingState) -> str:
    """Compute the SHA-256 of this rank's part of the parameters and the optimizer state."""
    own = hashlib.sha256()
    for parameter in training.model.parameters():
        own.update(local_bytes(parameter))
        for _, value in sorted(training.optimizer.state[parameter].items()):
            own.update(local_bytes(value))
    return own.hexdigest()


def local_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of this rank's part of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def arm_fault(options: Options) -> None:
    """Have one rank of the first attempt killed in the middle of a save, where that is asked."""
    armed = options.kill_in_save and journal.current_attempt() == 0
    if armed and dist.get_rank() == KILLED_RANK:
        faults.arm(f"stage.copied:kill:{options.kill_in_save}")


@contextmanager
def process_group() -> Iterator[None]:
    """Make the process group of all ranks."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def recording(options: Options) -> Iterator[Journal]:
    """Open the journal of this rank, which also learns of an exception that ends the run."""
    record = Journal(options.journal, dist.get_rank())
    try:
        yield record
    except BaseException as error:
        record.record(journal.Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        record.close()


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options() -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="dcp_mem.demo.train", description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stop-after", type=int, help="end the run early, after this step")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument(
        "--path", default="", help="where checkpoints are stored: a directory or URL"
    )
    parser.add_argument("--memory-root", default="", help="memory root")
    parser.add_argument("--journal", type=Path, required=True, help="directory of the journals")
    parser.add_argument("--kill-in-save", type=int, default=0, help="kill rank 1 in its n-th save")
    given = vars(parser.parse_args())
    given["size"] = SIZES[given["size"]]
    given["stop_after"] = given["stop_after"] or given["steps"]
    return Options(**given)


if __name__ == "__main__":
    main()
