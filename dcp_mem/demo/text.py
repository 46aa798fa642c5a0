"""The training text, and the batches cut from it."""

from importlib import resources
from typing import Final

import torch
from torch import Tensor

FILE: Final = (
    "as_you_like_it.txt"  # Shakespeare, about 1599: public domain; its source is told in README.md
)
RANK_STRIDE: Final = 1_000_003


class Text:
    """A text as a row of bytes."""

    def __init__(self) -> None:
        content = resources.files(__package__).joinpath(FILE).read_bytes()
        self._bytes = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()

    def batch(self, step: int, rank: int, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one rank at one step, each of shape (rows, context).

        A pure function of step and rank, so that a resumed run sees the batches that the
        interrupted one would have seen.
        """
        generator = torch.Generator().manual_seed(step * RANK_STRIDE + rank)
        starts = torch.randint(len(self._bytes) - context, (rows, 1), generator=generator)
        windows = self._bytes[starts + torch.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]
