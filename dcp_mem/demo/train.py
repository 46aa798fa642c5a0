"""Train a small language model with FSDP2, checkpointing through dcp_mem every few steps.

The script that the demo runs under torchrun. What it does with dcp_mem is what any training does:

    resume    loads the newest checkpoint that is whole
    save      takes one; dcp_mem flushes it to storage while training goes on
    close     waits at the end until all of them are there

The rest is a model, its text, and a journal, by which the demo can tell afterwards what happened.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_mem import MemoryStorageReader, MemoryStorageWriter, State, TrainState
from dcp_mem.common import faults
from dcp_mem.demo.account import KILLED_RANK, KILLED_SAVE, SIZES, Options

ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # torchrun's restarts so far
TEXT = resources.files(__package__).joinpath("as_you_like_it.txt").read_bytes()
Record = Callable[..., None]


def main(options: Options) -> None:
    dist.init_process_group("gloo")
    with recording(options.journals) as record:
        if options.kill and ATTEMPT == 0 and dist.get_rank() == KILLED_RANK:
            faults.arm(f"stage.copied:kill:{KILLED_SAVE}")
        training = Training(options.size)
        if options.save_every:
            train_with_checkpoints(training, options, record)
        else:
            train(training, options, record)
        record("finished", digest=training.digest(), parameters=training.parameters)
    dist.destroy_process_group()


def train_with_checkpoints(training: Training, options: Options, record: Record) -> None:
    """Resume where the last run was, train and save; on return all checkpoints are on storage."""
    resume(training, MemoryStorageReader(options.path, memory_root=options.memory_root), record)
    writer = MemoryStorageWriter(options.path, memory_root=options.memory_root)
    train(training, options, record, writer)
    writer.close(flush=True)
    for saved in writer.status():
        if saved.state is State.DURABLE:
            record("stored", stage=saved.stage_seconds, flush=saved.flush_seconds)


def resume(training: Training, reader: MemoryStorageReader, record: Record) -> None:
    """Load the newest checkpoint that is whole, if there is one."""
    if ATTEMPT > 0:
        say("torchrun has restarted all ranks")
    begun = time.perf_counter()
    if not reader.recoverable():
        say("no checkpoint yet: starting from scratch")
        return
    dcp.load({"training": training.state}, storage_reader=reader)
    seconds = time.perf_counter() - begun
    found = reader.report()
    name, source, passed_over = found.checkpoint_id, found.source, list(map(str, found.passed_over))
    record("resumed", name=name, source=source, seconds=seconds, passed_over=passed_over)
    say(f"resumed {name} from {source} in {seconds:.2f} s")


def train(
    training: Training, options: Options, record: Record, writer: MemoryStorageWriter | None = None
) -> None:
    """Take the steps that are left; where there is a writer, save every few of them."""
    for step in range(training.state.extra["step"] + 1, options.steps + 1):
        begun = time.perf_counter()
        loss = training.take_step(step)
        # Hexadecimal digits show all bits of the loss.
        record("step", step=step, loss=loss.hex(), seconds=time.perf_counter() - begun)
        line = f"step {step:>{len(str(options.steps))}}/{options.steps}  loss {loss:.4f}"
        if writer is not None and step % options.save_every == 0:
            seconds = save(training, f"step-{step}", writer, record)
            line += f"  saved step-{step}, training waited {seconds * 1000:.0f} ms"
        say(line)


def save(training: Training, name: str, writer: MemoryStorageWriter, record: Record) -> float:
    """Save a checkpoint; return the seconds for which training was blocked."""
    record("saving", name=name)
    begun = time.perf_counter()
    dcp.save({"training": training.state}, checkpoint_id=name, storage_writer=writer)
    seconds = time.perf_counter() - begun
    record("saved", name=name, seconds=seconds)
    return seconds


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


class Training:
    """The model, sharded over all ranks, and its optimizer; the same in every run."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(1599)
        torch.use_deterministic_algorithms(True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model = ByteModel(**SIZES[size])
        self.parameters = sum(one.numel() for one in self._model.parameters())
        for module in (*self._model.blocks, self._model):
            fully_shard(module, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, fused=True)
        self.state = TrainState(self._model, self._optimizer, extra={"step": 0})

    def take_step(self, step: int) -> float:
        """Take one optimizer step; return the loss averaged over all ranks."""
        loss: Tensor = self._model(*batch(step, self._model.context))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.state.extra["step"] = step
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def digest(self) -> str:
        """Return the SHA-256 of this rank's part of the parameters and the optimizer's state."""
        digest = hashlib.sha256()
        for parameter in self._model.parameters():
            for tensor in (parameter, *self._optimizer.state[parameter].values()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                digest.update(local.detach().numpy().tobytes())
        return digest.hexdigest()


class ByteModel(nn.Module):
    """A transformer that predicts the next byte of a text."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy; both are byte values of shape (rows, context)."""
        hidden = self.byte_embedding(inputs) + self.position_embedding(torch.arange(self.context))
        past_only = nn.Transformer.generate_square_subsequent_mask(self.context)
        for block in self.blocks:
            hidden = block(hidden, src_mask=past_only, is_causal=True)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, context: int) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets at a step, which are the same whenever it is taken."""
    generator = torch.Generator().manual_seed(step * 1_000_003 + dist.get_rank())
    starts = torch.randint(len(TEXT) - context, (4, 1), generator=generator)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@contextmanager
def recording(journals: str) -> Iterator[Record]:
    """Open this rank's journal, a line of JSON for each event; yield what writes to it."""
    name = f"rank-{dist.get_rank()}-attempt-{ATTEMPT}.jsonl"
    with open(Path(journals, name), "w", encoding="utf-8", buffering=1) as journal:

        def record(event: str, **facts: Any) -> None:
            journal.write(json.dumps({"event": event, "at": time.time(), **facts}) + "\n")

        try:
            yield record
        except BaseException as error:
            record("failed", error=str(error))
            raise


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
