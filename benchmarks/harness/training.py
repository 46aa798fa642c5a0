"""A small transformer in training, which saves at every step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.harness.calls import Call
    from benchmarks.harness.processes import Rank

NO_SAVE = "no save"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The transformer, and what it is shown in a step."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int

    @property
    def state_bytes(self) -> int:
        """About the size of parameters and AdamW's moments, in float32."""
        parameters = 12 * self.layers * self.width**2 + 2 * self.vocabulary * self.width
        return 3 * 4 * parameters

    @property
    def name(self) -> str:
        return (
            f"{self.layers} layers of width {self.width}, {self.vocabulary:,} tokens, batches of "
            f"{self.batch} × {self.length}"
        )


SMALL = Shape(layers=4, width=512, vocabulary=8192, batch=4, length=128)
TINY = Shape(layers=2, width=256, vocabulary=2048, batch=4, length=64)


class Trainer:
    """A transformer with AdamW: real steps, of forward, backward and optimizer."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.width // 64, 4 * shape.width, dropout=0.0, batch_first=True
        )
        self._model = nn.Sequential(
            nn.Embedding(shape.vocabulary, shape.width),
            nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False),
            nn.Linear(shape.width, shape.vocabulary),
        ).to(device)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        size = shape.batch, shape.length
        self._tokens = torch.randint(shape.vocabulary, size, device=device)
        self._loss = nn.CrossEntropyLoss()

    @property
    def tree(self) -> dict[str, Any]:
        """The state dict, as a trainer makes it for each save."""
        return {"model": self._model.state_dict(), "optim": self.optimizer.state_dict()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the state dict."""
        return tensors_of(self.tree)

    def compute(self) -> None:
        """Run forward and backward, and wait for them as loops do that print their loss."""
        self.optimizer.zero_grad()
        scores = self._model(self._tokens)
        loss = self._loss(scores.flatten(0, 1), self._tokens.flatten())
        loss.backward()
        loss.item()

    def update(self) -> float:
        """Let the optimizer step; return when it was done, by `time.perf_counter`."""
        self.optimizer.step()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of steps that save.

    Attributes:
        step: Median of whole steps: waiting for the save before, the call, and the training.
        waited: Median of the waiting for the save before.
    """

    step: float
    waited: float


class SavingLoop:
    """A training loop that saves at the beginning of every step, with one call."""

    def __init__(self, trainer: Trainer, call: Call | None, rank: Rank) -> None:
        self._trainer = trainer
        self._call = call
        self._rank = rank
        self._number = 0

    def run(self, steps: int) -> Steps:
        """Train for one step, which isn't counted, and then for `steps` more."""
        pending, took, waited = None, [], []
        for _ in range(1 + steps):
            start = time.perf_counter()
            if pending is not None:
                pending.result()
            waited.append(time.perf_counter() - start)
            if self._call is None:
                self._trainer.compute()
                self._trainer.update()
            else:
                pending = self._begin(self._call)
                self._trainer.compute()
                with self._call.stepping():
                    self._trainer.update()
            took.append(time.perf_counter() - start)
            if self._call is not None:
                self._call.forget(self._number - 1, self._rank)
        if pending is not None:
            pending.result()
        return Steps(median(took[1:]), median(waited[1:]))

    def check(self) -> None:
        """Save once more, train on, load, and compare with what was saved.

        Raises:
            AssertionError: Something else was saved.
        """
        if self._call is None:
            return
        expected = [tensor.clone() for tensor in self._trainer.tensors]
        pending = self._begin(self._call)
        self._trainer.compute()
        with self._call.stepping():
            self._trainer.update()
        if pending is not None:
            pending.result()
        into = _blank(self._trainer.tree)
        self._call.load(self._number, into)
        pairs = zip(expected, tensors_of(into), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise AssertionError("what was saved isn't the state at the call")

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    def _begin(self, call: Call) -> Any:
        self._number += 1
        return call.begin(self._number, self._trainer.tree)


def loops(trainer: Trainer, made: dict[str, Call], rank: Rank) -> dict[str, SavingLoop]:
    """Return a loop for each call, and one that doesn't save, by name."""
    return {NO_SAVE: SavingLoop(trainer, None, rank)} | {
        name: SavingLoop(trainer, call, rank) for name, call in made.items()
    }


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested dicts and lists, in their order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def _blank(tree: Any) -> Any:
    """Return a copy of nested dicts and lists whose tensors are zero."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: _blank(value) for key, value in tree.items()}
    return [_blank(value) for value in tree] if isinstance(tree, list) else tree
