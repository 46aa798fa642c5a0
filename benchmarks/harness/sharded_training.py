"""A small transformer in training, sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from benchmarks.harness.training import SMALL, Shape


class ShardedTraining:
    """Real steps of forward, backward and AdamW, on all ranks of the default group.

    Args:
        shape: Of the transformer.
    """

    def __init__(self, shape: Shape = SMALL) -> None:
        torch.manual_seed(1)
        layers = [
            nn.TransformerEncoderLayer(
                shape.width, shape.width // 64, 4 * shape.width, dropout=0.0, batch_first=True
            )
            for _ in range(shape.layers)
        ]
        self._model = nn.Sequential(
            nn.Embedding(shape.vocabulary, shape.width),
            *layers,
            nn.Linear(shape.width, shape.vocabulary),
        )
        for layer in layers:
            fully_shard(layer, mesh=_mesh())
        fully_shard(self._model, mesh=_mesh())
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length))
        self._loss = nn.CrossEntropyLoss()
        self._state: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return the state dict, as torch's helpers make it for saves and for loads in place."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        self._state = {"model": model, "optimizer": optimizer}
        return self._state

    def take(self, step: int) -> None:
        """Go on from what was loaded into the last state dict.

        Args:
            step: The training step that it is of.
        """
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=self._state["model"],
            optim_state_dict=self._state["optimizer"],
        )

    def step(self) -> None:
        """Run forward, backward and the optimizer's step."""
        self._optimizer.zero_grad()
        scores = self._model(self._tokens)
        loss = self._loss(scores.flatten(0, 1), self._tokens.flatten())
        loss.backward()
        loss.item()
        self._optimizer.step()


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))
