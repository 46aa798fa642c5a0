"""A byte-level transformer language model, and the sizes that the demo trains it in."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Shape of the model and of one rank's batch."""

    width: int
    layers: int
    heads: int
    context: int
    rows: int


SIZES: Final = {
    "default": Size(width=512, layers=8, heads=8, context=64, rows=4),
    "small": Size(width=256, layers=3, heads=4, context=32, rows=4),
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.queries_keys_values = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.feed_norm = nn.LayerNorm(size.width)
        self.feed_in = nn.Linear(size.width, 4 * size.width)
        self.feed_out = nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, of the same shape as its input.

        `hidden`: of shape (rows, context, width).
        """
        hidden = hidden + self._attend(self.attention_norm(hidden))
        feed: Tensor = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(hidden))))
        return hidden + feed

    def _attend(self, hidden: Tensor) -> Tensor:
        rows, context, width = hidden.shape
        packed = self.queries_keys_values(hidden).view(rows, context, 3, self.heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, context, width))
        return out


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of predicting `targets`; byte values of shape (rows, context).

        `inputs`: byte values of shape (rows, context). `targets`: the byte behind each of them, of
        the same shape.
        """
        positions = torch.arange(inputs.shape[1])
        hidden = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(model: nn.Module) -> tuple[int, int]:
    """Count parameters, and bytes of the training state: AdamW keeps two moments each.

    `model`: its parameters may be on the meta device.
    """
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), 3 * sum(p.nbytes for p in parameters)


def state_bytes(size: Size) -> int:
    """Compute the bytes of the training state of a model of that size, without building one."""
    with torch.device("meta"):
        return measure(ByteModel(size))[1]
